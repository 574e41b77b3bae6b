"""Folders in shared memory or the temporary directory that do not outlive their process for long.

A folder's name says which process owns it. SIGKILL leaves no chance to remove it, so whoever makes
the next one removes those of dead processes. Linux only, like /dev/shm. Standard library alone.
"""

import hashlib
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_CLAIM = ".temper-owner"
_SESSION = re.compile(r"session_(?P<time>\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6})_(?P<process>\d+)")
"""How Ray names the folder of a cluster: by the local time and the driver's process id."""
_SESSION_STARTS_WITHIN_S = 120.0
_NAME = re.compile(
    r"temper-(?P<kind>[a-z]+)-(?P<user>\d+)-(?P<process>\d+)-(?P<start>\d+)-(?P<space>[0-9a-f]{8})-[0-9a-f]{8}"
)


def find_shared_memory_root() -> Path:
    """Return /dev/shm, or the temporary directory on a machine without it."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def make_folder_path(kind: str, *, root: Path) -> Path:
    """Return a path that no other process uses, after removing what dead processes left in `root`.

    The name is `temper-KIND-USER-PROCESS-START-SPACE-RANDOM`. START, the process's start time in
    clock ticks since boot, tells a process from a later one with the same id.

    Args:
        kind: Lowercase letters, for people who look at the directory.
        root: Where the folder will be made, by the caller.
    """
    remove_orphans(root)
    process = os.getpid()
    owner = f"{os.getuid()}-{process}-{_start_time(process)}-{_process_space()}"
    return root / f"temper-{kind}-{owner}-{uuid.uuid4().hex[:8]}"


def make_temporary_folder(kind: str) -> Path:
    """Make a folder, readable by this user alone, in the temporary directory; see `make_folder_path`."""
    folder = make_folder_path(kind, root=Path(tempfile.gettempdir()))
    folder.mkdir(mode=0o700)
    return folder


def remove_orphans(root: Path) -> list[Path]:
    """Remove folders in `root` whose owner, a process of this user on this machine, is dead.

    Other names, other users, and processes of another container or an earlier boot, about which
    nothing is known here, are left alone.

    Returns:
        What was removed.
    """
    removed = []
    for folder in root.glob("temper-*"):
        if not _is_orphan(folder.name):
            continue
        # Another process may remove it at the same time, which is as good.
        shutil.rmtree(folder, ignore_errors=True)
        logger.info("removed %s, which a process that is dead had left", folder)
        removed.append(folder)
    return removed


def remove_leftovers() -> list[Path]:
    """Remove what dead processes of this user left in shared memory and the temporary directory."""
    roots = {find_shared_memory_root(), Path(tempfile.gettempdir())}
    return [folder for root in sorted(roots) for folder in remove_orphans(root)]


def claim_folder(folder: Path) -> None:
    """Note that a folder of another program belongs to this process; see `remove_claimed_folders`."""
    (folder / _CLAIM).write_text(make_folder_path("claim", root=folder).name)


@contextmanager
def announce_session(root: Path) -> Iterator[None]:
    """Note, while the body starts Ray, that a session folder in `root` will be this process's.

    A process that is killed in the body cannot claim the folder; `remove_claimed_folders` finds it by the note.
    """
    root.mkdir(parents=True, exist_ok=True)
    note = make_folder_path("session", root=root)
    note.mkdir()
    try:
        yield
    finally:
        note.rmdir()


def remove_claimed_folders(root: Path) -> list[Path]:
    """Remove folders in `root` that a process claimed or announced which is dead; returns them."""
    removed = [claim.parent for claim in root.glob(f"*/{_CLAIM}") if _is_orphan(claim.read_text())]
    notes = [note for note in root.glob("temper-session-*") if _is_orphan(note.name)]
    for note in notes:
        removed += [folder for folder in root.glob("session_*") if _is_announced(folder, note=note)]
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
        logger.info("removed %s, which a process that is dead had left", folder)
    for note in notes:
        shutil.rmtree(note, ignore_errors=True)
    return removed


def _is_announced(folder: Path, *, note: Path) -> bool:
    """Return whether a session folder is the one that a dead process was about to make."""
    session, owner = _SESSION.fullmatch(folder.name), _NAME.fullmatch(note.name)
    if (
        session is None
        or owner is None
        or session["process"] != owner["process"]
        or folder.is_symlink()
    ):
        return False
    # The id may be another process's by now, which may have a cluster of its own.
    begin = datetime.strptime(session["time"], "%Y-%m-%d_%H-%M-%S_%f").timestamp()
    return (
        -1.0 < begin - note.stat().st_mtime < _SESSION_STARTS_WITHIN_S
        and folder.stat().st_uid == os.getuid()
    )


def _is_orphan(name: str) -> bool:
    """Return whether a name says that its owner is of this user and machine, and it is dead."""
    found = _NAME.fullmatch(name)
    if found is None or int(found["user"]) != os.getuid() or found["space"] != _process_space():
        return False
    return _start_time(int(found["process"])) != int(found["start"])


def _start_time(process: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is not running."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command in parentheses may contain anything, also spaces and parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(fields[18])


def _process_space() -> str:
    """Return a name for the boot and the container within which process ids mean something."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    # A container that shares /dev/shm with its host has process ids of its own.
    return hashlib.sha256(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]
