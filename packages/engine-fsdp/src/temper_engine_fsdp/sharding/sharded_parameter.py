"""A parameter and this rank's shard of it, with the same interface for FSDP1 and FSDP2.

FSDP2 shards by rows, FSDP1 shards the flattened tensor. Optimizer states are sharded like their
parameter: every method takes any tensor with the shape of `local_shard()`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

Placements = Sequence[Placement]
# torch 2.13 renamed the collective and deprecates the old name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

MAX_JOINT_BYTES = 1 << 20
"""Size of the largest full tensor that is gathered together with others.

Starting a collective takes longer than gathering a small tensor. For large tensors, the second copy
would take memory.
"""


class ShardedParameter(ABC):
    """A sharded parameter and its name in Hugging Face files."""

    def __init__(self, name: str, parameter: nn.Parameter, *, shape: torch.Size) -> None:
        self.name = name
        self.tensor = parameter
        self.shape = shape
        """Shape of the full parameter."""

    @property
    def is_matrix(self) -> bool:
        """True if the parameter has two or more dimensions and is subject to weight decay."""
        return len(self.shape) >= 2

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the master weight."""
        return self.tensor.dtype

    @abstractmethod
    def local_shard(self) -> Tensor:
        """Return this rank's shard; shares memory with the parameter."""

    @abstractmethod
    def local_gradient(self) -> Tensor | None:
        """Return this rank's shard of the reduced gradient, or None; shares its memory."""

    @abstractmethod
    def gather(self, shard: Tensor) -> Tensor:
        """Gather a full tensor from the shards on all ranks. Collective."""

    def gather_together(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Gather several full tensors, in one collective if they are small. Collective."""
        return [self.gather(shard) for shard in shards]

    @abstractmethod
    def take_shard(self, full: Tensor) -> Tensor:
        """Copy this rank's shard out of a full tensor to the parameter's device."""

    @abstractmethod
    def to_row_dtensor(self, shard: Tensor) -> DTensor:
        """Convert a shard to a DTensor sharded by rows, the layout of checkpoints. Collective.

        Shares memory if shards are rows already.
        """

    @abstractmethod
    def from_row_dtensor(self, rows: DTensor) -> Tensor:
        """Convert the result of `to_row_dtensor` back to a shard. Collective."""


class FSDP2Parameter(ShardedParameter):
    """A parameter of FSDP2, a DTensor sharded by rows.

    Uses the meshes passed in, never the `device_mesh` of the DTensor: torch caches sharding
    results, and the cached mesh may belong to an earlier engine whose process groups are gone.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, *, mesh: DeviceMesh, host_mesh: DeviceMesh
    ) -> None:
        super().__init__(name, parameter, shape=parameter.shape)
        self._mesh = mesh
        self._host_mesh = host_mesh

    def local_shard(self) -> Tensor:
        """See ShardedParameter."""
        return local_tensor(self.tensor)

    def local_gradient(self) -> Tensor | None:
        """See ShardedParameter."""
        return None if self.tensor.grad is None else local_tensor(self.tensor.grad)

    def gather(self, shard: Tensor) -> Tensor:
        """See ShardedParameter."""
        mesh = self._get_mesh(shard)
        group = mesh.get_group(mesh.ndim - 1)
        if group.size() == 1:
            # Copy, so that the result never shares memory with the parameter. With several ranks
            # the gather returns new memory.
            return shard.clone()
        # fully_shard gives each rank the same number of rows, except that the last ranks may have
        # fewer or none. DTensor.full_tensor() is several times slower for small tensors, so pad and
        # use one collective.
        num_rows = -(-self.shape[0] // group.size())
        padded = shard.contiguous()
        if len(shard) < num_rows:
            padded = shard.new_zeros(num_rows, *self.shape[1:])
            padded[: len(shard)] = shard
        gathered = shard.new_empty(num_rows * group.size(), *self.shape[1:])
        _gather(gathered, padded, group=group)
        return gathered[: self.shape[0]]

    def gather_together(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """See ShardedParameter."""
        dtype, device = shards[0].dtype, shards[0].device
        if self.shape.numel() * dtype.itemsize > MAX_JOINT_BYTES or any(
            (shard.dtype, shard.device) != (dtype, device) for shard in shards
        ):
            return super().gather_together(shards)
        # Gather one parameter, row i of which holds row i of each given one.
        joint = copy(self)
        joint.shape = torch.Size((self.shape[0], len(shards), *self.shape[1:]))
        gathered = joint.gather(torch.stack(tuple(shards), dim=1))
        return [full.clone(memory_format=torch.contiguous_format) for full in gathered.unbind(1)]

    def take_shard(self, full: Tensor) -> Tensor:
        """See ShardedParameter."""
        layout = self._layout
        return (
            distribute_rows(full.to(layout.device), mesh=self._mesh, placements=layout.placements)
            .to_local()
            .clone()
        )

    def to_row_dtensor(self, shard: Tensor) -> DTensor:
        """See ShardedParameter."""
        placements, mesh = self._layout.placements, self._get_mesh(shard)
        return DTensor.from_local(
            shard, mesh, placements, run_check=False, shape=self.shape, stride=self.tensor.stride()
        )

    def from_row_dtensor(self, rows: DTensor) -> Tensor:
        """See ShardedParameter."""
        return local_tensor(rows)

    def _get_mesh(self, shard: Tensor) -> DeviceMesh:
        return self._host_mesh if shard.device.type == "cpu" else self._mesh

    @property
    def _layout(self) -> DTensor:
        assert isinstance(self.tensor.data, DTensor)
        return self.tensor.data


class FSDP1Parameter(ShardedParameter):
    """A parameter of FSDP1: each rank has a contiguous, possibly empty part of the flat tensor."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        *,
        shape: torch.Size,
        mesh: DeviceMesh,
        host_mesh: DeviceMesh,
        shard_sizes: tuple[int, ...],
    ) -> None:
        super().__init__(name, parameter, shape=shape)
        self._mesh = mesh
        self._host_mesh = host_mesh
        self._group: ProcessGroup = mesh.get_group(mesh.ndim - 1)
        self._shard_sizes = shard_sizes
        """Number of entries on each rank of the group."""
        rank = dist.get_rank(self._group)
        self._local_slice = slice(sum(shard_sizes[:rank]), sum(shard_sizes[: rank + 1]))

    def local_shard(self) -> Tensor:
        """See ShardedParameter."""
        return self.tensor.detach().view(-1)

    def local_gradient(self) -> Tensor | None:
        """See ShardedParameter. An empty shard has an empty gradient."""
        if self.tensor.grad is None:
            return (
                self.local_shard()
                if self.tensor.requires_grad and self.tensor.numel() == 0
                else None
            )
        return self.tensor.grad.detach().view(-1)

    def gather(self, shard: Tensor) -> Tensor:
        """See ShardedParameter."""
        if len(self._shard_sizes) == 1:
            return shard.view(self.shape).clone()
        # all_gather needs equal sizes, so pad to the longest shard.
        longest = max(self._shard_sizes)
        padded = shard.new_zeros(longest)
        padded[: shard.numel()] = shard
        gathered = [torch.empty_like(padded) for _ in self._shard_sizes]
        dist.all_gather(gathered, padded, group=self._group)
        return torch.cat(
            [entries[:size] for entries, size in zip(gathered, self._shard_sizes, strict=True)]
        ).view(self.shape)

    def take_shard(self, full: Tensor) -> Tensor:
        """See ShardedParameter."""
        return full.reshape(-1)[self._local_slice].to(self.tensor.device, copy=True)

    def to_row_dtensor(self, shard: Tensor) -> DTensor:
        """See ShardedParameter."""
        mesh = self._host_mesh if shard.device.type == "cpu" else self._mesh
        placements = [*([Replicate()] * (mesh.ndim - 1)), Shard(0)]
        rows = distribute_rows(self.gather(shard), mesh=mesh, placements=placements)
        # Clone, so that the full tensor behind the view is freed.
        return DTensor.from_local(
            local_tensor(rows).clone(),
            mesh,
            placements,
            run_check=False,
            shape=self.shape,
            stride=rows.stride(),
        )

    def from_row_dtensor(self, rows: DTensor) -> Tensor:
        """See ShardedParameter."""
        return self.take_shard(rows.full_tensor())


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; shares memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def distribute_rows(full: Tensor, *, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Shard by rows a full tensor that every rank has. No communication."""
    # src_data_rank=None skips the broadcast from rank 0, since all ranks have the tensor.
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


ShardedParameters = Mapping[str, ShardedParameter]
"""Parameters by Hugging Face name; tied parameters occur once, as in a safetensors index."""

Buffers = Mapping[str, Tensor]
"""Persistent buffers by Hugging Face name; not sharded."""
