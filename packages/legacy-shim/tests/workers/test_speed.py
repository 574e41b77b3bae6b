import pytest

from temper_legacy_shim.workers.engine.speed import operations, peak

TINY = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
}


def test_operations_of_a_dense_model_are_six_per_weight_and_token_and_attention_on_top() -> None:
    # A layer: MLP 8 * 16 * 3 = 384; attention 8 * (8 + 4 + 4 + 8) = 192. Both layers 1152,
    # embeddings and head 2 * 10 * 8 = 160. 6 * 1312 weights * 5 tokens = 39360; attention 6 * (2^2
    # + 3^2) * head width 2 * 4 heads * 2 layers = 1248.
    assert operations(TINY, [2, 3]) == 39360 + 1248


def test_of_experts_those_count_that_a_token_visits() -> None:
    # MLP: 8 * (2 experts * 4 * 3) + router 8 * 6 = 240 in the place of 384: 6 * (1312 - 2 * 144) *
    # 5 = 30720.
    experts = {
        **TINY,
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
    }
    assert operations(experts, [2, 3]) == 30720 + 1248


def test_what_is_not_in_the_tables_has_no_fraction() -> None:
    assert operations({"model_type": "mamba"}, [5]) == 0
    assert 1.0 / peak("Some Card") == 0
    assert peak("NVIDIA H200") == peak("NVIDIA H100 80GB HBM3") == pytest.approx(989e12)
    assert peak("NVIDIA L40S") == pytest.approx(362.05e12)
    assert peak("NVIDIA H20") == pytest.approx(148e12)
