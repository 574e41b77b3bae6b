"""Test LoRA inside experts on one rank: targets, rejected settings and streamed weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.hooks import Context
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_fsdp import components
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine

Start = Callable[..., FSDPEngine]
LORA = LoraSpec(rank=2, alpha=4.0)
BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
INSIDE = replace(LORA, target_parameters=BOTH)


def mixture(config: FSDPConfig) -> ModelSpec:
    """Return the tiny model with four experts in place of each dense layer."""
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    }
    return ModelSpec(architecture={**config.model.architecture, **experts})


def network_of(model: ModelSpec) -> PreTrainedModel:
    fields = dict(model.architecture)
    network: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields)
    )
    return network


def mean_nll(
    data: SequenceBatch, predictions: Mapping[str, Tensor], ctx: Context
) -> tuple[Tensor, Context]:
    return -predictions["logprob"][data.loss_mask].mean(), ctx


def test_experts_are_adapted_where_they_are_named(
    start: Start, batch: SequenceBatch, config: FSDPConfig
) -> None:
    engine = start(model=mixture(config), lora=INSIDE)
    described, tensors = engine.export_adapter()
    assert set(described["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}  # type: ignore[call-overload]
    # Two layers: four projections, and two tensors of experts.
    assert len(tensors) == 2 * (4 + 2) * 2
    # Four experts of rank 2, width 16.
    assert tensors[
        "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"
    ].shape == (8, 32)
    assert tensors["base_model.model.model.layers.1.mlp.experts.lora_B.weight"].shape == (32, 8)
    engine.set_loss_fn(mean_nll)
    losses = []
    for _ in range(4):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(batch, {})
        engine.optimizer_step()
        losses.append(loss)
    assert losses[-1] < losses[0] - 0.05


def test_new_adapter_has_the_initial_values_of_peft(start: Start, config: FSDPConfig) -> None:
    model = mixture(config)
    lora = replace(LORA, target_modules=("q_proj", "o_proj"), target_parameters=BOTH)
    _, tensors = start(model=model, lora=lora).export_adapter()
    network = network_of(model)
    torch.manual_seed(model.seed)
    inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["q_proj", "o_proj"], target_parameters=list(BOTH)), network
    )
    expected = {
        f"base_model.model.{name.replace('.default.', '.')}": p
        for name, p in network.named_parameters()
        if ".lora_" in name
    }
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "layers_block_type": ["moe", "full_attention"],
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        # Its tensors are [experts, input, output]; the second is square.
        (GPT_OSS, ("mlp.experts.gate_up_proj",)),
        ({**GPT_OSS, "intermediate_size": 32}, ("mlp.experts.down_proj",)),
        (NEMOTRON_H, ("experts.up_proj", "experts.down_proj")),
    ],
    ids=["gpt_oss", "gpt_oss-square", "nemotron_h"],
)
def test_merged_experts_compute_what_the_adapter_computes(
    start: Start,
    batch: SequenceBatch,
    config: FSDPConfig,
    fields: Mapping[str, object],
    targets: tuple[str, ...],
) -> None:
    model = ModelSpec(architecture={**config.model.architecture, **fields})  # type: ignore[dict-item]
    lora = replace(LORA, target_modules=("q_proj",), target_parameters=targets)
    adapted = start(model=model, lora=lora)
    described, tensors = adapted.export_adapter()
    generator = torch.Generator().manual_seed(0)
    adapted.load_adapter(
        described,
        {name: torch.randn(each.shape, generator=generator) for name, each in tensors.items()},
    )
    merged = start(model=model)
    base = logprobs_of(merged, batch)
    with adapted.export_weights() as weights:
        merged.load_weights(weights)
    assert (logprobs_of(adapted, batch) - base).abs().max() > 0.1
    torch.testing.assert_close(
        logprobs_of(merged, batch), logprobs_of(adapted, batch), atol=1e-4, rtol=1e-4
    )


def logprobs_of(engine: FSDPEngine, batch: SequenceBatch) -> Tensor:
    local = engine.shard_data(batch)
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            local, forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    outputs = engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids)
    return outputs.columns[HeadOutput.LOGPROB]


def test_adapter_of_streamed_weights_has_the_same_initial_values(
    start: Start, config: FSDPConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network_of(mixture(config)).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    lora = replace(LORA, target_modules=("q_proj",), target_parameters=BOTH)
    built: list[object] = []
    build = components.build_model
    monkeypatch.setattr(
        components, "build_model", lambda *args, **kwargs: built.append(1) or build(*args, **kwargs)
    )
    streamed = start(model=ModelSpec(path=str(tmp_path)), lora=lora)
    assert not built
    monkeypatch.setattr(components, "build_streaming_model", lambda *args, **kwargs: None)
    plain = start(model=ModelSpec(path=str(tmp_path)), lora=lora)
    assert built
    (config_of, actual), (other, expected) = streamed.export_adapter(), plain.export_adapter()
    assert config_of == other
    assert any("experts" in name and tensor.any() for name, tensor in actual.items())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
    with streamed.export_weights() as streamed_weights, plain.export_weights() as plain_weights:
        assert all(
            torch.equal(tensor, plain_tensor)
            for (_, tensor), (_, plain_tensor) in zip(streamed_weights, plain_weights, strict=True)
        )


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (("mlp.experts.up_proj",), "names mlp.experts.up_proj, but only tensors of experts"),
        (
            ("mlp.experts.down_proj", "mlp.gate.weight"),
            "mlp.gate.weight, but only tensors of experts",
        ),
        (("q_norm.weight",), "lora.target_parameters q_norm.weight cannot be adapted"),
    ],
)
def test_error_names_what_cannot_be_adapted_in_a_mixture_of_experts(
    config: FSDPConfig, targets: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        FSDPEngine(
            replace(config, model=mixture(config), lora=replace(LORA, target_parameters=targets))
        ).init_model()


def test_fsdp1_has_no_adapters_inside_experts(config: FSDPConfig) -> None:
    with pytest.raises(ConfigError, match="use strategy fsdp2"):
        FSDPEngine(
            replace(config, model=mixture(config), lora=INSIDE, strategy="fsdp1")
        ).init_model()
