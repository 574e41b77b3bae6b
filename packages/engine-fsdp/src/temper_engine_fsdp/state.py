"""The portable training state: master weight, both moments and the update count of every parameter under its Hugging Face name."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import TrainingState, WeightEntry, check_complete
from temper_engine_fsdp.optimizer import Moments
from temper_engine_fsdp.sharded import Parameters


def iterate_state(parameters: Parameters, moments: Mapping[str, Moments]) -> Iterator[TrainingState]:
    """Full float32 tensors, one parameter at a time. Collective."""
    for name, parameter in parameters.items():
        state = moments[name]
        yield TrainingState(
            name=name,
            master=parameter.full(parameter.local()).float(),
            first_moment=parameter.full(state.first),
            second_moment=parameter.full(state.second),
            update_count=int(state.count),
        )


@torch.no_grad()
def load_state(parameters: Parameters, moments: Mapping[str, Moments], stream: Iterable[TrainingState]) -> None:
    """Replace masters, moments and counts; each rank keeps only its shards until the whole stream has been checked.

    Raises:
        WeightError: a name is missing, unexpected or repeated, or a shape differs; nothing has been loaded then.
    """
    arrived: list[WeightEntry] = []
    shards: dict[str, tuple[Tensor, Tensor, Tensor, int]] = {}
    for state in stream:
        shapes = {tuple(t.shape) for t in (state.master, state.first_moment, state.second_moment)}
        if len(shapes) != 1:
            raise WeightError(f"master and moments of {state.name} differ in shape: {sorted(shapes)}. Nothing was loaded.")
        arrived.append(WeightEntry(name=state.name, shape=shapes.pop(), dtype=state.master.dtype))
        parameter = parameters.get(state.name)
        if parameter is not None and parameter.shape == state.master.shape:
            master, first, second = (parameter.part_of(x) for x in (state.master, state.first_moment, state.second_moment))
            shards[state.name] = (master, first, second, state.update_count)
    check_complete([WeightEntry(name=name, shape=tuple(p.shape), dtype=p.dtype) for name, p in parameters.items()], arrived)
    for name, (master, first, second, count) in shards.items():
        parameters[name].local().copy_(master)
        moments[name].first.copy_(first)
        moments[name].second.copy_(second)
        moments[name].count.fill_(float(count))
