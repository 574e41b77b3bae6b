"""The arguments and files that servers are started with."""

import json
from pathlib import Path

import pytest

from packages.trainer.tests.rollout.models_for_tests import FAMILIES, make_tokenizer
from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load
from temper_trainer.rollout.vllm.server_spec import build_server_spec, build_teacher_server_spec


def test_servers_of_a_vision_language_model_load_no_encoder_of_images(tmp_path: Path) -> None:
    fields = {"model_type": "qwen3_vl", **FAMILIES["qwen3_vl"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    teacher = "teachers.big={backend: vllm, engine: {model: {path: " + str(tmp_path) + "}}}"
    config = load(
        [
            *("task=distill", "rollout=vllm", "data.train.paths=[a.jsonl]", teacher),
            f"actor.engine.model.path={tmp_path}",
        ]
    ).config
    for spec in (
        build_server_spec(config, tokenizer=make_tokenizer()),
        build_teacher_server_spec("big", config.teachers["big"], config=config),
    ):
        assert spec.arguments["language_model_only"] is True
        assert spec.vocab_size == 41


def test_a_cache_of_fixed_size_needs_no_free_gpu_at_the_start(tmp_path: Path) -> None:
    fields = {"model_type": "qwen3_vl", **FAMILIES["qwen3_vl"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    teacher = "teachers.big={backend: vllm, engine: {model: {path: " + str(tmp_path) + "}}}"
    settings = ["task=distill", "rollout=vllm", "data.train.paths=[a.jsonl]", teacher]
    settings += [f"actor.engine.model.path={tmp_path}"]
    for memory, expected in (
        ("kv_cache_bytes=1048576", (1048576, 0.1)),
        ("gpu_memory_utilization=0.3", (None, 0.3)),
        ("enforce_eager=true", (None, None)),
    ):
        config = load([*settings, f"rollout.vllm.{memory}"]).config
        for spec in (
            build_server_spec(config, tokenizer=make_tokenizer()),
            build_teacher_server_spec("big", config.teachers["big"], config=config),
        ):
            keys = ("kv_cache_memory_bytes", "gpu_memory_utilization")
            assert tuple(spec.arguments.get(key) for key in keys) == expected


def test_servers_hold_published_weights_without_the_quantization_of_the_model(
    tmp_path: Path,
) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fields = {"model_type": "qwen3", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    settings = ["rollout=vllm", "data.train.paths=[a.jsonl]", f"actor.engine.model.path={tmp_path}"]
    spec = build_server_spec(load(settings).config, tokenizer=make_tokenizer())
    assert "model" not in spec.arguments
    assert "quantization_config" not in json.loads(spec.files["config.json"])
    with pytest.raises(ConfigError, match="are quantized and those that the trainer publishes"):
        build_server_spec(
            load([*settings, "rollout.vllm.load_format=auto"]).config, tokenizer=make_tokenizer()
        )


def test_config_of_a_vision_language_model_from_scratch_names_the_full_class() -> None:
    architecture = "{model_type: qwen3_vl, text_config: {vocab_size: 41, hidden_size: 24}}"
    config = load(
        [
            *("rollout=vllm", "data.train.paths=[a.jsonl]", "data.tokenizer.kind=word_level"),
            f"actor.engine.model.architecture={architecture}",
        ]
    ).config
    spec = build_server_spec(config, tokenizer=make_tokenizer())
    assert spec.arguments["language_model_only"] is True
    assert json.loads(spec.files["config.json"])["architectures"] == [
        "Qwen3VLForConditionalGeneration"
    ]
