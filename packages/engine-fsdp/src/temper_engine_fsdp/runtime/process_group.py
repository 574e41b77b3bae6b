"""The process group and mesh an engine runs on: joins the default group where there is one, else makes it and later unmakes it."""

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
    """This process among the ranks of an engine."""

    rank: int
    """In [0, world_size)."""
    world_size: int
    """Processes of the engine."""
    device: torch.device
    """Where this rank computes."""
    owns_group: bool
    """Whether the engine made the default group, and so must destroy it."""


class _Rendezvous:
    """One store per address for the life of a process; every group made over it gets keys of its own.

    A store per group would be torn down on one rank while another already looks for its successor at the same port, and finds the keys
    (NCCL's address among them) of the group that is gone.
    """

    def __init__(self) -> None:
        self._stores: dict[tuple[str, ...], tuple[Store, int, int]] = {}
        self._num_groups: Counter[tuple[str, ...]] = Counter()

    def next_store(self, timeout: timedelta) -> tuple[Store, int, int]:
        """(store, rank, world size) of the next group; ranks agree on its keys because they make their groups in the same order."""
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
    """The device of this rank; on CUDA the local rank's, which also becomes the current one.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device: use device auto or cpu.")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index = (
        int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) % torch.cuda.device_count()
    )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join(*, device: torch.device, timeout_s: float) -> Membership:
    """Join the default process group, or make it from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or else a group of one."""
    if dist.is_initialized():
        return Membership(
            rank=dist.get_rank(), world_size=dist.get_world_size(), device=device, owns_group=False
        )
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
    """A gloo group of all ranks for one thread beside the main one, whose collectives must not mix with others; made when first used."""

    def __init__(self, membership: Membership, *, timeout_s: float) -> None:
        self._membership = membership
        self._timeout = timedelta(seconds=timeout_s)
        self._group: ProcessGroup | None = None

    def get(self) -> ProcessGroup:
        """The group. Collective when it is asked for the first time."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group

    def gather(self, item: ObjectT) -> list[ObjectT]:
        """Small picklable objects of every rank in rank order, on every rank; collective among the threads."""
        gathered = [item] * self._membership.world_size
        dist.all_gather_object(gathered, item, group=self.get())
        return gathered

    def close(self) -> None:
        """Destroy the group, if there is one."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def leave(membership: Membership) -> None:
    """Destroy the group if this engine made it."""
    if membership.owns_group and dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroups:
    """Which ranks see the same samples."""

    data_parallel: ProcessGroup
    """Ranks that see different samples, one of each replica: what data-parallel sums go over."""
    sequence_parallel: ProcessGroup
    """Ranks of a replica, which share its packs."""


def build_data_groups(membership: Membership, *, sequence_parallel: int) -> DataGroups:
    """The ranks of a replica are neighbours.

    Raises:
        ConfigError: sequence_parallel does not divide the world size.
    """
    world_size = membership.world_size
    if world_size % sequence_parallel:
        raise ConfigError(
            f"sequence_parallel is {sequence_parallel}, but must divide the world size "
            f"{world_size}."
        )
    shape, names = (world_size // sequence_parallel, sequence_parallel), ("data", "sequence")
    mesh = init_device_mesh(membership.device.type, shape, mesh_dim_names=names)
    return DataGroups(
        data_parallel=mesh.get_group("data"), sequence_parallel=mesh.get_group("sequence")
    )


def build_mesh(
    membership: Membership, *, fsdp_size: int | None, kind: str | None = None
) -> DeviceMesh:
    """The mesh parameters are sharded over: one axis, or replicate x shard.

    Args:
        membership: this rank.
        fsdp_size: ranks that one copy is sharded over; None is all.
        kind: type of device that the sharded tensors lie on; None is the rank's own.

    Raises:
        ConfigError: fsdp_size does not divide the world size.
    """
    world_size = membership.world_size
    size = world_size if fsdp_size is None else fsdp_size
    if world_size % size:
        raise ConfigError(f"fsdp_size is {size}, but must divide the world size {world_size}.")
    kind = membership.device.type if kind is None else kind
    if size == world_size:
        return init_device_mesh(kind, (size,), mesh_dim_names=(SHARD_AXIS,))
    return init_device_mesh(
        kind, (world_size // size, size), mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS)
    )
