"""Full tensors under Hugging Face names: streamed out lazily, loaded strictly both ways."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from temper_engine_api.checkpoint.saved_state import COUNT, FILES_FOLDER, FIRST, SECOND, SavedState
from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight, TrainingState, WeightEntry, check_complete
from temper_engine_fsdp.model.weight_names import Joining, shapes_in_files, split
from temper_engine_fsdp.sharding.sharded_parameter import Buffers, Parameters
from temper_engine_fsdp.training.sharded_optimizer import Moments

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


def iterate_state(parameters: Parameters, moments: Mapping[str, Moments]) -> Iterator[TrainingState]:
    """Full float32 tensors, one parameter at a time. Collective."""
    for name, parameter in parameters.items():
        state, count = moments[name], int(moments[name].count)
        full = (parameter.full(parameter.local()).float(), parameter.full(state.first), parameter.full(state.second))
        for parts in zip(*(split(name, tensor) for tensor in full), strict=True):
            (part, master), (_, first), (_, second) = parts
            yield TrainingState(name=part, master=master, first_moment=first, second_moment=second, update_count=count)


@torch.no_grad()
def load_state(parameters: Parameters, moments: Mapping[str, Moments], stream: Iterable[TrainingState]) -> None:
    """Replace masters, moments and counts; each rank keeps only its shards until the whole stream has been checked.

    Raises:
        WeightError: a name is missing, unexpected or repeated, or a shape differs; nothing has been loaded then.
    """
    arrived: list[WeightEntry] = []
    shards: dict[str, tuple[Tensor, Tensor, Tensor, int]] = {}
    sizes = {name: parameter.shape for name, parameter in parameters.items()}
    joining = [Joining(sizes) for _ in range(3)]
    for state in stream:
        shapes = {tuple(t.shape) for t in (state.master, state.first_moment, state.second_moment)}
        if len(shapes) != 1:
            raise WeightError(f"master and moments of {state.name} differ in shape: {sorted(shapes)}. Nothing was loaded.")
        arrived.append(WeightEntry(name=state.name, shape=shapes.pop(), dtype=state.master.dtype))
        tensors = (state.master, state.first_moment, state.second_moment)
        wholes = [one.add(state.name, tensor) for one, tensor in zip(joining, tensors, strict=True)]
        for name, _ in filter(None, wholes[:1]):
            master, first, second = (parameters[name].part_of(whole[1]) for whole in wholes if whole is not None)
            # Experts of one tensor are updated together.
            shards[name] = (master, first, second, state.update_count)
    check_complete(describe_weights(parameters, {}, dtype=torch.float32), arrived)
    for name, (master, first, second, count) in shards.items():
        parameters[name].local().copy_(master)
        moments[name].first.copy_(first)
        moments[name].second.copy_(second)
        moments[name].count.fill_(float(count))


def open_files(directory: str) -> SavedState:
    """What lies in ``state/``; no communication: every rank reads whole tensors from the disk."""
    places: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(directory, FILES_FOLDER).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            places |= dict.fromkeys(names, path)
            masters = [name for name in names if name.startswith("master.")]
            shapes |= {name.removeprefix("master."): tuple(file.get_slice(name).get_shape()) for name in masters}

    def read(kind: str, name: str) -> Tensor:
        key = f"{'master' if kind == 'weight' else kind}.{name}"
        with safe_open(places[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    has_moments = all(f"{kind}.{name}" in places for name in shapes for kind in (FIRST, SECOND, COUNT))
    return SavedState(directory=directory, weights=shapes, has_moments=has_moments, read=read)
