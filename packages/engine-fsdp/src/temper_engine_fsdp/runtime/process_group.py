"""The process group and device meshes of an engine."""

import os
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from temper_engine_api.errors import ConfigError
from temper_engine_api.rendezvous import store_from_environment

ObjectT = TypeVar("ObjectT")

REPLICATE_AXIS = "replicate"
SHARD_AXIS = "shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Rank, world size and device of this process."""

    rank: int
    """Global rank in [0, world_size)."""
    world_size: int
    device: torch.device
    """Device on which this rank computes."""
    owns_group: bool
    """True if the engine created the default group and must destroy it."""


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
        return (
            PrefixStore(f"temper_engine_fsdp/{self._num_groups[address]}", store),
            rank,
            world_size,
        )


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


def join(*, device: torch.device, timeout_s: float) -> Membership:
    """Join the default process group, or create it.

    A new group uses RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them it has a single
    rank.
    """
    if dist.is_initialized():
        return Membership(
            rank=dist.get_rank(), world_size=dist.get_world_size(), device=device, owns_group=False
        )
    # gloo as well: offloaded shards in host memory are gathered without loading them first.
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
    return Membership(
        rank=dist.get_rank(), world_size=dist.get_world_size(), device=device, owns_group=True
    )


class ThreadGroup:
    """A gloo group of all ranks for a background thread, created on first use.

    Collectives of two threads must not share a group: their order would differ between ranks.
    """

    def __init__(self, membership: Membership, *, timeout_s: float) -> None:
        self._membership = membership
        self._timeout = timedelta(seconds=timeout_s)
        self._group: ProcessGroup | None = None

    def get(self) -> ProcessGroup:
        """Return the group. The first call is collective."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group

    def gather(self, item: ObjectT) -> list[ObjectT]:
        """Gather a small picklable object from every rank, in rank order.

        Collective among the background threads.
        """
        gathered = [item] * self._membership.world_size
        dist.all_gather_object(gathered, item, group=self.get())
        return gathered

    def close(self) -> None:
        """Destroy the group if it was created."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def leave(membership: Membership) -> None:
    """Destroy the default group if this engine created it."""
    if membership.owns_group and dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroups:
    """Ranks that see different samples, and ranks that share them."""

    data_parallel: ProcessGroup
    """One rank of each sequence-parallel group; data-parallel sums use this group."""
    sequence_parallel: ProcessGroup
    """Ranks that share the same packs."""


def build_data_groups(membership: Membership, *, sequence_parallel: int) -> DataGroups:
    """Build the groups; the ranks of a sequence-parallel group are consecutive. Collective.

    Raises:
        ConfigError: If sequence_parallel does not divide the world size.
    """
    world_size = membership.world_size
    if world_size % sequence_parallel:
        raise ConfigError(
            f"sequence_parallel is {sequence_parallel}, but must divide the world size "
            f"{world_size}: choose a divisor."
        )
    shape, names = (world_size // sequence_parallel, sequence_parallel), ("data", "sequence")
    mesh = init_device_mesh(membership.device.type, shape, mesh_dim_names=names)
    return DataGroups(
        data_parallel=mesh.get_group("data"), sequence_parallel=mesh.get_group("sequence")
    )


def build_mesh(
    membership: Membership, *, fsdp_size: int | None, kind: str | None = None
) -> DeviceMesh:
    """Build the mesh for sharding parameters: one axis, or replicate x shard. Collective.

    Args:
        membership: This rank.
        fsdp_size: Ranks over which one copy is sharded; None shards over all ranks.
        kind: Device type of the sharded tensors; None uses the rank's own.

    Raises:
        ConfigError: If fsdp_size does not divide the world size.
    """
    world_size = membership.world_size
    size = world_size if fsdp_size is None else fsdp_size
    if world_size % size:
        raise ConfigError(
            f"fsdp_size is {size}, but must divide the world size {world_size}: choose a divisor."
        )
    kind = membership.device.type if kind is None else kind
    if size == world_size:
        return init_device_mesh(kind, (size,), mesh_dim_names=(SHARD_AXIS,))
    return init_device_mesh(
        kind, (world_size // size, size), mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS)
    )
