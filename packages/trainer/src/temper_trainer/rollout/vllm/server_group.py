"""End the process group of a server, and remove the shared memory that its workers leave."""

import contextlib
import logging
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from temper_engine_api.process_folders import SHARED_MEMORY, claim_shared_memory

logger = logging.getLogger(__name__)

CLAIM_INTERVAL_S = 5.0
"""Time between two scans of shared memory while a server starts, which takes minutes."""
SCAN_TIMEOUT_S = 2.0
"""Time limit of a scan of shared memory before a group is killed or a server is ready."""
_SEMAPHORES = "sem.mp-*"
"""Files of the locks of Python's multiprocessing. Its resource tracker removes them, unless it is
killed, too.
"""
_WORKER_NAME = re.compile(r"psm_[0-9a-f]+|[0-9]+-[a-z]+:.*cpushm_.*|sem\.mp-[0-9a-z_]+")
"""Names that Python's SharedMemory and locks choose, and those of vLLM's collectives between CPU
workers.
"""

_File = tuple[int, int]
"""Device and inode."""


def kill_server_group(group: int) -> None:
    """Kill a process group; first remove the shared memory that only its processes map.

    Workers of a tensor-parallel vLLM exchange messages through shared memory. Its names contain no
    process id, so a later start cannot find out who owned it. This function removes the names, and
    the memory is freed when the processes end. If they have ended before, `claim_worker_memory` has
    recorded the files, and they are removed with its folder.

    Raises:
        ProcessLookupError: If the group has no process.
    """
    try:
        _remove_shared_memory(group)
    except Exception:
        # A server that survives would occupy its GPUs, and its caller would wait forever.
        logger.exception("could not remove the shared memory of process group %d", group)
    finally:
        os.killpg(group, signal.SIGKILL)


@contextlib.contextmanager
def claim_worker_memory(folder: Path) -> Iterator[None]:
    """Let the shared memory that workers make in the body be removed with a folder of the trainer.

    `kill_server_group` finds only what living processes map, and only if a busy host lets it look
    in time. It finds nothing if all processes of the group are killed at once. A claim that fails
    is logged, and the server starts without it.
    """
    group, is_over = os.getpgrp(), threading.Event()

    def claim_all() -> None:
        is_last = is_logged = False
        while not is_last:
            is_last = is_over.wait(CLAIM_INTERVAL_S)
            try:
                claim_shared_memory(folder, _find_shared_memory(group))
            except OSError as error:  # for example a full disk
                if not is_logged:
                    logger.warning(
                        "could not claim the shared memory of this server's workers: %s. It may "
                        "stay in %s if they are killed.",
                        error,
                        SHARED_MEMORY,
                    )
                is_logged = True

    if group != os.getpid():  # started by hand: the group is that of another program
        yield
        return
    claiming = threading.Thread(target=claim_all, daemon=True, name="claim shared memory")
    claiming.start()
    try:
        yield
    finally:
        is_over.set()
        # The last claim is made in the thread too, because a scan may block, and the server is
        # ready without it.
        claiming.join(SCAN_TIMEOUT_S)
        if claiming.is_alive():
            logger.warning(
                "to find the shared memory of this server's workers took longer than %g s: it may "
                "stay in %s if they are killed.",
                SCAN_TIMEOUT_S,
                SHARED_MEMORY,
            )


def _remove_shared_memory(group: int) -> None:
    """Remove the shared memory of a group, unless it is not found within SCAN_TIMEOUT_S."""
    paths: list[Path] = []
    # Use a thread, because reading a process's memory maps waits while the process changes them,
    # which takes forever if its file system hangs. The group is not stopped meanwhile: if this
    # process were killed before it kills the group, the group would stay stopped forever.
    scan = threading.Thread(
        target=lambda: paths.extend(_find_shared_memory(group)), daemon=True, name="shared memory"
    )
    scan.start()
    scan.join(SCAN_TIMEOUT_S)
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _find_shared_memory(group: int) -> list[Path]:
    """Return files in shared memory that processes of a group map and no other process does."""
    processes = [folder for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    own: dict[_File, Path] = {}
    others: list[Path] = []
    for process in processes:
        try:
            if os.getpgid(int(process.name)) == group:
                own |= _find_mapped_files(process)
            else:
                others.append(process)
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue  # it has ended, or is a member with other rights, whose files stay
    if own:
        own |= {file: path for file, path in _find_semaphores().items() if file in own}
    candidates = {file: path for file, path in own.items() if _is_of_worker(path, file=file)}
    for process in others:
        if not candidates:
            break  # most servers have none, and hosts have thousands of processes
        try:
            mapped = _find_mapped_files(process)
        except (ProcessLookupError, FileNotFoundError):
            continue
        except PermissionError:
            if _may_share_memory(process):
                return []
            continue
        for file in mapped:
            candidates.pop(file, None)
    return list(candidates.values())


def _find_mapped_files(process: Path) -> dict[_File, Path]:
    """Return the files directly in /dev/shm that a process maps."""
    files: dict[_File, Path] = {}
    data = (process / "maps").read_bytes()
    # Most processes map none, and some have tens of thousands of lines.
    for line in data.split(b"\n") if b" /dev/shm/" in data else ():
        # Address, permissions, offset, device, inode and path, which may contain spaces and bytes
        # that are not UTF-8.
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith(b"/dev/shm/"):
            continue
        path = Path(os.fsdecode(fields[5]))
        if path.parent == SHARED_MEMORY:
            major, minor = fields[3].split(b":")
            files[os.makedev(int(major, 16), int(minor, 16)), int(fields[4])] = path
    return files


def _find_semaphores() -> dict[_File, Path]:
    """Return the files of semaphores, which processes map under names that no longer exist.

    The C library gives a semaphore its name after it has mapped the file.
    """
    files = {}
    for path in SHARED_MEMORY.glob(_SEMAPHORES):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            files[status.st_dev, status.st_ino] = path
    return files


def _is_of_worker(path: Path, *, file: _File) -> bool:
    """Return True if a path is still the mapped file and has a name as vLLM's workers choose it.

    Everything else in /dev/shm belongs to the user, such as a model that was copied there.
    """
    if not _WORKER_NAME.fullmatch(path.name):
        return False
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and (status.st_dev, status.st_ino) == file
    )


def _may_share_memory(process: Path) -> bool:
    """Return True if a process whose maps are unreadable may map shared memory of this user.

    Processes of other users may not open that memory. Processes with more rights than this one,
    such as the first process of a container, do not belong to the user. sshd does, but it maps no
    shared memory.
    """
    try:
        other, own = _read_status(process), _read_status(Path("/proc/self"))
    except (ProcessLookupError, FileNotFoundError):
        return False
    has_more_rights = int(other["CapPrm"], 16) & ~int(own["CapPrm"], 16) != 0
    is_own = str(os.geteuid()) in other["Uid"].split()
    return is_own and not has_more_rights and other.get("RssShmem", "").split() != ["0", "kB"]


def _read_status(process: Path) -> dict[str, str]:
    """Return the values of a process's status, which every user may read, by their names."""
    lines = os.fsdecode((process / "status").read_bytes()).split("\n")
    return {key: value for key, _, value in (line.partition(":") for line in lines)}
