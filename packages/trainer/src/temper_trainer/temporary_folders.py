"""Leftovers from dead processes in shared memory and temporary folders, including Ray's.

`temper_engine_api.process_folders` makes and names the other folders. Ray names its own, so a
process marks them as its own. Linux only, because it reads /proc.
"""

import contextlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from temper_engine_api.errors import ConfigError
from temper_engine_api.process_folders import (
    FOLDER_NAME,
    is_orphan,
    is_own_folder,
    make_folder_path,
    remove_orphans,
)

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_CLAIM = ".temper-owner"
_SESSION = re.compile(r"session_(?P<time>\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6})_(?P<process>\d+)")
"""Ray's name for a cluster's folder: the driver's local time and process id."""
_SESSION_STARTS_WITHIN_S = 120.0
"""Maximum time between a session's announcement and the creation of its folder."""


def find_shared_memory_root() -> Path:
    """Return /dev/shm, or the temporary directory if the host has no /dev/shm."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def remove_leftovers() -> list[Path]:
    """Remove what dead processes left in shared memory, the temporary directory and Ray's."""
    roots = {find_shared_memory_root(), Path(tempfile.gettempdir())}
    orphans = [folder for root in sorted(roots) for folder in remove_orphans(root)]
    return orphans + remove_claimed_folders(find_ray_root())


def find_ray_root() -> Path:
    """Return the folder where Ray creates a folder with logs and sockets for each cluster.

    Ray allows all users to write to this folder. Therefore only this user can enter its parent.
    Both names are short, because a socket path may have at most 107 characters.
    """
    # These are the places where Ray would make its folder. Ray is not imported to ask it.
    parent = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")
    return parent / f"ray-{os.getuid()}" / "r"


def make_ray_root() -> Path:
    """Make the folder of `find_ray_root`, and return it.

    Raises:
        ConfigError: If its parent is another user's, or a file.
    """
    root = find_ray_root()
    # An existing file or folder is checked below.
    with contextlib.suppress(FileExistsError):
        root.parent.mkdir(mode=0o700)
    if not is_own_folder(root.parent):
        raise ConfigError(
            f"{root.parent} is not a folder of this user, but Ray's files would be in it: remove "
            "it, or set TMPDIR to another folder."
        )
    root.parent.chmod(0o700)
    root.mkdir(exist_ok=True)
    return root


def claim_folder(folder: Path) -> None:
    """Record that this process owns a folder which another program has created.

    Such a folder cannot be named after its owner. See `remove_claimed_folders`.
    """
    name = make_folder_path("claim", root=folder).name
    (folder / _CLAIM).write_text(f"{name} {_identify(folder)}")


@contextmanager
def announce_session(root: Path) -> Iterator[None]:
    """Record in `root` that this process starts Ray, which makes a session folder there.

    Start Ray inside the ``with`` block. `claim_folder` can mark the session folder as this
    process's only after Ray has started. If the process is killed earlier,
    `remove_claimed_folders` finds the folder by this record.
    """
    root.mkdir(parents=True, exist_ok=True)
    note = make_folder_path("session", root=root)
    note.mkdir()
    try:
        yield
    finally:
        note.rmdir()


def remove_claimed_folders(root: Path) -> list[Path]:
    """Remove folders in `root` that a dead process claimed or announced; return them."""
    removed = [
        claim.parent
        for claim in root.glob(f"*/{_CLAIM}")
        if is_own_folder(claim.parent) and _is_dead_claim(claim)
    ]
    notes = [
        note
        for note in root.glob("temper-session-*")
        if is_orphan(note.name) and is_own_folder(note)
    ]
    for note in notes:
        removed += [folder for folder in root.glob("session_*") if _is_announced(folder, note=note)]
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
        logger.info("removed %s, which a dead process had left", folder)
    # Remove the notes last: the next process finds the folders by them if this one is killed.
    for note in notes:
        shutil.rmtree(note, ignore_errors=True)
    return removed


def _is_dead_claim(claim: Path) -> bool:
    """Return True if a dead process of this user made a claim for the folder that it is in.

    Ray lets every user of the machine write to the folder, so the claim may be anything.
    """
    try:
        # A named pipe must not block, and a link is not followed.
        descriptor = os.open(claim, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # removed by another process, a link or a socket
        return False
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid():
            return False
        text = os.read(descriptor, 1000).decode(errors="replace")
    finally:
        os.close(descriptor)
    owner, _, folder = text.partition(" ")
    # A claim may have been moved here from the folder of another run.
    return is_orphan(owner) and folder == _identify(claim.parent)


def _identify(folder: Path) -> str:
    """Return what distinguishes a folder from all others, whatever their names."""
    state = folder.lstat()
    return f"{state.st_dev}:{state.st_ino}"


def _is_announced(folder: Path, *, note: Path) -> bool:
    """Return True if a session folder is the one that a dead process had announced."""
    session, owner = _SESSION.fullmatch(folder.name), FOLDER_NAME.fullmatch(note.name)
    if (
        session is None
        or owner is None
        or session["process"] != owner["process"]
        or not is_own_folder(folder)
    ):
        return False
    # The id may have been reused by a process with another cluster, so the time must match, too.
    begin = datetime.strptime(session["time"], "%Y-%m-%d_%H-%M-%S_%f").timestamp()
    return -1.0 < begin - note.stat().st_mtime < _SESSION_STARTS_WITHIN_S
