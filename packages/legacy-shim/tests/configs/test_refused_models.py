"""A model that the engine of the translation refuses is named in the report."""

import json
from pathlib import Path

import pytest

from temper_legacy_shim.configs import Outcome, translate

HF = "actor_rollout_ref.model.path"


def refusals(model: str, *more: str, version: str = "v0.8.0") -> list[str]:
    translation = translate(
        [f"{HF}={model}", *more], entry="verl.trainer.main_ppo", version=version
    )
    return [
        finding.message
        for finding in translation.findings
        if "refuses the model" in finding.message
    ]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("meta-llama/Llama-4-Scout-17B", "has sparse, chunked or pure state-space layers"),
        ("deepseek-ai/DeepSeek-V4", "has sparse, chunked or pure state-space layers"),
        ("ai21labs/Jamba-v0.1", "has sparse, chunked or pure state-space layers"),
    ],
)
def test_model_that_the_engine_refuses_is_named_with_the_reason(model: str, reason: str) -> None:
    (message,) = refusals(model)
    assert message.startswith(f"FSDPEngine refuses the model {model}: it {reason}")


@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen2.5-7B",
        "deepseek-ai/deepseek-llm-7b-chat",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "google/gemma-3-1b-it",
        "google/gemma-2-9b-it",
        "openai/gpt-oss-20b",
        "deepseek-ai/DeepSeek-V3",
        "/models/Qwen3-Next-80B-A3B",
        "nvidia/Nemotron-3-Nano-30B",
        "/m/gpt-osseous",
    ],
)
def test_model_that_the_engine_trains_or_that_is_unknown_is_not_named(model: str) -> None:
    assert refusals(model) == []


def test_megatron_trains_fewer_models() -> None:
    assert refusals("google/gemma-2-9b-it", "model_engine=megatron")[0].startswith(
        "MegatronEngine refuses the model google/gemma-2-9b-it"
    )
    for model in (
        "Qwen/Qwen3.5-35B-A3B",
        "THUDM/GLM-4-9B",
        "zai-org/GLM-4.7-Flash",
        "zai-org/GLM-5",
        "google/gemma-7b",
        "allenai/OLMo-2-7B",
    ):
        assert len(refusals(model, "model_engine=megatron")) == 1


@pytest.mark.parametrize(
    ("model_type", "num_refusals"),
    [("glm", 1), ("glm4", 1), ("glm4_moe_lite", 1), ("glm_moe_dsa", 1), ("glm4_moe", 0)],
)
def test_megatron_trains_one_of_the_types_of_glm(
    tmp_path: Path, model_type: str, num_refusals: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert len(refusals(str(tmp_path), "model_engine=megatron")) == num_refusals


@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen3-30B-A3B",
        "openai/gpt-oss-20b",
        "deepseek-ai/DeepSeek-V3",
        "/models/Qwen3-Next-80B-A3B",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "google/gemma-3-1b-it",
        "zai-org/GLM-4.5-Air",
        "zai-org/GLM-4.7",
        "mistralai/Mixtral-8x7B-v0.1",
    ],
)
def test_models_that_megatron_trains_are_not_named(model: str) -> None:
    assert refusals(model, "model_engine=megatron") == []


def test_config_of_a_local_folder_decides_over_its_name(tmp_path: Path) -> None:
    (tmp_path / "llama-4-scout").mkdir()
    (tmp_path / "llama-4-scout/config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps({"model_type": "llama4"}))
    assert refusals(str(tmp_path / "llama-4-scout")) == []
    assert len(refusals(str(tmp_path / "mine"))) == 1


def test_warning_is_a_hazard_and_not_a_question() -> None:
    translation = translate(
        [f"{HF}=ai21labs/Jamba-v0.1"], entry="verl.trainer.main_ppo", version="v0.8.0"
    )
    assert translation.outcome is Outcome.PINNED
