"""The portable training state: master weight, both moments and the update count of every parameter under its Hugging Face name."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import TrainingState, WeightEntry, check_complete
from temper_engine_fsdp.model.weight_names import Joining, split
from temper_engine_fsdp.optimizer import Moments
from temper_engine_fsdp.sharded import Parameters
from temper_engine_fsdp.weights import describe_weights


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
