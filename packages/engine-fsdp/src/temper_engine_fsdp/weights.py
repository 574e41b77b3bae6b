"""Full tensors under Hugging Face names: streamed out lazily, loaded strictly both ways."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from temper_engine_api.weights import NamedWeight, WeightEntry, check_complete
from temper_engine_fsdp.model.weight_names import Joining, shapes_in_files, split
from temper_engine_fsdp.sharded import Parameters

Buffers = Mapping[str, Tensor]
"""Those that belong to a checkpoint, by Hugging Face name; every rank holds them whole."""

Merge = Callable[[str, Tensor], Tensor]


def describe_weights(parameters: Parameters, buffers: Buffers, *, dtype: torch.dtype) -> list[WeightEntry]:
    """What ``iterate_weights`` will yield, in its order, without gathering anything."""
    shapes = [(part, shape, p.dtype) for name, p in parameters.items() for part, shape in shapes_in_files(name, p.shape)]
    shapes += [(name, b.shape, b.dtype) for name, b in buffers.items()]
    return [WeightEntry(name=name, shape=tuple(shape), dtype=dtype if own.is_floating_point else own) for name, shape, own in shapes]


def iterate_weights(parameters: Parameters, buffers: Buffers, *, dtype: torch.dtype, merge: Merge | None = None) -> Iterator[NamedWeight]:
    """Every parameter and persistent buffer, full, floats in this dtype; one is gathered at a time. Collective.

    Args:
        parameters: the model's weights.
        buffers: beside them.
        dtype: of what comes out.
        merge: adds what an adapter does to a weight, given its name and the full weight; None where there is no adapter.
    """
    for name, parameter in parameters.items():
        if merge is not None:
            full = merge(name, parameter.full(parameter.local())).to(dtype)
        else:
            # Cast before it is gathered: half the traffic in bf16.
            full = parameter.full(parameter.local().to(dtype))
        for part, tensor in split(name, full):
            yield NamedWeight(part, tensor)
    for name, buffer in buffers.items():
        yield NamedWeight(name, buffer.detach().to(dtype if buffer.is_floating_point() else buffer.dtype, copy=True))


@torch.no_grad()
def load_weights(parameters: Parameters, buffers: Buffers, stream: Iterable[NamedWeight]) -> None:
    """Replace every parameter and persistent buffer. Each rank keeps only its shards until the whole stream has been checked.

    Raises:
        WeightError: a name is missing, unexpected or repeated, or a shape differs; nothing has been loaded then.
    """
    arrived: list[WeightEntry] = []
    shards: dict[str, Tensor] = {}
    joining = Joining({name: parameter.shape for name, parameter in parameters.items()})
    for part, tensor in stream:
        arrived.append(WeightEntry(name=part, shape=tuple(tensor.shape), dtype=tensor.dtype))
        if part in buffers and buffers[part].shape == tensor.shape:
            shards[part] = tensor.clone()
        elif (whole := joining.add(part, tensor)) is not None:
            name, full = whole
            shards[name] = parameters[name].part_of(full).to(parameters[name].dtype)
    check_complete(describe_weights(parameters, buffers, dtype=torch.float32), arrived)
    for name, shard in shards.items():
        (parameters[name].local() if name in parameters else buffers[name]).copy_(shard)
