"""Process groups that engines need: the default group, and a group for background threads."""

import os
from collections import Counter
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from temper_engine_api.errors import ConfigError
from temper_engine_api.rendezvous import store_from_environment

ObjectT = TypeVar("ObjectT")


class _Rendezvous:
    """Keeps one store per address for the life of the process, with a key prefix per group.

    With a store per group, one rank could close its store while another already connects to the
    next store on the same port and reads stale keys, such as the NCCL address.
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
        self._num_groups[address] += 1
        return PrefixStore(f"temper_engine/{self._num_groups[address]}", store), rank, world_size


_RENDEZVOUS = _Rendezvous()


def choose_device(requested: str) -> torch.device:
    """Return the device of this rank; on CUDA also make it the current device.

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
    rank.

    Returns:
        True if the group was created here, so that the caller must destroy it.
    """
    if dist.is_initialized():
        return False
    # gloo as well: some collectives use host memory, such as those of offloaded tensors.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world_size = _RENDEZVOUS.next_store(timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    else:
        # A store in memory: a single process needs no port.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    return True


class ThreadGroup:
    """A gloo group of all ranks for a background thread, created on first use.

    Collectives of two threads must not share a group: their order would differ between ranks.
    """

    def __init__(self, *, world_size: int, timeout_s: float) -> None:
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._group: ProcessGroup | None = None

    def get(self) -> ProcessGroup:
        """Return the group. The first call is collective and must be on the main thread."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group

    def gather(self, item: ObjectT) -> list[ObjectT]:
        """Gather a small picklable object from every rank, in rank order.

        Collective among the background threads.
        """
        gathered = [item] * self._world_size
        dist.all_gather_object(gathered, item, group=self.get())
        return gathered

    def close(self) -> None:
        """Destroy the group if it was created."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
