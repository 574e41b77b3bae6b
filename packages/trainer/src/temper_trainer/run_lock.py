"""Lock a run folder to ensure that at most one process trains in it.

The lock is a `filelock.SoftFileLease`: a file that contains host, process id, boot id, process
start time and a heartbeat. It does not use `flock`, which many shared file systems support only
within one node. This module does not import torch, to refuse a second process within a second.
"""

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from filelock import OwnerRecord, SoftFileLease, Timeout

from temper_engine_api.errors import ConfigError, TemperError
from temper_engine_api.process_folders import open_temporary_folder
from temper_trainer.config.run_folder_checks import describe_other_kind

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
LEASE_S = 60.0
"""Time without a heartbeat after which an owner on another host loses the lock."""
HEARTBEAT_S = 5.0
_NAMESPACE_MARK = "?pidns-"
"""Separates host name and PID namespace in filelock's files; absent for the initial namespace."""
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the initial PID namespace: PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h."""


class RunLockLostError(TemperError, RuntimeError):
    """Another process took over the run folder while this one was suspended or cut off."""


class RunLock:
    """Context that holds the lock of one run folder.

    When the owner was a process on this host that no longer exists, take over its lock at once. The
    check uses process id, boot id and start time, to not confuse the owner with a new process of
    the same id. When the owner is on another host, or this host has been restarted since, watch the
    heartbeat for at most `LEASE_S` seconds. Do the same for an empty or unreadable lock file, for
    example after a power failure: a living owner changes the file every `HEARTBEAT_S` seconds.

    Two hosts with the same host name, both without PID namespaces, may both start if they do so
    within milliseconds: filelock looks up the other's process id on its own host. The first one
    notices it at its next heartbeat, and `check` stops it before it saves.
    """

    def __init__(self, folder: Path, *, lease_s: float = LEASE_S) -> None:
        self._folder = folder
        self._has_made_folder = False
        self._is_acquiring = False
        self._end: Callable[[], object] | None = None
        """Set by a signal while the lock is being taken: ends this process after the attempt."""
        self._lease = SoftFileLease(
            folder / LOCK_FILE,
            lease_duration=lease_s,
            # Use at most a third, to not lose the lock when one heartbeat is late.
            heartbeat_interval=min(HEARTBEAT_S, lease_s / 3),
            thread_local=False,
        )

    def __enter__(self) -> "RunLock":
        """Take the lock, and create the folder if it does not exist.

        Raises:
            ConfigError: If another process holds the lock, or the folder cannot be written.
        """
        try:
            self._has_made_folder = not self._folder.exists()
            self._folder.mkdir(parents=True, exist_ok=True)
            # Check the kind first, because reading a pipe would wait forever.
            if problem := describe_other_kind(self._folder / LOCK_FILE):
                raise ConfigError(problem)
            self._acquire()
        except OSError as error:
            raise ConfigError(describe_write_error(self._folder, error)) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lease.release()

    def abandon(self, end: Callable[[], object]) -> None:
        """Remove the lock file and call `end`, which ends this process; for a signal handler.

        This does not call `release`, which takes filelock's own locks: the interrupted code may
        hold them. A signal during the creation of the lock file calls `end` when the file exists.
        """
        if self._is_acquiring:
            self._end = end
            return
        owner = self._lease.owner
        if owner is not None and owner.pid == os.getpid() and _is_local(owner):
            (self._folder / LOCK_FILE).unlink(missing_ok=True)
        if self._has_made_folder:
            with contextlib.suppress(OSError):  # it is no longer empty
                self._folder.rmdir()
        end()

    def check(self) -> None:
        """Check that the lock was not lost; called before each save.

        Raises:
            RunLockLostError: If another process has taken over the folder.
        """
        if self._lease.compromise is not None:
            owner = self._lease.owner
            state = "is gone" if owner is None else f"now belongs to {describe_owner(owner)}"
            raise RunLockLostError(
                f"this process lost the lock of run.dir {self._folder}: it showed no sign of life "
                f"for {self._lease.lease_duration:g} s, or {LOCK_FILE} was deleted. {LOCK_FILE} "
                f"{state}. This process stops and saves nothing."
            )

    def _acquire(self) -> None:
        previous_owner = self._lease.owner
        try:
            self._try_lease()
        except Timeout:
            self._watch_holder()
        if previous_owner is not None:
            logger.warning(
                "%s was left by %s, which has ended: taken over",
                self._folder / LOCK_FILE,
                describe_owner(previous_owner),
            )

    def _try_lease(self) -> None:
        """Take the lock at once, or raise Timeout."""
        # Don't use filelock for an owner that may be alive. It takes over an unreadable file after
        # 2 s, less than a heartbeat interval. It looks up the process id of an owner on another
        # host here, if both hosts have the same name.
        owner = self._lease.owner
        is_local = owner is not None and _is_local(owner)
        if not is_local and self._last_heartbeat_ns() is not None:
            raise Timeout(str(self._folder / LOCK_FILE))
        self._is_acquiring = True
        try:
            self._lease.acquire(blocking=False)
        finally:
            self._is_acquiring = False
            if self._end is not None:
                self.abandon(self._end)

    def _watch_holder(self) -> None:
        """Take over the lock of an owner that has ended or whose heartbeat stops."""
        owner, last_heartbeat_ns = self._lease.owner, self._last_heartbeat_ns()
        if owner is not None and _is_local(owner):
            refusal = find_lock_refusal(self._folder)
            if refusal is not None:
                raise ConfigError(refusal)
            lease_s = 0.0
        else:
            lease_s = max(self._lease.lease_duration, (owner and owner.lease_duration) or 0.0)
            logger.warning(
                "%s %s: waiting up to %.0f s to see whether it is %s",
                self._folder / LOCK_FILE,
                "names no owner" if owner is None else f"is held by {describe_owner(owner)}",
                lease_s,
                "being written" if owner is None else "alive",
            )
        deadline = time.monotonic() + lease_s
        while (heartbeat_ns := self._last_heartbeat_ns()) in (last_heartbeat_ns, None):
            if heartbeat_ns is not None:
                if time.monotonic() < deadline:
                    time.sleep(min(0.5, lease_s / 10))
                    continue
                # Don't use filelock to remove it: filelock exchanges two file names in one call,
                # which NFS, SMB and some FUSE file systems refuse, so the lock would stay forever.
                self._remove_dead_lock(last_heartbeat_ns)
            try:
                self._try_lease()
                return
            except Timeout:
                continue
        # The owner may have opened the file a moment ago and not yet written its record.
        deadline = time.monotonic() + min(HEARTBEAT_S, self._lease.lease_duration / 10)
        while (owner := self._lease.owner) is None and time.monotonic() < deadline:
            if self._last_heartbeat_ns() is None:
                try:
                    self._try_lease()
                    return
                except Timeout:  # another process was faster
                    continue
            time.sleep(0.1)
        raise ConfigError(_describe_refusal(self._folder, owner))

    def _remove_dead_lock(self, last_heartbeat_ns: int | None) -> None:
        """Remove the lock file of a dead owner, unless another process has replaced it."""
        path = self._folder / LOCK_FILE
        renamed = path.with_name(f"{LOCK_FILE}.{os.getpid()}")
        # Rename the file before checking it, because two processes may do this at once. The slower
        # one then renames the faster one's new lock, sees its new time, and restores it.
        with contextlib.suppress(FileNotFoundError):
            path.rename(renamed)
            if renamed.stat().st_mtime_ns != last_heartbeat_ns:
                with contextlib.suppress(FileExistsError):
                    os.link(renamed, path)
            renamed.unlink()

    def _last_heartbeat_ns(self) -> int | None:
        """Return the time of the holder's last heartbeat, or None if it has released the lock."""
        try:
            # An NFS client caches attributes for up to a minute, but fetches them on each open.
            with (self._folder / LOCK_FILE).open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None


