"""Full tensors under Hugging Face names: streamed out lazily, loaded strictly both ways."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from temper_engine_api.weights import NamedWeight, WeightEntry, check_complete
from temper_engine_fsdp.module import PREFIX


def named_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Sharded parameters by Hugging Face name; tied ones come once, under the name that a safetensors index holds."""
    return {name.removeprefix(PREFIX): parameter for name, parameter in root.named_parameters()}


def named_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to a checkpoint, by Hugging Face name."""
    persistent = root.state_dict().keys()
    return {name.removeprefix(PREFIX): buffer for name, buffer in root.named_buffers() if name in persistent}


def iterate_weights(root: nn.Module, *, dtype: torch.dtype) -> Iterator[NamedWeight]:
    """Every parameter and persistent buffer, full, floats in this dtype; one is gathered at a time. Collective."""
    for name, tensor in {**named_parameters(root), **named_buffers(root)}.items():
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        yield NamedWeight(name, full(tensor.detach().to(wanted), shares_memory=tensor.dtype == wanted))


@torch.no_grad()
def load_weights(root: nn.Module, stream: Iterable[NamedWeight]) -> None:
    """Replace every parameter and persistent buffer. Each rank keeps only its shards until the whole stream has been checked.

    Raises:
        WeightError: a name is missing, unexpected or repeated, or a shape differs; nothing has been loaded then.
    """
    targets: Mapping[str, Tensor] = {**named_parameters(root), **named_buffers(root)}
    arrived: list[WeightEntry] = []
    shards: dict[str, Tensor] = {}
    for name, tensor in stream:
        arrived.append(WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype))
        if name in targets and targets[name].shape == tensor.shape:
            shards[name] = shard_like(tensor, targets[name])
    check_complete([WeightEntry(name=name, shape=tuple(t.shape), dtype=t.dtype) for name, t in targets.items()], arrived)
    for name, shard in shards.items():
        target = targets[name]
        (target.to_local() if isinstance(target, DTensor) else target).copy_(shard)


def full(tensor: Tensor, *, shares_memory: bool) -> Tensor:
    """The full tensor of a sharded one. Collective.

    Args:
        tensor: sharded or not.
        shares_memory: whether it still lies in the model's memory, so that a result that aliases it is copied.
    """
    if not isinstance(tensor, DTensor):
        return tensor.clone() if shares_memory else tensor
    gathered: Tensor = tensor.full_tensor()
    is_alias = gathered.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
    return gathered.clone() if shares_memory and is_alias else gathered


def shard_like(tensor: Tensor, target: Tensor) -> Tensor:
    """A copy of this rank's part of a full tensor, in the target's dtype and on its device. No communication."""
    if not isinstance(target, DTensor):
        return tensor.to(target.device, target.dtype, copy=True)
    # Every rank holds the whole tensor, so none is the source.
    sharded = distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    return sharded.to_local().to(target.dtype, copy=True)
