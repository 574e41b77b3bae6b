"""Test grouped products of experts against one expert after another."""

from itertools import chain

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from temper_engine_api.conformance.harness.measurements import run_update
from temper_engine_api.conformance.inputs.batches import (
    VOCABULARY,
    add_training_columns,
    make_batch,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import ModelSpec, OptimizerSpec
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.model.grouped_experts import compute_grouped_experts

HIDDEN, WIDTH = 32, 24
DENSE = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def compute_one_after_another(
    rows: Tensor, probs: Tensor, counts: list[int], first: list[Tensor], second: list[Tensor]
) -> Tensor:
    outputs = []
    for x, p, w1, w2 in zip(rows.split(counts), probs.split(counts), first, second, strict=True):
        gate, up = (x @ w1.t()).chunk(2, dim=-1)
        outputs.append((F.silu(gate) * up * p[:, None]).to(rows.dtype) @ w2.t())
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", [[3, 0, 7, 2], [0, 0, 0, 5], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=ON_GPU),
    ],
    ids=str,
)
def test_grouped_experts_equal_one_after_another_with_gradients(
    counts: list[int], device: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return values.mul(0.3).to(dtype).requires_grad_()

    rows, probs = draw(sum(counts), HIDDEN), draw(sum(counts)).detach().float().requires_grad_()
    first = [draw(2 * WIDTH, HIDDEN) for _ in counts]
    second = [draw(HIDDEN, WIDTH) for _ in counts]
    inputs = list(chain([rows, probs], first, second))
    output = compute_grouped_experts(
        rows,
        probs,
        tokens_per_expert=torch.tensor(counts),
        first=first,
        second=second,
        activation=F.silu,
    )
    expected = compute_one_after_another(rows, probs, counts, first, second)
    torch.testing.assert_close(output, expected)
    grad = draw(*output.shape).detach()
    torch.testing.assert_close(
        torch.autograd.grad(output, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    )


def test_grouped_experts_without_gates_equal_one_after_another() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = [3, 0, 7]
    rows, probs = torch.randn(10, HIDDEN, generator=generator), torch.rand(10, generator=generator)
    first = [torch.randn(WIDTH, HIDDEN, generator=generator) for _ in counts]
    second = [torch.randn(HIDDEN, WIDTH, generator=generator) for _ in counts]
    output = compute_grouped_experts(
        rows,
        probs,
        tokens_per_expert=torch.tensor(counts),
        first=first,
        second=second,
        activation=F.relu,
        is_gated=False,
    )
    expected = [
        (F.relu(x @ w1.t()) * p[:, None]) @ w2.t()
        for x, p, w1, w2 in zip(rows.split(counts), probs.split(counts), first, second, strict=True)
    ]
    torch.testing.assert_close(output, torch.cat(expected))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, CapabilityError, "needs bf16 on CUDA, but the device is cpu"),
        ({"model": ModelSpec(architecture=DENSE)}, ConfigError, "the model has no experts"),
    ],
    ids=["no-cuda", "dense"],
)
def test_grouped_products_that_are_not_possible_are_rejected(
    settings: dict[str, object], error: type[Exception], message: str
) -> None:
    config = MegatronConfig(
        **{  # type: ignore[arg-type]
            "model": ModelSpec(architecture=EXPERTS),
            "device": "cpu",
            "expert_products": "grouped",
            **settings,
        }
    )
    with pytest.raises(error, match=message):
        MegatronEngine(config).init_model()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_updates_with_grouped_products_equal_those_without() -> None:
    batch = make_batch((40, 7, 33, 12), prompt_length=3)
    batch = add_training_columns(batch, logprobs=torch.full((batch.num_tokens,), -4.0))
    norms = {}
    for products in ("grouped", "sequential"):
        config = MegatronConfig(
            model=ModelSpec(architecture={**EXPERTS, "vocab_size": VOCABULARY}, seed=3),
            optimizer=OptimizerSpec(lr=1e-3),
            device="cuda",
            expert_products=products,  # type: ignore[arg-type]
        )
        engine = MegatronEngine(config)
        engine.init_model()
        engine.set_loss_fn(ClippedPpoProbe())
        pack = engine.shard_data(batch, max_tokens=64)
        norms[products] = [run_update(engine, [pack]).grad_norm for _ in range(3)]
        engine.close()
    # Both round to bf16, in other places.
    assert norms["grouped"] == pytest.approx(norms["sequential"], rel=0.02)
