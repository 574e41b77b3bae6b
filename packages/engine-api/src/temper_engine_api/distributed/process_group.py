"""Process groups that engines need, and collectives: gathers of values, and a sum with gradient."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import HashStore, PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from temper_engine_api.distributed.gather_codec import decode_value, encode_value
from temper_engine_api.distributed.rank_connections import (
    list_groups,
    list_own_connections,
    mark_background_group,
)
from temper_engine_api.distributed.rank_failures import AGREEMENT_S, RankFailures, take_event_number
from temper_engine_api.distributed.rendezvous import store_from_environment
from temper_engine_api.errors import ConfigError, EngineStateError, MessageError

ObjectT = TypeVar("ObjectT")

MAX_MESSAGE_BYTES = 4 << 30
"""Maximum size of a rank's encoded value, see `gather_objects`."""


class _Rendezvous:
    """Keeps one store per address for the life of the process, with a key prefix per group.

    With one store per group, a rank might connect to the old store on the same port before rank 0
    closes it, and read outdated keys such as the NCCL address.
    """

    def __init__(self) -> None:
        self._stores: dict[tuple[str, ...], tuple[Store, int, int]] = {}
        self._num_groups: Counter[tuple[str, ...]] = Counter()

    def next_store(self, timeout: timedelta) -> tuple[Store, int, int]:
        """Return (store, rank, world size) for the next group.

        Ranks agree on the prefix because they create their groups in the same order.
        """
        address = tuple(
            os.environ.get(name, "")
            for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        )
        if address not in self._stores:
            self._stores[address] = store_from_environment(timeout)
        store, rank, world_size = self._stores[address]
        # The first group may have had another timeout.
        store.set_timeout(timeout)
        self._num_groups[address] += 1
        return PrefixStore(f"temper_engine/{self._num_groups[address]}", store), rank, world_size


_RENDEZVOUS = _Rendezvous()


@dataclass(slots=True, kw_only=True)
class EngineStart:
    """An engine that is being built, and how it reports a failure to the other ranks."""

    failures: RankFailures | None
    """None for a single process, and as long as there is no store."""
    timeout_s: float


_STARTING: ContextVar[EngineStart | None] = ContextVar("_STARTING", default=None)
_NOTICE_S = 0.2
"""Time that other ranks get to read a failure before the process that serves the store may end."""


@contextmanager
def report_failed_start(*, timeout_s: float) -> Iterator[EngineStart]:
    """Enclose the building of an engine: report an exception of it to the other ranks.

    Args:
        timeout_s: Timeout of collectives.

    Raises:
        RankFailedError: If another rank failed.
    """
    begin = take_event_number()
    start = EngineStart(failures=RankFailures.join(), timeout_s=timeout_s)
    token = _STARTING.set(start)
    try:
        yield start
    except BaseException as error:
        if start.failures is None and _has_other_ranks() and not dist.is_initialized():
            # The other ranks wait for this one in join_default_group.
            try:
                store, rank, world_size = _RENDEZVOUS.next_store(timedelta(seconds=AGREEMENT_S))
                start.failures = RankFailures(store, rank=rank, world_size=world_size)
            except (dist.DistError, EngineStateError) as store_error:
                error.add_note(f"The other ranks could not be told: {store_error}")
        if start.failures is not None:
            try:
                start.failures.handle(error, where="init_model()", begin=begin)
            finally:
                start.failures.start_failed()
            if not dist.is_initialized():
                time.sleep(_NOTICE_S)
        raise
    finally:
        _STARTING.reset(token)


def _has_other_ranks() -> bool:
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def choose_device(requested: str) -> torch.device:
    """Return this rank's device; on CUDA also make it the current device.

    Raises:
        ConfigError: If CUDA is requested but not available.
    """
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device: use device auto or cpu.")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index = (
        int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) % torch.cuda.device_count()
    )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join_default_group(*, device: torch.device, timeout_s: float) -> bool:
    """Join the default process group, or create it.

    A new group uses RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them it has a single
    rank. Within `init_model` ranks wait for each other here. So call this after all work that may
    fail on a single rank, such as reading files, and create other groups right afterwards. While a
    rank waits for a group to be created, it can't learn that another rank has failed.

    Returns:
        True if the group was created here, so that the caller must destroy it.

    Raises:
        RankFailedError: If another rank failed in `init_model` before it came here.
    """
    start = _STARTING.get()
    if dist.is_initialized():
        if start is not None and start.failures is not None:
            start.failures.wait_for_arrivals("begin to build", timeout_s=start.timeout_s)
        return False
    # gloo as well: some collectives use host memory, for example for offloaded tensors.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world_size = _RENDEZVOUS.next_store(timeout)
        if start is not None and world_size > 1:
            start.failures = RankFailures(store, rank=rank, world_size=world_size)
            start.failures.wait_for_arrivals("begin to build", timeout_s=timeout_s)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        if start is not None and start.failures is not None:
            start.failures.group_joined()
    else:
        # A store in memory: a single process needs no port.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    return True


