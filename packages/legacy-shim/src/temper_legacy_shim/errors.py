"""Errors of the shim. Every message has the fault, the expected value and the remedy.

ShimError
├── UsageError(ValueError)          arguments that conflict, are missing, or have no effect
├── LayoutError(ValueError)         a directory is no known checkpoint, or a file of it is missing
├── DamagedFileError(ValueError)    a file is truncated, malformed, or contradicts the others
│   └── UnsafeFileError             a file asks for a global that no checkpoint needs
├── ScriptError(ValueError)         a launch script that cannot be followed without running it
├── MissingExtraError(ModuleNotFoundError)  a package was imported whose extra is not installed
├── OutputError(RuntimeError)       the output exists, is in use, or is not writable
└── VerificationError(RuntimeError) written data differ from the read data or a receipt
"""

import shlex

_SIBLINGS = {
    "checkpoint": ("engine-api",),
    "workers": ("engine-api", "engine-fsdp", "trainer"),
    "workers-megatron": ("engine-api", "engine-fsdp", "engine-megatron", "trainer"),
}
"""Packages of Temper that an extra requires. A clone's pip has to get them from the clone, too."""


class ShimError(Exception):
    """Root of every error that the shim raises on purpose."""


class UsageError(ShimError, ValueError):
    """Arguments conflict, are missing, have no effect, or name an input that does not exist."""


class LayoutError(ShimError, ValueError):
    """A directory is no checkpoint we know, or a file of it is missing."""


class DamagedFileError(ShimError, ValueError):
    """A file is truncated, malformed, or contradicts the others."""


class UnsafeFileError(DamagedFileError):
    """A file requests a global that no checkpoint needs; it is not executed.

    Args:
        message: for the user.
        expected: the global, as ``module.name``; empty where it is an opcode that is refused.
    """

    def __init__(self, message: str, *, expected: str = "") -> None:
        super().__init__(message)
        self.expected = expected


class OutputError(ShimError, RuntimeError):
    """The output already exists, is in use, or is not writable."""


class VerificationError(ShimError, RuntimeError):
    """Written data differ from the read data, or a receipt does not match."""


class ScriptError(ShimError, ValueError):
    """A script is no bash, or cannot be followed without execution; names the line."""


class MissingExtraError(ShimError, ModuleNotFoundError):
    """A package was imported whose extra is not installed; names the extra."""


def format_extra_install(extra: str) -> str:
    """Return how to install an extra, from a clone and from wheels: no package is on an index."""
    paths = shlex.join(
        f"./packages/{name}" for name in (*_SIBLINGS[extra], f"legacy-shim[{extra}]")
    )
    return (
        f"pip install {paths} in a clone of Temper (with its wheels in DIR: pip install "
        f"--find-links DIR 'temper-legacy-shim[{extra}]')"
    )


def explain_missing_extra(
    feature: str, extra: str, error: ModuleNotFoundError
) -> ModuleNotFoundError:
    """Return the error for an import without its extra, or the error if it is ours."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "temper_legacy_shim"):
        return error
    return MissingExtraError(
        f"temper_legacy_shim.{feature} needs {module}, which is not installed: run "
        f"{format_extra_install(extra)}.",
        name=error.name,
    )
