"""The arguments and files that servers are started with."""

import json
from pathlib import Path

from packages.trainer.tests.rollout.models_for_tests import FAMILIES, make_tokenizer
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
