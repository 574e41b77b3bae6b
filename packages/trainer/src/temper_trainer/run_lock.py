"""The lock of a run folder, so that at most one process trains in it.

The lock is a `filelock.SoftFileLease`: a file that is created exclusively, with host, process id,
boot id, process start time and a heartbeat. It does not use `flock`, which many shared file systems
support only within one node. This module does not import torch, so a second process is refused
within a second.
"""

import contextlib
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from filelock import OwnerRecord, SoftFileLease, Timeout

from temper_engine_api.errors import ConfigError, TemperError

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
LEASE_S = 60.0
"""An owner on another host whose heartbeat stops for this long loses the lock."""
HEARTBEAT_S = 5.0
_NAMESPACE_MARK = "?pidns-"
"""Written by filelock between host name and PID namespace, unless that is the initial one."""
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the initial PID namespace: PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h."""


class RunLockLostError(TemperError, RuntimeError):
    """Another process took over the run folder while this one was suspended or cut off."""


class RunLock:
    """Context that holds the lock of one run folder.

    If the owner was a process on this host and no longer exists, its lock is taken over at once.
    The owner is identified by process id, boot id and start time, so a reused process id is not
    mistaken for it. An owner on another host cannot be looked up: its heartbeat is watched for at
    most `LEASE_S` seconds. The same applies to a lock file without an owner, which a power failure
    may leave.
    """

    def __init__(self, folder: Path, *, lease_s: float = LEASE_S) -> None:
        self._folder = folder
        self._lease = SoftFileLease(
            folder / LOCK_FILE,
            lease_duration=lease_s,
            # At most a third, so that one late heartbeat does not lose the lock.
            heartbeat_interval=min(HEARTBEAT_S, lease_s / 3),
            thread_local=False,
        )

    def __enter__(self) -> "RunLock":
        """Take the lock, and create the folder if it does not exist.

        Raises:
            ConfigError: If another process holds the lock, or the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"run.dir {self._folder} is a file: choose a folder.") from error
        except OSError as error:
            raise ConfigError(
                f"run.dir {self._folder} cannot be written: {error.strerror}. Choose a folder with "
                "write permission."
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lease.release()

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
        left_by = self._lease.owner
        try:
            self._lease.acquire(blocking=False)
        except Timeout:
            self._watch_holder()
        if left_by is not None:
            logger.warning(
                "%s was left by %s, which has ended: taken over",
                self._folder / LOCK_FILE,
                describe_owner(left_by),
            )

    def _watch_holder(self) -> None:
        """Take over the lock of an owner that cannot be looked up, once its heartbeat stops."""
        owner, last_sign = self._lease.owner, self._last_sign()
        if owner is not None and _is_local(owner):
            raise self._refusal(owner)
        lease_s = self._lease.lease_duration
        logger.warning(
            "%s %s: waiting up to %.0f s to see whether it is %s",
            self._folder / LOCK_FILE,
            "names no owner" if owner is None else f"is held by {describe_owner(owner)}",
            lease_s,
            "being written" if owner is None else "alive",
        )
        deadline = time.monotonic() + lease_s
        while self._last_sign() == last_sign:
            # filelock never takes over an empty file, because an old version of filelock could have
            # written it. This package never used such a version.
            if owner is None and time.monotonic() >= deadline:
                self._remove_ownerless(last_sign)
            try:
                self._lease.acquire(blocking=False)
                return
            except Timeout:
                time.sleep(min(0.5, lease_s / 10))
        raise self._refusal(self._lease.owner)

    def _remove_ownerless(self, last_sign: int | None) -> None:
        """Remove a lock file without an owner, unless another process has replaced it."""
        path = self._folder / LOCK_FILE
        aside = path.with_name(f"{LOCK_FILE}.{os.getpid()}")
        # Renamed before it is checked: if two processes do this at the same time, the slower one
        # renames the new lock of the faster one, sees that it changed, and puts it back.
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
            if aside.stat().st_mtime_ns != last_sign:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, path)
            aside.unlink()

    def _last_sign(self) -> int | None:
        """Return the time of the holder's last heartbeat, or None if it has released the lock."""
        try:
            return (self._folder / LOCK_FILE).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _refusal(self, owner: OwnerRecord | None) -> ConfigError:
        return ConfigError(
            f"run.dir {self._folder} is in use by {describe_owner(owner)}. Wait until that process "
            "ends, or choose another run.dir. If this folder is a copy, delete "
            f"{self._folder / LOCK_FILE}."
        )


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
    """Return True if the owner is on the same host and in the same PID namespace.

    A container that is restarted after a SIGKILL has the same host name but a new namespace, in
    which the process id of the owner has no meaning.
    """
    _, _, namespace = owner.hostname.partition(_NAMESPACE_MARK)
    return _host(owner) == socket.gethostname() and namespace == _own_namespace()


def _own_namespace() -> str:
    """Return this process's PID namespace as filelock writes it; empty for the initial one."""
    try:
        inode = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return "" if inode == _INITIAL_PID_NAMESPACE else f"{inode:x}"


def _started_at(owner: OwnerRecord) -> str | None:
    """Return the local time at which a process of this host started; None if it is gone."""
    try:
        started = Path(f"/proc/{owner.pid}").stat().st_ctime
    except OSError:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
