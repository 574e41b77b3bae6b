"""Errors of the shim. Every message has the fault, the expected value and the remedy.

ShimError ├── UsageError(ValueError)          options that conflict, are missing, or have no effect
on this input ├── LayoutError(ValueError)         a directory is no checkpoint that we know, or a
file of it is missing ├── DamagedFileError(ValueError)    a file is truncated, malformed, or
contradicts the others; names file and key │   └── UnsafeFileError             a file asks for
something that no checkpoint needs; names the global ├── ScriptError(ValueError)         a launch
script is no bash, or can't be followed without executing it; names the line ├──
MissingExtraError(ModuleNotFoundError)  a room was imported whose extra is not installed; names the
extra ├── OutputError(RuntimeError)       the output exists, is in use, or can't be written └──
VerificationError(RuntimeError) what was written is not what was read, or a receipt does not hold
"""


class ShimError(Exception):
    """Root of every error that the shim raises on purpose."""


class UsageError(ShimError, ValueError):
    """Options conflict, are missing, or have no effect on this input."""


class LayoutError(ShimError, ValueError):
    """A directory is no checkpoint that we know, or a file of it is missing."""


class DamagedFileError(ShimError, ValueError):
    """A file is truncated, malformed, or contradicts the others."""


class UnsafeFileError(DamagedFileError):
    """A file requests a global that no checkpoint needs; it is not executed.

    Args:
        message: for the user.
        wanted: the global, as ``module.name``; empty where it is an opcode that is refused.
    """

    def __init__(self, message: str, *, expected: str = "") -> None:
        super().__init__(message)
        self.expected = expected


class OutputError(ShimError, RuntimeError):
    """The output already exists, is in use, or is not writable."""


class VerificationError(ShimError, RuntimeError):
    """Written data differ from the read data, or a receipt does not match."""


class ScriptError(ShimError, ValueError):
    """A launch script is no bash, or asks for more than a reader that executes nothing can follow.

    The message names the line.
    """


class MissingExtraError(ShimError, ModuleNotFoundError):
    """A room was imported whose extra is not installed."""


def explain_missing_extra(
    feature: str, extra: str, error: ModuleNotFoundError
) -> ModuleNotFoundError:
    """Return the error for an import without its extra.

    A sentence that names it, or the error itself if the module is ours.
    """
    module = (error.name or "").partition(".")[0]
    if module in ("", "temper_legacy_shim"):
        return error
    return MissingExtraError(
        f"temper_legacy_shim.{feature} needs {module}, which is not installed: pip install "
        f"'temper-legacy-shim[{extra}]'.",
        name=error.name,
    )
