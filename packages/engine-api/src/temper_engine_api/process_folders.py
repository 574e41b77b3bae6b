"""Temporary folders that are removed after the death of their process.

A folder's name identifies the process that owns it. A process that is killed cannot remove its
folders, so the next process that creates a folder also removes the folders of dead processes.
Without /proc, as on macOS, nothing shows which processes are dead, and no folder is removed.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER_NAME = re.compile(
    r"temper-(?P<kind>[a-z]+)-(?P<user>\d+)-(?P<process>\d+)-(?P<start>\d+)-(?P<space>[0-9a-f]{8})-[0-9a-f]{8}"
)

SHARED_MEMORY = Path("/dev/shm")
_CLAIMS = ".temper-claims"
"""File in a folder that lists files in shared memory: device, inode and name of each."""
_LOCK = ".temper-lock"
"""File in a folder that its owner keeps locked; see `lock_folder`."""
_locks: dict[Path, int] = {}
"""Descriptors of the locks of this process, by folder."""


def make_folder_path(kind: str, *, root: Path) -> Path:
    """Return a unique path for a folder in `root`; first remove folders of dead processes there.

    The name is `temper-KIND-USER-PROCESS-START-SPACE-RANDOM`. START is the start time of the
    process in clock ticks since boot, which distinguishes it from a later process with the same id.

    Args:
        kind: Purpose of the folder, in lowercase letters.
        root: Folder where the caller makes the new one.
    """
    remove_orphans(root)
    process = os.getpid()
    owner = f"{os.getuid()}-{process}-{_start_time(process)}-{_process_space()}"
    return root / f"temper-{kind}-{owner}-{uuid.uuid4().hex[:8]}"


def make_temporary_folder(kind: str) -> Path:
    """Make a folder in the temporary directory that only this user can read."""
    folder = make_folder_path(kind, root=Path(tempfile.gettempdir()))
    folder.mkdir(mode=0o700)
    return folder


@contextmanager
def open_temporary_folder(kind: str) -> Iterator[Path]:
    """Make a folder like `make_temporary_folder`, and remove it after the body."""
    folder = make_temporary_folder(kind)
    try:
        yield folder
    finally:
        remove_folder(folder)


def claim_shared_memory(folder: Path, files: Iterable[Path]) -> None:
    """Let files in shared memory be removed together with a folder of `make_temporary_folder`.

    Use this for files that a library names without a process id, because no other process could
    find out that their owner is dead.

    Args:
        folder: The folder. Claims that it had before are replaced.
        files: Files directly in /dev/shm. One that does not exist any more is left out.
    """
    claims = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            state = file.lstat()
            claims.append((state.st_dev, state.st_ino, file.name))
    partial = folder / f"{_CLAIMS}-partial"
    partial.write_text(json.dumps(claims))
    partial.replace(folder / _CLAIMS)


def lock_folder(folder: Path) -> None:
    """Lock a folder of this process until the process ends. Idempotent.

    Use this for large folders in shared memory. Containers may share it, but not process ids, so
    the lock alone shows a process in another container whether the owner lives.
    """
    for other in [path for path in _locks if not path.exists()]:
        os.close(_locks.pop(other))
    if folder in _locks:
        return
    partial = folder / f"{_LOCK}-partial"
    descriptor = os.open(partial, os.O_CREAT | os.O_RDWR, 0o600)
    # Locked before it has its name, so that no other process sees it without its lock.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    partial.rename(folder / _LOCK)
    _locks[folder] = descriptor


def remove_folder(folder: Path) -> None:
    """Remove a folder, and the files that `claim_shared_memory` has claimed for it."""
    for device, inode, name in _read_claims(folder):
        path = SHARED_MEMORY / Path(name).name
        # Errors are ignored because another process may remove it at the same time.
        with contextlib.suppress(OSError):
            state = path.lstat()
            is_own = stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()
            # A later file may have the same name.
            if is_own and (state.st_dev, state.st_ino) == (device, inode):
                path.unlink()
    # Errors are ignored for the same reason.
    shutil.rmtree(folder, ignore_errors=True)


def _read_claims(folder: Path) -> list[tuple[int, int, str]]:
    """Return the claims of a folder, which is empty if this user has not written any."""
    file = folder / _CLAIMS
    try:
        # Only this user can write to a folder of `make_temporary_folder`, but not to all others.
        if not is_own_folder(folder) or folder.stat().st_mode & 0o022:
            return []
        return [
            (int(device), int(inode), str(name))
            for device, inode, name in json.loads(file.read_text())
        ]
    except (OSError, TypeError, ValueError):  # there are none, or they are damaged
        return []


def remove_orphans(root: Path) -> list[Path]:
    """Remove folders in `root` whose owner was a process of this user and is dead.

    Two things must agree: the name (user, process id, start time, boot and PID namespace) and the
    user who owns the folder on disk. A file or a symbolic link of that name is left alone.
    Folders of other users are not removed. A folder whose owner ran in another container is removed
    only if `lock_folder` was called for it, because this process cannot look such an owner up.

    Returns:
        The removed folders.
    """
    removed = []
    for folder in root.glob("temper-*"):
        if not is_own_folder(folder) or not (is_orphan(folder.name) or _is_unlocked(folder)):
            continue
        remove_folder(folder)
        logger.info("removed %s, which a dead process had left", folder)
        removed.append(folder)
    return removed


def is_own_folder(folder: Path) -> bool:
    """Return True if this user owns a folder; anyone may choose a name in a shared root."""
    try:
        state = folder.lstat()
    except FileNotFoundError:  # removed by another process
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()


def is_orphan(name: str) -> bool:
    """Return True if the owner in a name was a process of this user and host, and is dead."""
    match = FOLDER_NAME.fullmatch(name)
    if match is None or int(match["user"]) != os.getuid() or match["space"] != _process_space():
        return False
    return _start_time(int(match["process"])) != int(match["start"])


def _is_unlocked(folder: Path) -> bool:
    """Return True if a process of this user in another container locked a folder, and is dead."""
    match = FOLDER_NAME.fullmatch(folder.name)
    if match is None or int(match["user"]) != os.getuid() or match["space"] == _process_space():
        return False
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # it was never locked, or another process has just removed it
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner lives, or this file system has no locks
        return False
    finally:
        os.close(descriptor)
    return True


def _start_time(process: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is not running."""
    try:
        stat = Path(f"/proc/{process}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may contain any bytes, also spaces and parentheses.
    state, *fields = stat.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])


def _process_space() -> str:
    """Return an id of the boot and the PID namespace, within which process ids are unique."""
    if not Path("/proc/self").exists():
        return "unknown"  # no folder of this name is ever an orphan
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    # A container may have the host's /dev/shm, but its process ids differ from the host's.
    return hashlib.sha256(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]
