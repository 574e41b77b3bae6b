"""Connections between the ranks: make and close them, abort collectives, recognize lost ones.

torch offers no public functions for this, so several private ones are used here.
"""

import errno
import logging
import os
import socket
import stat
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world

from temper_engine_api.errors import CheckpointError, CollectiveTimeoutError, TemperError

_CUDA = torch.device("cuda")
_LOG = logging.getLogger(__name__)
_LOST_CONNECTION = (
    "Timed out",
    "timed out",
    "Connection closed",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Read error",
    "Write error",
    "pair closure",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "ncclSystemError",
)
"""Parts of the messages with which gloo, NCCL and stores report a timeout or a lost peer."""
_BACKGROUND_GROUPS: "weakref.WeakKeyDictionary[ProcessGroup, set[str]]"
_BACKGROUND_GROUPS = weakref.WeakKeyDictionary()
"""Groups that background threads use, and their connections."""


def list_groups() -> list[ProcessGroup]:
    """Return the process groups of this process in the order of their creation."""
    # torch has no public list of groups.
    return list(_world.pg_map)


def _has_nccl(group: ProcessGroup) -> bool:
    return "nccl" in dist.get_backend_config(group)


def connect_groups() -> None:
    """Create the NCCL communicators of all groups now. Collective over the default group.

    By default NCCL creates the communicator of a group at its first collective. A rank waits there
    on the host, where the wait can't be aborted. If another rank has failed, the waiting rank would
    continue to wait until its timeout.
    """
    # All ranks create groups in the same order, so those of two ranks cannot wait for each other.
    for group in list_groups():
        if group.size() > 1 and _has_nccl(group):
            dist.all_reduce(torch.zeros(1, device=_CUDA), group=group)


def end_interrupted_batches() -> None:
    """End batches of operations that an exception has interrupted; call it on the same thread.

    torch does not end a batch of operations, such as `batch_isend_irecv`, if an operation raises.
    Every later collective of the thread would then belong to it, and never start.
    """
    while _world.pg_coalesce_state:
        group, _ = _world.pg_coalesce_state.popitem()
        if not _has_nccl(group):
            continue  # gloo starts each operation at once
        try:
            group._end_coalescing(_CUDA)
        except RuntimeError as error:
            # An aborted communicator refuses the operations of the batch, which nothing needs.
            _LOG.warning("a batch of collectives ended with an error: %s", error)


def mark_background_group(group: ProcessGroup, *, connections: set[str]) -> None:
    """Note that a background thread uses a group, which has these of `list_own_connections`."""
    _BACKGROUND_GROUPS[group] = connections


def list_background_connections() -> set[str]:
    """Return the connections of all groups that background threads use."""
    return set[str]().union(*_BACKGROUND_GROUPS.values())


def count_collectives(*, in_background: bool = False) -> dict[str, int]:
    """Return the number of collectives that were started, by group and device type.

    Those of background threads are counted apart, because threads of two ranks advance
    independently of the calls of an engine.
    """
    counts = {}
    for group in list_groups():
        if (group in _BACKGROUND_GROUPS) != in_background:
            continue
        for device in group._device_types:
            # torch has no public accessor for this number, and no stub for the private one.
            backend: Any = group._get_backend(device)
            name = f"{_world.pg_names[group]}/{device.type}"
            counts[name] = backend._get_sequence_number_for_group()
    return counts


def has_device_groups() -> bool:
    """Return True if a group of this process has collectives that NCCL runs on the device."""
    return any(map(_has_nccl, list_groups()))


def abort_device_collectives() -> None:
    """Abort NCCL's collectives, in which this or another thread may wait on the device.

    Call it only if `has_device_groups` is true, and only when the other ranks of this host abort,
    too: their kernels could access the memory that the abort frees.

    The abort of a group frees device memory, which waits for every kernel on the device. A kernel
    of another group may itself wait for the failed rank until that group is aborted. So one after
    the other they would time out, and all groups are aborted at the same time
    (github.com/pytorch/pytorch/issues/119797).
    """
    backends = [group._get_backend(_CUDA) for group in list_groups() if _has_nccl(group)]
    with ThreadPoolExecutor(len(backends)) as pool:
        for aborted in [pool.submit(backend.abort) for backend in backends]:
            aborted.result()


