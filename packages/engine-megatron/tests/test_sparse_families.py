"""Test routers with biases: their checkpoints, and rules of groups that Megatron does not have."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.conformance.inputs.tiny_models import quantize_as_published, write_model
from temper_engine_api.errors import CapabilityError, WeightError
from temper_engine_api.specs import ModelSpec, PrecisionSpec
from temper_engine_api.weights import NamedWeight
from temper_engine_megatron.components import check_model
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.huggingface.model_comparison import accept_untested_models

GLM4_MOE = {
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
    "n_group": 2,
    "topk_group": 1,
    "pad_token_id": None,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def export_weights(engine):
    with engine.export_weights() as stream:
        return dict(stream)


def test_checkpoint_has_the_biases_of_routers(start, tmp_path):
    engine = start(model=ModelSpec(architecture=GLM4_MOE))
    weights = export_weights(engine)
    weights[BIAS] = torch.tensor([0.5, -0.25, 0.0, 1.0])
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in weights.items())
    engine.save_checkpoint(str(tmp_path))
    other = start(model=ModelSpec(architecture=GLM4_MOE))
    assert torch.equal(export_weights(other)[BIAS], torch.zeros(4))
    other.load_checkpoint(str(tmp_path))
    assert torch.equal(export_weights(other)[BIAS], weights[BIAS])


def test_biases_of_routers_are_exported_without_rounding(start):
    engine = start(model=ModelSpec(architecture=GLM4_MOE), precision=PrecisionSpec(compute="bf16"))
    weights = export_weights(engine)
    weights[BIAS] = torch.tensor([0.1234567, -0.25, 0.0, 1.0])
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in weights.items())
    exported = export_weights(engine)
    assert exported[BIAS].dtype == torch.float32
    assert torch.equal(exported[BIAS], weights[BIAS])
    assert {t.dtype for name, t in exported.items() if name != BIAS} == {torch.bfloat16}


def test_two_shared_experts_of_glm_are_one_of_twice_their_width(start):
    with accept_untested_models():
        engine = start(model=ModelSpec(architecture={**GLM4_MOE, "n_shared_experts": 2}))
    weights = export_weights(engine)
    assert weights["model.layers.1.mlp.shared_experts.gate_proj.weight"].shape == (48, 32)
    assert weights["model.layers.1.mlp.shared_experts.down_proj.weight"].shape == (32, 48)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_model_with_dense_layers_only_is_trained_without_router_metrics(start, batch, family):
    # For example DeepSeek-V3, of which the first three layers are dense, with two layers.
    tiny = FAMILIES[family]
    fields = {**tiny.settings, **tiny.architecture, "num_hidden_layers": 2}
    engine = start(model=ModelSpec(architecture={**fields, "first_k_dense_replace": 3}))
    engine.set_loss_fn(SftProbe())
    packed = engine.shard_data(batch, max_tokens=64)
    with engine.train_mode():
        metrics = engine.forward_backward_batch(packed, forward_only=False).metrics
    assert engine.optimizer_step() > 0
    assert not any(name.startswith("router/") for name in metrics)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_group": 4, "topk_group": 2}, "ranks groups by their two best experts"),
        ({"norm_topk_prob": False}, "without norm_topk_prob"),
    ],
)
def test_router_that_megatron_computes_otherwise_is_refused(config, changes, match):
    spec = ModelSpec(architecture={**GLM4_MOE, "n_routed_experts": 8, **changes})
    with pytest.raises(CapabilityError, match=match):
        MegatronEngine(replace(config, model=spec)).init_model()


def test_published_fp8_weights_are_dequantized(config, start, tmp_path, caplog):
    published = write_model(FAMILIES["deepseek_v3"], folder=tmp_path)
    expected = quantize_as_published(published)
    model = ModelSpec(path=str(published))
    check_model(replace(config, model=model))
    with caplog.at_level(logging.INFO):
        loaded = export_weights(start(model=model))
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    (line,) = [record.message for record in caplog.records if "not loaded" in record.message]
    assert line.startswith("1 tensors in")
    assert line.endswith("as model.layers.61.eh_proj.weight")


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, CapabilityError, "is 'awq'"),
        ({"moe_intermediate_size": 40}, WeightError, r"has the shape \[24, 32\] instead of \[40"),
        ({"q_lora_rank": None}, WeightError, r"missing \['model\.layers\.0\.self_attn\.q_proj"),
    ],
)
def test_files_of_another_model_are_refused_before_the_start(
    config, tmp_path, changes, error, match
):
    folder = write_model(FAMILIES["deepseek_v3"], folder=tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(error, match=match):
        check_model(replace(config, model=ModelSpec(path=str(folder))))
