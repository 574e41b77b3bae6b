"""AdamW on shards, on one rank, against the update worked by hand."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

from temper_engine_api.specs import OptimizerSpec
from temper_engine_fsdp import process_group
from temper_engine_fsdp.optimizer import ShardedAdamW
from temper_engine_fsdp.sharded import RowSharded


@pytest.fixture
def parameters() -> Iterator[dict[str, RowSharded]]:
    membership = process_group.join(device=torch.device("cpu"), timeout_s=60.0)
    mesh = process_group.build_mesh(membership, fsdp_size=None)

    def parameter(name: str, value: Tensor, gradient: Tensor) -> RowSharded:
        made = nn.Parameter(distribute_tensor(value, mesh, [Replicate()]))
        made.grad = distribute_tensor(gradient, mesh, [Replicate()])
        return RowSharded(name, made, host_mesh=mesh)

    yield {
        "matrix": parameter("matrix", torch.tensor([[2.0]]), torch.tensor([[3.0]])),
        "vector": parameter("vector", torch.tensor([1.0]), torch.tensor([-4.0])),
    }
    process_group.leave(membership)


def optimizer(parameters: dict[str, RowSharded], spec: OptimizerSpec) -> ShardedAdamW:
    return ShardedAdamW(parameters, spec=spec, sum_over_shards=lambda square: square)


def value(parameter: RowSharded) -> float:
    return float(parameter.local())


def test_the_first_update_moves_by_the_rate_and_decays_matrices_only(parameters: dict[str, RowSharded]) -> None:
    norm = optimizer(parameters, OptimizerSpec(weight_decay=0.5, clip_grad_norm=None)).step(lr=0.1)
    # sqrt(3^2 + 4^2) = 5. Bias-corrected, the first step is lr * sign(g):
    # matrix 2 * (1 - 0.1 * 0.5) - 0.1 = 1.8; vector 1 + 0.1 = 1.1, without decay.
    assert norm == 5.0
    assert value(parameters["matrix"]) == pytest.approx(1.8, abs=1e-6)
    assert value(parameters["vector"]) == pytest.approx(1.1, abs=1e-6)


def test_clipping_scales_the_gradient_to_the_limit(parameters: dict[str, RowSharded]) -> None:
    sharded = optimizer(parameters, OptimizerSpec(clip_grad_norm=0.01))
    assert sharded.step(lr=0.1) == 5.0
    # 0.01 / 5 of each gradient; the first moment is a tenth of it.
    assert float(sharded.moments["matrix"].first) == pytest.approx(0.1 * 3.0 * 0.01 / 5.0)
    assert float(sharded.moments["vector"].first) == pytest.approx(0.1 * -4.0 * 0.01 / 5.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_gradient_touches_nothing(parameters: dict[str, RowSharded], bad: float) -> None:
    gradient = parameters["vector"].local_gradient()
    assert gradient is not None
    gradient.fill_(bad)
    sharded = optimizer(parameters, OptimizerSpec())
    assert not math.isfinite(sharded.step(lr=0.1))
    assert (value(parameters["matrix"]), value(parameters["vector"])) == (2.0, 1.0)
    assert all(float(m.count) == 0 and float(m.first) == 0 and float(m.second) == 0 for m in sharded.moments.values())


def test_a_norm_whose_square_overflows_float32_is_still_finite(parameters: dict[str, RowSharded]) -> None:
    gradient = parameters["vector"].local_gradient()
    assert gradient is not None
    gradient.fill_(1e30)
    assert optimizer(parameters, OptimizerSpec()).step(lr=0.1) == pytest.approx(1e30)
