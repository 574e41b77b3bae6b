"""The portable training state: master weight, both moments and the update count of every parameter under its Hugging Face name."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import TrainingState, WeightEntry, check_complete
from temper_engine_fsdp.optimizer import Moments, local
from temper_engine_fsdp.weights import full, shard_like


def like(parameter: nn.Parameter, shard: Tensor) -> DTensor:
    """A shard of another quantity, in the layout of a parameter."""
    assert isinstance(parameter.data, DTensor)
    return DTensor.from_local(
        shard,
        parameter.data.device_mesh,
        parameter.data.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def iterate_state(parameters: Mapping[str, nn.Parameter], moments: Mapping[str, Moments]) -> Iterator[TrainingState]:
    """Full float32 tensors, one parameter at a time. Collective."""
    for name, parameter in parameters.items():
        state = moments[name]
        yield TrainingState(
            name=name,
            master=full(parameter.detach(), shares_memory=True),
            first_moment=full(like(parameter, state.first), shares_memory=True),
            second_moment=full(like(parameter, state.second), shares_memory=True),
            update_count=int(state.count),
        )


@torch.no_grad()
def load_state(parameters: Mapping[str, nn.Parameter], moments: Mapping[str, Moments], stream: Iterable[TrainingState]) -> None:
    """Replace masters, moments and counts; each rank keeps only its shards until the whole stream has been checked.

    Raises:
        WeightError: a name is missing, unexpected or repeated, or a shape differs; nothing has been loaded then.
    """
    arrived: list[WeightEntry] = []
    shards: dict[str, tuple[Tensor, Moments]] = {}
    for state in stream:
        shapes = {tuple(t.shape) for t in (state.master, state.first_moment, state.second_moment)}
        if len(shapes) != 1:
            raise WeightError(f"master and moments of {state.name} differ in shape: {sorted(shapes)}. Nothing was loaded.")
        arrived.append(WeightEntry(name=state.name, shape=shapes.pop(), dtype=state.master.dtype))
        parameter = parameters.get(state.name)
        if parameter is not None and parameter.shape == state.master.shape:
            shards[state.name] = (shard_like(state.master, parameter.data), _sharded_moments(state, parameter.data))
    check_complete([WeightEntry(name=name, shape=tuple(p.shape), dtype=p.dtype) for name, p in parameters.items()], arrived)
    for name, (master, loaded) in shards.items():
        local(parameters[name]).copy_(master)
        moments[name].first.copy_(loaded.first)
        moments[name].second.copy_(loaded.second)
        moments[name].count.copy_(loaded.count)


def _sharded_moments(state: TrainingState, target: Tensor) -> Moments:
    return Moments(
        first=shard_like(state.first_moment, target),
        second=shard_like(state.second_moment, target),
        count=torch.tensor(float(state.update_count)),
    )
