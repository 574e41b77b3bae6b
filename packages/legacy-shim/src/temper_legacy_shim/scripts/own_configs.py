"""The user's own YAML that a launch names with ``--config-path`` and ``--config-name``, looked for around the script."""

import re
from pathlib import Path

from temper_legacy_shim.configs.files import OldFile, entry_of, read_old_file
from temper_legacy_shim.scripts.launches import Launch

_PACKAGED = re.compile(r"^(?:\./)?config/?$|(?:verl/trainer|recipe/\w+(?:/src)?|verl/experimental/\w+)/config/?$")
"""Folders of the old package: its programs' own, relative to their module, or the same from somewhere else."""


def find_own_config(launch: Launch, folder: Path) -> OldFile | None:
    """The file, or None where the launch uses the old package's own, or it is not there.

    The part of the path that only a run would know (``$PROJECT_DIR/...``) is taken to be the script's folder or one above it.

    Raises:
        DamagedFileError: it is no YAML.
    """
    if not uses_own_config(launch) or launch.config_name is None:
        return None
    given = launch.config_path or ""
    parts = given.split("/")
    unknown = max((number for number, part in enumerate(parts) if "$" in part or "`" in part), default=-1)
    tail = "/".join(parts[unknown + 1 :])
    name = launch.config_name.removesuffix(".yaml") + ".yaml"
    for base in (folder, *folder.resolve().parents[:6]):
        path = (
            base / tail / name if not (launch.config_path or "").startswith("/") or unknown >= 0 else Path(launch.config_path or "") / name
        )
        if path.is_file():
            return read_old_file(path)
    return None


def uses_own_config(launch: Launch) -> bool:
    """Whether the file is the user's own: one of another name than the old package's, or of the same name in another folder."""
    name = (launch.config_name or "").removesuffix(".yaml").rpartition("/")[2]
    is_packaged = bool(entry_of(name)) and _PACKAGED.search(launch.config_path or "config") is not None
    return bool(name) and "$" not in name and not is_packaged