def gather_objects(item: ObjectT, *, group: ProcessGroup | None = None) -> list[ObjectT]:
    """Gather a small value from every rank in a group to every rank, in rank order. Collective.

    Replaces `torch.distributed.all_gather_object`, which unpickles what arrives. The values travel
    as bytes in tensor collectives; `gather_codec` lists the supported types. Tensors arrive on the
    CPU, and mappings as dicts.

    Args:
        item: This rank's value.
        group: Process group; None is the default group.

    Raises:
        MessageError: On all ranks, if a rank's value is not supported or takes more than
            `MAX_MESSAGE_BYTES`, or a rank sent bytes that are not a value.
    """
    device = _choose_transport_device(group)
    has_failed = False
    try:
        local = _encode_within_limit(item).to(device)
    except MessageError as error:
        # Sent to the other ranks, which would otherwise wait for this rank until the timeout.
        local, has_failed = encode_value(error).to(device), True
    header = torch.tensor([len(local), has_failed], device=device)
    headers = [torch.zeros_like(header) for _ in range(dist.get_world_size(group))]
    dist.all_gather(headers, header, group=group)
    lengths, failures = zip(*(each.tolist() for each in headers), strict=True)
    for rank, length in enumerate(lengths):
        # Check the length before memory is allocated: a damaged or hostile header could ask for any
        # amount.
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise MessageError(
                f"rank {rank} of the group announces a message of {length} bytes, but a message "
                f"has at least 1 and at most {MAX_MESSAGE_BYTES}. Run the same version of Temper "
                "on all ranks, and check who can reach the run's network."
            )
    # Collectives need equal sizes.
    padded = local.new_zeros(max(lengths))
    padded[: len(local)] = local
    messages = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(messages, padded, group=group)
    gathered = []
    for rank, (message, length) in enumerate(zip(messages, lengths, strict=True)):
        try:
            value = decode_value(message[:length].cpu())
        except MessageError as error:
            raise MessageError(
                f"rank {rank} of the group sent an invalid message: {error}"
            ) from error
        if failures[rank]:
            raise MessageError(f"rank {rank} of the group could not send its value: {value}")
        gathered.append(cast("ObjectT", value))
    return gathered


def _encode_within_limit(item: object) -> torch.Tensor:
    message = encode_value(item)
    if len(message) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"a value takes {len(message)} bytes, but ranks can gather at most "
            f"{MAX_MESSAGE_BYTES} from each: gather it in several parts."
        )
    return message


def _choose_transport_device(group: ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group can send: the CPU, unless it only has NCCL."""
    # Host memory first, so that a gather does not wait for the GPU's queue.
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, local: Tensor, group: ProcessGroup) -> Tensor:
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        # The gradient is not summed across ranks, because every rank computes the same loss from
        # the total.
        return grad, None


def sum_over_ranks(local: Tensor, *, group: ProcessGroup) -> Tensor:
    """Sum across the ranks in a group; every rank must compute the same loss from the total.

    `local` gets the gradient of the total. It is not summed across ranks, because that would count
    the same loss once per rank. Collective in the forward pass only.
    """
    if group.size() == 1:
        return local
    total: Tensor = _SumOverRanks.apply(local, group)  # type: ignore[no-untyped-call]
    return total


@contextmanager
def record_groups(built: list[ProcessGroup]) -> Iterator[None]:
    """Append the process groups that are created meanwhile to a list, for `destroy_groups`."""
    before = list_groups()
    try:
        yield
    finally:
        built += [group for group in list_groups() if group not in before]


def destroy_groups(groups: list[ProcessGroup]) -> None:
    """Destroy those of the process groups that still exist, and empty the list.

    An engine does so with its own groups when it is closed, because its default group may remain.
    A group of gloo has three threads, one of which wakes a hundred times a second.
    """
    existing = list_groups()
    for group in groups:
        if group in existing:
            dist.destroy_process_group(group)
    groups.clear()


class ThreadGroup:
    """A gloo group with all ranks for a background thread, created on first use.

    Collectives of two threads must not share a group: their order would differ between ranks.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._group: ProcessGroup | None = None

    def get(self) -> ProcessGroup:
        """Return the group. The first call is collective and must be on the main thread."""
        if self._group is None:
            before = list_own_connections()
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
            mark_background_group(self._group, connections=list_own_connections() - before)
        return self._group

    def gather(self, item: ObjectT) -> list[ObjectT]:
        """Gather like `gather_objects`. Collective among the background threads."""
        return gather_objects(item, group=self.get())

    def close(self) -> None:
        """Destroy the group if it was created."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
