"""Test FLOPs against numbers worked by hand, and the reported throughput."""

from collections.abc import Callable

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.specs import LoraSpec, ModelSpec, Scalar
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.model import packed_attention
from temper_engine_fsdp.model.huggingface_model import build_model
from temper_engine_fsdp.runtime.performance import (
    TrainingFlops,
    count_training_flops,
    measure_matmul_rate,
)

TINY: dict[str, Scalar] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
"""Query, keys and values of two heads, output; and a multilayer perceptron of three matrices."""


def work(*, is_language_model: bool = True, **fields: Scalar) -> TrainingFlops:
    packed_attention.register_kernels()
    spec = ModelSpec(
        architecture={**TINY, **fields},
        model_type="language_model" if is_language_model else "value_model",
    )
    return count_training_flops(
        build_model(spec, attention=packed_attention.SDPA_VARLEN),
        is_language_model=is_language_model,
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_counts_once_and_the_embedding_never(is_tied: bool) -> None:
    assert work(model_type="qwen2", tie_word_embeddings=is_tied).per_token == 6 * (
        2 * LAYER + 61 * 32
    )


def test_a_value_head_is_one_row() -> None:
    assert work(is_language_model=False, model_type="qwen2").per_token == 6 * (2 * LAYER + 32)


def test_attention_flops_are_half_of_those_without_a_mask() -> None:
    # 2 layers of 4 heads of 8: 6 x 4 x 8 x 2 for each squared token.
    assert work(model_type="qwen2").per_squared_length == 384
    assert TrainingFlops(per_token=10.0, per_squared_length=2.0).total([3, 5]) == 10 * 8 + 2 * (
        9 + 25
    )


def test_flops_count_only_the_experts_of_a_token() -> None:
    one, two = (
        work(
            model_type="qwen3_moe",
            num_experts=4,
            num_experts_per_tok=seen,
            moe_intermediate_size=16,
            decoder_sparse_step=1,
        )
        for seen in (1, 2)
    )
    # One more expert of three matrices in each of two layers.
    assert two.per_token - one.per_token == 6 * 2 * 3 * 32 * 16


def test_frozen_weights_count_without_their_gradient(start: Callable[..., FSDPEngine]) -> None:
    engine = start(lora=LoraSpec(rank=2, alpha=4.0))
    adapter = sum(parameter.shape.numel() for parameter in engine._components.trainable.values())
    assert engine._components.throughput.flops.per_token == 4 * (2 * LAYER + 61 * 32) + 6 * adapter


def test_training_reports_throughput_and_evaluation_does_not(
    start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    engine = start()
    engine.set_loss_fn(SftProbe())
    packed = engine.shard_data(batch, max_tokens=20)
    with engine.train_mode():
        trained = engine.forward_backward_batch(packed, forward_only=False).metrics
    with engine.eval_mode():
        evaluated = engine.forward_backward_batch(packed, forward_only=True).metrics
    assert trained["speed/tokens_per_s"].value == batch.num_tokens
    assert trained["speed/tokens_per_s"].weight == trained["speed/mfu"].weight
    assert trained["speed/mfu"].result > 0
    assert not any(name.startswith("speed/") for name in evaluated)


def test_measuring_the_matmul_rate_preserves_the_rng_state() -> None:
    before = torch.get_rng_state()
    measure_matmul_rate.cache_clear()
    assert measure_matmul_rate(torch.device("cpu"), torch.float32) > 1e6
    assert torch.equal(torch.get_rng_state(), before)
