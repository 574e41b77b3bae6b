"""Test fp16 with its loss scale, and parameters, reductions and buffers in bf16.

The conformance kit tests that the loss scale is saved.
"""

from collections.abc import Callable, Mapping

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec, Scalar
from temper_engine_api.weights import NamedWeight
from temper_engine_fsdp.engine import FSDPEngine

ADAMW = OptimizerSpec(lr=1e-2, clip_grad_norm=None)


def norm_of_update(engine: FSDPEngine, batch: SequenceBatch, *, factor: float = 1.0) -> float:
    engine.set_loss_fn(
        lambda data, predictions, ctx: (
            -factor * predictions["logprob"][data.loss_mask].mean(),
            ctx,
        )
    )
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    return engine.optimizer_step()


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_the_norm_of_fp16_is_that_of_fp32(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, strategy: str
) -> None:
    exact = norm_of_update(start(), batch)
    scaled = norm_of_update(
        start(precision=PrecisionSpec(compute="fp16"), strategy=strategy), batch
    )
    # fp16 keeps 11 bits: 5e-4 an operation, about ten operations deep.
    assert scaled == pytest.approx(exact, rel=5e-3)


def test_tiny_gradients_survive_in_fp16(
    start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    # Without the scale these would be below the smallest number of fp16, 6e-8.
    exact = norm_of_update(start(), batch, factor=1e-7)
    assert norm_of_update(
        start(precision=PrecisionSpec(compute="fp16")), batch, factor=1e-7
    ) == pytest.approx(exact, rel=2e-2)


def test_the_scale_doubles_after_enough_updates(
    start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    engine = start(
        precision=PrecisionSpec(
            compute="fp16", initial_loss_scale=8.0, loss_scale_growth_interval=2
        )
    )
    scales = []
    for _ in range(4):
        norm_of_update(engine, batch)
        scales.append(engine.loss_scale.value)
    assert scales == [8.0, 16.0, 16.0, 32.0]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_bf16_masters_train_and_are_exported(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, strategy: str
) -> None:
    spec = PrecisionSpec(compute="bf16", parameters="bf16", reduce="bf16", buffers="bf16")
    exact, lower = start(optimizer=ADAMW), start(optimizer=ADAMW, precision=spec, strategy=strategy)
    assert norm_of_update(lower, batch) == pytest.approx(norm_of_update(exact, batch), rel=5e-2)
    with lower.export_weights() as stream:
        assert {weight.tensor.dtype for weight in stream} == {torch.bfloat16}
    for state, reference in zip(lower.export_state(), exact.export_state(), strict=True):
        assert state.master.dtype == state.first_moment.dtype == torch.float32
        # bf16 keeps 8 bits of a weight, and the first update moves each by up to lr.
        torch.testing.assert_close(state.master, reference.master, rtol=1e-2, atol=2.1e-2)


GLM4_MOE: Mapping[str, Scalar] = {
    "model_type": "glm4_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": None,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_biases_of_routers_are_exported_without_rounding(
    start: Callable[..., FSDPEngine],
) -> None:
    engine = start(model=ModelSpec(architecture=GLM4_MOE), precision=PrecisionSpec(compute="bf16"))
    with engine.export_weights() as stream:
        weights = dict(stream)
    weights[BIAS] = torch.tensor([0.1234567, -0.25, 0.0, 1.0])
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in weights.items())
    with engine.export_weights() as stream:
        exported = dict(stream)
    assert exported[BIAS].dtype == torch.float32
    assert torch.equal(exported[BIAS], weights[BIAS])
    assert {t.dtype for name, t in exported.items() if name != BIAS} == {torch.bfloat16}


def test_memory_is_among_the_metrics(
    start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    engine = start()
    with engine.eval_mode():
        packed = engine.shard_data(batch, max_tokens=64)
        result = engine.forward_backward_batch(packed, forward_only=True, outputs=["logprob"])  # type: ignore[list-item]
    # torch alone takes a hundred mebibytes, and no machine of state has a tebibyte.
    assert 0.1 < result.metrics["memory/host_gib"].result < 1024
