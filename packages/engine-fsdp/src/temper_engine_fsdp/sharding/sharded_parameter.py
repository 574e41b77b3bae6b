"""One parameter and this rank's shard of it, whichever way it is cut: by rows (FSDP2) or as a run of the flattened tensor (FSDP1).

What else is kept per entry of a parameter (a moment, say) is cut the same way: a shard is any tensor of ``local()``'s shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

Placements = Sequence[Placement]
# torch 2.13 has another name for it, and warns of the old one.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardedParameter(ABC):
    """A parameter under its Hugging Face name."""

    def __init__(self, name: str, parameter: nn.Parameter, *, shape: torch.Size) -> None:
        self.name = name
        self.tensor = parameter
        self.shape = shape
        """Of the whole parameter."""

    @property
    def is_matrix(self) -> bool:
        """Whether weight decay applies: two or more dimensions."""
        return len(self.shape) >= 2

    @property
    def dtype(self) -> torch.dtype:
        """Of the master weight."""
        return self.tensor.dtype

    @abstractmethod
    def local_shard(self) -> Tensor:
        """This rank's shard, sharing the parameter's memory."""

    @abstractmethod
    def local_gradient(self) -> Tensor | None:
        """This rank's shard of the reduced gradient, sharing its memory; None where there is none."""

    @abstractmethod
    def gather(self, shard: Tensor) -> Tensor:
        """The whole of what every rank holds a shard of, in memory of its own. Collective."""

    @abstractmethod
    def take_shard(self, full: Tensor) -> Tensor:
        """A copy of this rank's part of a whole tensor that every rank holds, on the parameter's device. No communication."""

    @abstractmethod
    def to_row_dtensor(self, shard: Tensor) -> DTensor:
        """Cut by rows, as checkpoints hold it; shares memory where shards are rows already. Collective."""

    @abstractmethod
    def from_row_dtensor(self, rows: DTensor) -> Tensor:
        """The shard again, from what ``as_rows`` gave or was filled into. Collective."""


class FSDP2Parameter(ShardedParameter):
    """Of FSDP2: a DTensor.

    Its own ``device_mesh`` is never asked: what torch remembers of an operation hands out the mesh it was first done on, and an equal mesh
    of an earlier engine names groups that are gone, or are others now.
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
        mesh = self._mesh_of(shard)
        group = mesh.get_group(mesh.ndim - 1)
        if group.size() == 1:
            return shard.clone()
        # As `fully_shard` cuts: equal runs of rows, of which the last ones may be short or empty. One plain collective, because a
        # DTensor's own way to its whole costs several times as much where tensors are small.
        num_rows = -(-self.shape[0] // group.size())
        padded = shard.contiguous()
        if len(shard) < num_rows:
            padded = shard.new_zeros(num_rows, *self.shape[1:])
            padded[: len(shard)] = shard
        gathered = shard.new_empty(num_rows * group.size(), *self.shape[1:])
        _gather(gathered, padded, group=group)
        return gathered[: self.shape[0]]

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
        placements, mesh = self._layout.placements, self._mesh_of(shard)
        return DTensor.from_local(
            shard, mesh, placements, run_check=False, shape=self.shape, stride=self.tensor.stride()
        )

    def from_row_dtensor(self, rows: DTensor) -> Tensor:
        """See ShardedParameter."""
        return local_tensor(rows)

    def _mesh_of(self, shard: Tensor) -> DeviceMesh:
        return self._host_mesh if shard.device.type == "cpu" else self._mesh

    @property
    def _layout(self) -> DTensor:
        assert isinstance(self.tensor.data, DTensor)
        return self.tensor.data


class FSDP1Parameter(ShardedParameter):
    """Of FSDP1: ranks hold consecutive runs of the flattened parameter, of any length, also of none."""

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
        """Entries of each rank of the group."""
        rank = dist.get_rank(self._group)
        self._local_slice = slice(sum(shard_sizes[:rank]), sum(shard_sizes[: rank + 1]))

    def local_shard(self) -> Tensor:
        """See ShardedParameter."""
        return self.tensor.detach().view(-1)

    def local_gradient(self) -> Tensor | None:
        """See ShardedParameter; an empty run has an empty gradient."""
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
        longest = max(self._shard_sizes)
        padded = shard.new_zeros(longest)
        padded[: shard.numel()] = shard
        gathered = [torch.empty_like(padded) for _ in self._shard_sizes]
        dist.all_gather(gathered, padded, group=self._group)
        return torch.cat(
            [shard[:size] for shard, size in zip(gathered, self._shard_sizes, strict=True)]
        ).view(self.shape)

    def take_shard(self, full: Tensor) -> Tensor:
        """See ShardedParameter."""
        return full.reshape(-1)[self._local_slice].to(self.tensor.device, copy=True)

    def to_row_dtensor(self, shard: Tensor) -> DTensor:
        """See ShardedParameter."""
        mesh = self._host_mesh if shard.device.type == "cpu" else self._mesh
        placements = [*([Replicate()] * (mesh.ndim - 1)), Shard(0)]
        rows = distribute_rows(self.gather(shard), mesh=mesh, placements=placements)
        # What is kept is the rows, not the whole tensor that they are a view of.
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
    """This rank's part of a DTensor, sharing memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def distribute_rows(full: Tensor, *, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """A whole tensor, which every rank holds, cut by rows. No communication."""
    # Every rank holds the whole tensor, so none is the source.
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


ShardedParameters = Mapping[str, ShardedParameter]
"""By Hugging Face name; tied ones once, under the name that a safetensors index holds."""

Buffers = Mapping[str, Tensor]
"""Those that belong to a checkpoint, by Hugging Face name; every rank holds them whole."""
