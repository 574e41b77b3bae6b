"""Test the checks of LoRA adapters."""

import json
from pathlib import Path

import pytest
import torch

from temper_engine_api.adapter_checks import (
    build_lora_config,
    check_adapter_directory,
    check_adapter_tensors,
    check_base_weights,
    check_same_adapter,
    check_target_names,
    find_adapter_weights,
    to_adapter_config,
)
from temper_engine_api.errors import CapabilityError, CheckpointError, ConfigError, WeightError
from temper_engine_api.specs import LoraSpec, ModelSpec

NAMES = ("model.layers.0.mlp.up_proj", "lm_head")


def test_new_head_of_a_reward_model_is_trained_in_full_and_gets_no_adapter() -> None:
    model = ModelSpec(path="model", model_type="reward_model")
    config = build_lora_config(LoraSpec(rank=2, alpha=4.0), model=model)
    assert config["modules_to_save"] == ["score"]
    assert config["exclude_modules"] == ["score"]
    assert config["lora_alpha"] == 4


def test_adapter_config_has_sorted_lists_and_is_for_inference() -> None:
    content = to_adapter_config({"r": 2, "target_modules": {"v_proj", "q_proj"}})
    assert content == {"r": 2, "target_modules": ["q_proj", "v_proj"], "inference_mode": True}


def test_directory_without_a_config_or_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"which has no adapter_config\.json"):
        check_adapter_directory(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(CapabilityError, match="has type IA3, but only LORA"):
        check_adapter_directory(str(tmp_path))


def test_target_name_without_a_module_is_refused_with_the_names_there_are() -> None:
    check_target_names(LoraSpec(rank=2, alpha=4.0, target_modules=("up_proj",)), module_names=NAMES)
    with pytest.raises(ConfigError, match=r"names query, .* use another of lm_head, up_proj"):
        check_target_names(
            LoraSpec(rank=2, alpha=4.0, target_modules=("up_proj", "query")), module_names=NAMES
        )
    with pytest.raises(ConfigError, match=r"lora\.exclude_modules names none\.\*"):
        check_target_names(
            LoraSpec(rank=2, alpha=4.0, exclude_modules="none.*"), module_names=NAMES
        )


def test_other_rank_is_refused() -> None:
    own = {"r": 2, "lora_alpha": 4, "use_rslora": False, "use_dora": False}
    own |= {"rank_pattern": {}, "alpha_pattern": {}}
    check_same_adapter({"lora_alpha": 4}, own_config=own)
    with pytest.raises(ConfigError, match="has r 8, but this engine has 2"):
        check_same_adapter({"r": 8}, own_config=own)


def test_checkpoint_of_only_an_adapter_is_refused_if_the_base_was_replaced() -> None:
    check_base_weights(has_replaced_base=True, has_weights=True, directory="d")
    with pytest.raises(CheckpointError, match="contains only an adapter"):
        check_base_weights(has_replaced_base=True, has_weights=False, directory="d")


def test_missing_adapter_tensor_is_refused() -> None:
    check_adapter_tensors({"a": (2,)}, {"a": torch.zeros(2)})
    with pytest.raises(WeightError, match="b"):
        check_adapter_tensors({"a": (2,), "b": (2,)}, {"a": torch.zeros(2)})


def test_task_type_of_a_new_adapter_follows_the_model_type() -> None:
    spec = LoraSpec(rank=2, alpha=4.0)
    kinds = ("language_model", "value_model", "reward_model")
    configs = [
        build_lora_config(spec, model=ModelSpec(path="model", model_type=kind)) for kind in kinds
    ]
    assert [config["task_type"] for config in configs] == ["CAUSAL_LM", "TOKEN_CLS", "TOKEN_CLS"]


def test_adapter_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"has no adapter_model\.safetensors: save it as"):
        find_adapter_weights(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").touch()
    assert find_adapter_weights(str(tmp_path)) == tmp_path / "adapter_model.safetensors"
