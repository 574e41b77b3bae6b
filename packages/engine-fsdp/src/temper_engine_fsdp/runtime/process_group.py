"""An engine's process group and device meshes."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from temper_engine_api.distributed import process_group
from temper_engine_api.errors import ConfigError

REPLICATE_AXIS = "replicate"
SHARD_AXIS = "shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """This process's rank, world size and device."""

    rank: int
    """Global rank in [0, world_size)."""
    world_size: int
    device: torch.device
    """Device on which this rank computes."""
    owns_group: bool
    """True if the engine created the default group and must destroy it."""
    built: list[ProcessGroup] = field(default_factory=list)
    """Other groups that the engine created and must destroy."""


def join(*, device: torch.device, timeout_s: float) -> Membership:
    """Join the default process group, or create it; see `process_group.join_default_group`."""
    owns_group = process_group.join_default_group(device=device, timeout_s=timeout_s)
    return Membership(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        owns_group=owns_group,
    )


def leave(membership: Membership) -> None:
    """Destroy the groups that this engine created."""
    process_group.destroy_groups(membership.built)
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
    with process_group.record_groups(membership.built):
        mesh = init_device_mesh(membership.device.type, shape, mesh_dim_names=names)
    return DataGroups(
        data_parallel=mesh.get_group("data"), sequence_parallel=mesh.get_group("sequence")
    )


def build_mesh(
    membership: Membership, *, fsdp_size: int | None, kind: str | None = None
) -> DeviceMesh:
    """Build the mesh for sharding parameters: one axis, or replicate x shard. Collective.

    Args:
        membership: Position and process groups of this rank.
        fsdp_size: Ranks over which one copy is sharded; None shards across all ranks.
        kind: Device type of the sharded tensors; None uses the rank's own.
    """
    world_size = membership.world_size
    size = world_size if fsdp_size is None else fsdp_size
    kind = membership.device.type if kind is None else kind
    with process_group.record_groups(membership.built):
        if size == world_size:
            return init_device_mesh(kind, (size,), mesh_dim_names=(SHARD_AXIS,))
        return init_device_mesh(
            kind, (world_size // size, size), mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS)
        )
