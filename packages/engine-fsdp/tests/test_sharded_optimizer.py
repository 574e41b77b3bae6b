"""Test AdamW on shards of one rank against updates worked by hand."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

from temper_engine_api.specs import OptimizerSpec
from temper_engine_fsdp.runtime import process_group
from temper_engine_fsdp.sharding.sharded_parameter import FSDP2Parameter
from temper_engine_fsdp.training.sharded_optimizer import ShardedAdamW

MakeOptimizer = Callable[[OptimizerSpec], ShardedAdamW]


@pytest.fixture
def parameters() -> Iterator[dict[str, FSDP2Parameter]]:
    membership = process_group.join(device=torch.device("cpu"), timeout_s=60.0)
    mesh = process_group.build_mesh(membership, fsdp_size=None)

    def parameter(name: str, value: Tensor, gradient: Tensor) -> FSDP2Parameter:
        made = nn.Parameter(distribute_tensor(value, mesh, [Replicate()]))
        made.grad = distribute_tensor(gradient, mesh, [Replicate()])
        return FSDP2Parameter(name, made, mesh=mesh, host_mesh=mesh)

    yield {
        "matrix": parameter("matrix", torch.tensor([[2.0]]), torch.tensor([[3.0]])),
        "vector": parameter("vector", torch.tensor([1.0]), torch.tensor([-4.0])),
    }
    process_group.leave(membership)


@pytest.fixture(params=[False, True], ids=["host decides", "device decides"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """True if the update is launched before the norm is known, as on CUDA."""
    assert isinstance(request.param, bool)
    return request.param


@pytest.fixture
def optimizer(parameters: dict[str, FSDP2Parameter], is_async: bool) -> MakeOptimizer:
    def make(spec: OptimizerSpec) -> ShardedAdamW:
        made = ShardedAdamW(parameters, spec=spec, sum_over_shards=lambda square: square)
        assert not made.is_async
        made.is_async = is_async
        return made

    return make


def value(parameter: FSDP2Parameter) -> float:
    return float(parameter.local_shard())


def test_the_first_update_moves_by_the_rate_and_decays_matrices_only(
    parameters: dict[str, FSDP2Parameter], optimizer: MakeOptimizer
) -> None:
    norm = optimizer(OptimizerSpec(weight_decay=0.5, clip_grad_norm=None)).step(lr=0.1)
    # sqrt(3^2 + 4^2) = 5. Bias-corrected, the first step is lr * sign(g):
    # matrix 2 * (1 - 0.1 * 0.5) - 0.1 = 1.8; vector 1 + 0.1 = 1.1, without decay.
    assert norm == 5.0
    assert value(parameters["matrix"]) == pytest.approx(1.8, abs=1e-6)
    assert value(parameters["vector"]) == pytest.approx(1.1, abs=1e-6)


def test_clipping_scales_the_gradient_to_the_limit(
    parameters: dict[str, FSDP2Parameter], optimizer: MakeOptimizer
) -> None:
    sharded = optimizer(OptimizerSpec(clip_grad_norm=0.01))
    assert sharded.step(lr=0.1) == 5.0
    # 0.01 / 5 of each gradient; the first moment is a tenth of it.
    assert float(sharded.adam_states["matrix"].first) == pytest.approx(0.1 * 3.0 * 0.01 / 5.0)
    assert float(sharded.adam_states["vector"].first) == pytest.approx(0.1 * -4.0 * 0.01 / 5.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradient_changes_nothing(
    parameters: dict[str, FSDP2Parameter], optimizer: MakeOptimizer, bad: float
) -> None:
    gradient = parameters["vector"].local_gradient()
    assert gradient is not None
    gradient.fill_(bad)
    sharded = optimizer(OptimizerSpec())
    assert not math.isfinite(sharded.step(lr=0.1))
    assert (value(parameters["matrix"]), value(parameters["vector"])) == (2.0, 1.0)
    assert all(
        float(m.count) == 0 and float(m.first) == 0 and float(m.second) == 0
        for m in sharded.adam_states.values()
    )


def test_a_norm_whose_square_overflows_float32_is_still_finite(
    parameters: dict[str, FSDP2Parameter], optimizer: MakeOptimizer
) -> None:
    gradient = parameters["vector"].local_gradient()
    assert gradient is not None
    gradient.fill_(1e30)
    assert optimizer(OptimizerSpec()).step(lr=0.1) == pytest.approx(1e30)


@pytest.fixture
def huge(parameters: dict[str, FSDP2Parameter]) -> FSDP2Parameter:
    """The vector, with four gradients of -1e30: the sum of their squares overflows float32."""
    vector = parameters["vector"]
    vector.tensor = nn.Parameter(distribute_tensor(torch.ones(4), vector._mesh, [Replicate()]))
    vector.tensor.grad = torch.full_like(vector.tensor, -1e30)
    return vector


def test_gradient_whose_square_overflows_float32_is_clipped(
    huge: FSDP2Parameter, optimizer: MakeOptimizer
) -> None:
    sharded = optimizer(OptimizerSpec(clip_grad_norm=0.5, weight_decay=0.0))
    assert sharded.step(lr=0.1) == pytest.approx(2e30)
    # Each number is clipped to 0.5 / sqrt(4); the first moment is a tenth of it.
    assert sharded.adam_states["vector"].first.tolist() == pytest.approx([-0.025] * 4)
    # Bias-corrected, the first step is lr * sign(g).
    assert huge.local_shard().tolist() == pytest.approx([1.1] * 4, abs=1e-6)
    assert float(sharded.adam_states["vector"].count) == 1


def test_relaunched_update_undoes_what_followed_the_first_launch(
    huge: FSDP2Parameter, optimizer: MakeOptimizer, is_async: bool
) -> None:
    calls: list[tuple[str, float]] = []
    optimizer(OptimizerSpec(clip_grad_norm=0.5)).step(
        lr=0.1,
        after_launch=lambda: calls.append(("gather", float(huge.local_shard()[0]))),
        before_relaunch=lambda: calls.append(("undo", float(huge.local_shard()[0]))),
    )
    updated = float(huge.local_shard()[0])
    assert updated > 1.0
    first = [("gather", 1.0)] if is_async else []
    assert calls == [*first, ("undo", 1.0), ("gather", updated)]


def test_gradient_whose_square_overflows_float32_is_skipped_without_clipping(
    huge: FSDP2Parameter, optimizer: MakeOptimizer
) -> None:
    sharded = optimizer(OptimizerSpec(clip_grad_norm=None))
    assert sharded.step(lr=0.1) == math.inf
    assert huge.local_shard().tolist() == [1.0] * 4
    assert sharded.adam_states["vector"].second.tolist() == [0.0] * 4


@pytest.mark.bitwise
def test_clipping_on_the_device_equals_the_host_bit_for_bit(
    parameters: dict[str, FSDP2Parameter],
) -> None:
    kept = []
    for is_async in (False, True):
        for parameter, weight, gradient in zip(
            parameters.values(), (2.0, 1.0), (0.3, -0.7), strict=True
        ):
            parameter.local_shard().fill_(weight)
            local_gradient = parameter.local_gradient()
            assert local_gradient is not None
            local_gradient.fill_(gradient)
        made = ShardedAdamW(
            parameters,
            spec=OptimizerSpec(clip_grad_norm=0.123),
            sum_over_shards=lambda square: square,
        )
        made.is_async = is_async
        norm = made.step(lr=0.1)
        kept.append(
            [
                norm,
                *(value(p) for p in parameters.values()),
                *(float(m.second) for m in made.adam_states.values()),
            ]
        )
    assert kept[0] == kept[1]


def test_after_launch_is_called_after_the_weights_change(
    parameters: dict[str, FSDP2Parameter], optimizer: MakeOptimizer
) -> None:
    seen: list[float] = []
    optimizer(OptimizerSpec()).step(
        lr=0.1, after_launch=lambda: seen.append(value(parameters["vector"]))
    )
    assert seen == [value(parameters["vector"])]
    assert seen != [1.0]