def close_connections(other_ends: set[str]) -> None:
    """Close this process's TCP connections to given ends, as the end of the process would.

    torch cannot close the connections of a gloo group: its `abort` does nothing, and a group is
    freed only when no module, mesh or traceback refers to it any more.

    Args:
        other_ends: Connections as the other processes see them, from `list_own_connections`.
    """
    for connection, endpoint in _connections():
        with endpoint:
            local, _, remote = connection.partition(" ")
            if f"{remote} {local}" in other_ends:
                # Shuts the connection itself down, also for gloo's descriptor of it. The other
                # rank closes its connections too, and may have reset this one a moment ago.
                try:
                    endpoint.shutdown(socket.SHUT_RDWR)
                except OSError as error:
                    if error.errno != errno.ENOTCONN:
                        raise


def list_own_connections() -> set[str]:
    """Return the TCP connections of this process as `local remote`, without those to the store."""
    connections = set()
    for connection, endpoint in _connections():
        endpoint.close()
        connections.add(connection)
    return connections


def find_new_connections(before: set[str], *, hosts: set[str]) -> set[str]:
    """Return the other ends of connections of groups that were being built.

    The other ranks have not listed these yet, so some may lead elsewhere. Those to a host without a
    rank do, if the hosts are known.

    Args:
        before: Result of `list_own_connections` before the groups were built.
        hosts: Addresses of hosts with a rank; empty if they are not known.
    """
    own = list_own_connections()
    other_ends = set()
    for connection in own - before:
        local, _, remote = connection.partition(" ")
        other_end = f"{remote} {local}"
        has_rank = not hosts or remote.rpartition(":")[0] in hosts
        # NCCL connects a process to itself, and needs that connection to abort.
        if has_rank and other_end not in own:
            other_ends.add(other_end)
    return other_ends


def _connections() -> Iterator[tuple[str, socket.socket]]:
    """Yield this process's TCP connections as `local remote`, without those to the store."""
    store_port = os.environ.get("MASTER_PORT")
    for descriptor in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            endpoint = socket.socket(fileno=os.dup(int(descriptor)))
        except OSError:
            continue  # closed since it was listed
        try:
            if endpoint.family not in (socket.AF_INET, socket.AF_INET6):
                raise OSError("not a network socket")
            ends = [
                f"{host.removeprefix('::ffff:')}:{port}"
                for host, port, *_ in (endpoint.getsockname(), endpoint.getpeername())
            ]
        except OSError:
            endpoint.close()
            continue  # not connected
        if any(end.rpartition(":")[2] == store_port for end in ends):
            # torch's store runs in the process of rank 0, and ranks still need it.
            endpoint.close()
            continue
        yield " ".join(ends), endpoint


def has_lost_connection(error: BaseException) -> bool:
    """Return True if an error of gloo, NCCL or a store reports a timeout or a lost peer."""
    cause = _find_cause(error)
    if isinstance(cause, TemperError):
        # A CheckpointError may report a lost connection to a remote store.
        return isinstance(cause, CollectiveTimeoutError)
    # gloo and NCCL raise plain RuntimeErrors: only the message tells.
    return isinstance(cause, RuntimeError) and any(part in str(cause) for part in _LOST_CONNECTION)


def ends_at_once(error: BaseException) -> bool:
    """Return True if an error need not wait for other ranks to end a write or read.

    A user who presses Ctrl-C does not wait, and a lost connection ends the call on every rank.
    """
    # A local import, because it takes a second.
    from torch.distributed.checkpoint.api import CheckpointException

    cause = _find_cause(error)
    # CheckpointException is no Exception. DCP raises it on all ranks, after its collectives.
    is_interrupt = not isinstance(cause, (Exception, CheckpointException))
    return is_interrupt or has_lost_connection(cause)


def _find_cause(error: BaseException) -> BaseException:
    """Return the error that an engine reports as a CheckpointError, else the error itself.

    A full disk and a lost connection both end torch's writers with a RuntimeError.
    """
    if isinstance(error, CheckpointError) and isinstance(error.__cause__, RuntimeError):
        return error.__cause__
    return error
