"""A Megatron engine with random moments, for tests of its optimizer's files."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from temper_engine_api.specs import Compute, ModelSpec, OptimizerSpec, PrecisionSpec
from temper_engine_api.weights import TrainingState


@contextmanager
def with_drawn_moments(
    architecture: Mapping[str, Any], *, compute: Compute
) -> Iterator[tuple[Any, list[Any], dict[str, TrainingState]]]:
    """Yield Megatron's model, its optimizers and their states after two made-up updates."""
    pytest.importorskip(
        "megatron.core",
        reason="needs megatron-core: an environment with temper-engine-megatron runs this",
    )
    from temper_engine_megatron.config import MegatronConfig
    from temper_engine_megatron.engine import MegatronEngine

    engine = MegatronEngine(
        MegatronConfig(
            model=ModelSpec(architecture=architecture),
            optimizer=OptimizerSpec(lr=1e-2),
            precision=PrecisionSpec(compute=compute),
            device="cpu",
            distributed_optimizer=True,
        )
    )
    engine.init_model()
    try:
        draw = torch.Generator().manual_seed(0)
        some = lambda tensor: torch.rand(tensor.shape, generator=draw)  # noqa: E731
        expected = {
            state.name: replace(
                state,
                first_moment=some(state.master),
                second_moment=some(state.master),
                update_count=2,
            )
            for state in engine.export_state()
        }
        engine.load_state(iter(expected.values()))
        parts = engine._built
        assert parts is not None
        assert parts.optimizer is not None
        (chunk,) = parts.runner._chunks.unwrapped
        for each in parts.optimizer._optimizers:
            each.data_parallel_group_gloo = (
                each.data_parallel_group
            )  # on a CPU the group is gloo's already
        yield chunk, parts.optimizer._optimizers, expected
    finally:
        engine.close()


def check_states(states: Iterable[TrainingState], expected: Mapping[str, TrainingState]) -> None:
    """Compare states bit for bit with those after the two updates of `with_drawn_moments`."""
    result = {state.name: state for state in states}
    assert result.keys() == expected.keys()
    for name, state in expected.items():
        for column in ("master", "first_moment", "second_moment"):
            assert torch.equal(getattr(result[name], column), getattr(state, column)), (
                name,
                column,
            )
        assert result[name].update_count == 2
