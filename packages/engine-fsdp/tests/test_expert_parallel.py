"""Test what expert parallelism refuses. The layouts `ep` of the kit test its numbers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import LoraSpec, ModelSpec, Scalar
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.sharding.expert_parallel import check_divisible_experts

SIZES: Mapping[str, Scalar] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
EXPERTS: Mapping[str, Scalar] = {**SIZES, "model_type": "qwen3_moe", "num_experts": 4}


def build(**architecture: Scalar) -> PreTrainedModel:
    fields = {**SIZES, **architecture}
    config = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize(
    ("model_type", "count"),
    [
        ("qwen3_moe", "num_experts"),
        ("mixtral", "num_local_experts"),
        ("gpt_oss", "num_local_experts"),
        ("deepseek_v3", "n_routed_experts"),
        ("glm4_moe", "n_routed_experts"),
    ],
)
def test_experts_of_these_families_can_be_divided(model_type: str, count: str) -> None:
    model = build(
        model_type=model_type, n_group=1, topk_group=1, first_k_dense_replace=1, **{count: 8}
    )
    check_divisible_experts(model, num_shards=4)
    with pytest.raises(ConfigError, match=r"divides the 8 experts of a layer over 3 ranks"):
        check_divisible_experts(model, num_shards=3)


def test_dense_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="this qwen3 model has no experts"):
        check_divisible_experts(build(model_type="qwen3"), num_shards=1)


def test_fsdp1_is_refused() -> None:
    with pytest.raises(ConfigError, match="expert_parallel is on, but strategy fsdp1"):
        FSDPConfig(model=ModelSpec(architecture=EXPERTS), strategy="fsdp1", expert_parallel=True)


def test_copies_on_single_ranks_are_refused(config: FSDPConfig) -> None:
    replace(config, expert_parallel=True, fsdp_size=2).check_num_ranks(4)
    copied = replace(config, expert_parallel=True, fsdp_size=1)
    copied.check_num_ranks(1)
    with pytest.raises(ConfigError, match="has no effect with fsdp_size 1"):
        copied.check_num_ranks(4)


def test_number_of_experts_is_compared_with_the_ranks_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"n_routed_experts": 6}}')
    for model in (
        ModelSpec(path=str(tmp_path)),
        ModelSpec(architecture={"model_type": "qwen3_moe", "num_experts": 6}),
    ):
        config = FSDPConfig(model=model, expert_parallel=True)
        config.check_num_ranks(3)
        with pytest.raises(ConfigError, match=r"divides the 6 experts of a layer over 4 ranks"):
            config.check_num_ranks(4)
        replace(config, fsdp_size=2).check_num_ranks(4)


def test_adapter_on_experts_is_refused(start: Callable[..., FSDPEngine]) -> None:
    lora = LoraSpec(rank=2, alpha=4.0, target_parameters=("mlp.experts.down_proj",))
    with pytest.raises(CapabilityError, match="but expert_parallel divides them"):
        start(model=ModelSpec(architecture=EXPERTS), lora=lora, expert_parallel=True)


def test_check_before_a_run_finds_a_dense_model(config: FSDPConfig) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        FSDPEngine.check_model(replace(config, expert_parallel=True))
