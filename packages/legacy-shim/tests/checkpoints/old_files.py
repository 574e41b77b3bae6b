"""Files as old programs wrote them, made by the torch that is installed.

Every rank in turn, on a process group that only pretends.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def write_fsdp(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    mesh_shape: Sequence[int] = (2,),
    placements: Mapping[str, Sequence[Placement]] | None = None,
    plain: Sequence[str] = (),
) -> None:
    """Write model files of every rank of a mesh.

    Args:
        folder: made if need be.
        tensors: whole, by name.
        mesh_shape: of the mesh; its ranks are numbered in order.
        placements: of single tensors; the others are sharded by rows over the innermost axis and
            replicated over the others.
        plain: names that every rank holds whole, as buffers are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    world = int(torch.tensor(mesh_shape).prod())
    names = (
        ("ddp", "fsdp")[-len(mesh_shape) :]
        if len(mesh_shape) < 3
        else tuple(f"axis{i}" for i in range(len(mesh_shape)))
    )
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
            position = [int(i) for i in torch.unravel_index(torch.tensor(rank), tuple(mesh_shape))]
            state: dict[str, Tensor] = {}
            for name, tensor in tensors.items():
                default = [*[Replicate()] * (len(mesh_shape) - 1), Shard(0)]
                expected = list((placements or {}).get(name, default))
                if name in plain:
                    state[name] = tensor
                    continue
                local = local_part(tensor, expected, mesh_shape=mesh_shape, position=position)
                state[name] = DTensor.from_local(
                    local,
                    mesh,
                    expected,
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
            torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a shard."""


def write_sharded(
    folder: Path,
    tensors: Mapping[str, tuple[Tensor, Sequence[Box]]],
    *,
    plain: Mapping[str, Tensor],
) -> None:
    """Write model files whose entries are ShardedTensors, as FSDP1 did without a device mesh.

    Args:
        folder: made if need be.
        tensors: each whole, with one box for every rank.
        plain: what every rank holds whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    world = len(next(iter(tensors.values()))[1])
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            state: dict[str, object] = dict(plain)
            for name, (full, boxes) in tensors.items():
                shards = [
                    ShardMetadata(
                        shard_offsets=list(offsets),
                        shard_sizes=list(sizes),
                        placement=f"rank:{owner}/cpu",
                    )
                    for owner, (offsets, sizes) in enumerate(boxes)
                ]
                properties = TensorProperties(
                    dtype=full.dtype, layout=full.layout, requires_grad=False
                )
                described = ShardedTensorMetadata(
                    shards_metadata=shards, size=full.shape, tensor_properties=properties
                )
                part = full[
                    tuple(slice(at, at + size) for at, size in zip(*boxes[rank], strict=True))
                ].clone()
                local = [LocalShard(tensor=part, metadata=shards[rank])]
                state[name] = ShardedTensor._init_from_local_shards_and_global_metadata(
                    local, described
                )
            torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


def local_part(
    tensor: Tensor,
    placements: Sequence[Placement],
    *,
    mesh_shape: Sequence[int],
    position: Sequence[int],
) -> Tensor:
    """Return a rank's part by torch's own chunking, axis after axis."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim < tensor.ndim:
            chunks = list(tensor.chunk(mesh_shape[axis], dim=placement.dim))
            empty = tensor.narrow(placement.dim, 0, 0)
            chunks += [empty] * (mesh_shape[axis] - len(chunks))
            tensor = chunks[position[axis]]
    return tensor.clone(
        memory_format=torch.contiguous_format
    )  # torch.save writes all of the storage behind a view