def find_lock_refusal(folder: Path) -> str | None:
    """Return the error message if a run can't start in this folder because of its lock, or None.

    Only reads the folder. Returns None for an owner on another host and for an unreadable file,
    whose heartbeat is watched when a run starts.
    """
    owner = read_lock_owner(folder)
    if owner is None or not _is_local(owner):
        return None
    with open_temporary_folder("lock") as scratch:
        copy = scratch / LOCK_FILE
        # filelock has no public function to check whether an owner is alive, but takes over a dead
        # owner's lock. So try to take over a copy.
        try:
            copy.write_bytes((folder / LOCK_FILE).read_bytes())
            with SoftFileLease(copy, lease_duration=LEASE_S).acquire(blocking=False):
                return None
        except FileNotFoundError:  # the owner has just released the lock
            return None
        except Timeout:
            return _describe_refusal(folder, owner)


def _describe_refusal(folder: Path, owner: OwnerRecord | None) -> str:
    return (
        f"run.dir {folder} is in use by {describe_owner(owner)}. Wait until that process ends, or "
        f"choose another run.dir. If this folder is a copy, delete {folder / LOCK_FILE}."
    )


def describe_write_error(folder: Path, error: OSError) -> str:
    """Return the error message for a run folder that cannot be created or written."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        obstacle = next((path for path in (folder, *folder.parents) if path.is_file()), folder)
        return f"run.dir is {folder}, but {obstacle} is a file: choose another run.dir."
    if error.errno in NO_SPACE:
        remedy = "Free space, or choose a folder on another disk."
    elif error.errno == errno.ENAMETOOLONG:
        remedy = "Choose a shorter name."
    else:
        remedy = "Choose a folder with write permission."
    return f"run.dir {folder} cannot be written: {error.strerror}. {remedy}"


def read_lock_owner(folder: Path) -> OwnerRecord | None:
    """Return the owner in the lock file of a run folder, dead or alive; None if there is none."""
    return SoftFileLease(folder / LOCK_FILE, lease_duration=LEASE_S).owner


def describe_owner(owner: OwnerRecord | None) -> str:
    """Return "process PID on host NAME, running since TIME", the time only if it is known."""
    if owner is None:
        return "another process"
    since = _started_at(owner) if _is_local(owner) else None
    return f"process {owner.pid} on host {_host(owner)}" + (
        f", running since {since}" if since else ""
    )


def _host(owner: OwnerRecord) -> str:
    return owner.hostname.partition(_NAMESPACE_MARK)[0]


def _is_local(owner: OwnerRecord) -> bool:
    """Return True if the owner is on the same host, boot and PID namespace.

    A container that is restarted after a SIGKILL has the same host name but a new namespace, where
    the owner's process id has no meaning. Virtual machines from one image may have the same host
    name, but their boot ids differ. A host gets a new boot id when it is restarted.
    """
    _, _, namespace = owner.hostname.partition(_NAMESPACE_MARK)
    # filelock writes the boot id before the start time, or 0 if it could not be read.
    boot_ids = {(owner.start or 0) >> 64, _own_boot_id()}
    return (
        _host(owner) == socket.gethostname()
        and namespace == _own_namespace()
        and (len(boot_ids) == 1 or 0 in boot_ids)
    )


def _own_namespace() -> str:
    """Return this process's PID namespace as filelock writes it; empty for the initial one."""
    try:
        inode = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return "" if inode == _INITIAL_PID_NAMESPACE else f"{inode:x}"


def _own_boot_id() -> int:
    """Return the boot id of this host as filelock writes it; 0 if it cannot be read."""
    try:
        return int(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""), 16)
    except (OSError, ValueError):
        return 0


def _started_at(owner: OwnerRecord) -> str | None:
    """Return the local time at which a process of this host started; None if it is gone."""
    try:
        started = Path(f"/proc/{owner.pid}").stat().st_ctime
    except OSError:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
