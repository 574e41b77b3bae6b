"""Test that the config rejects parallel sizes that do not make a layout."""

from dataclasses import fields
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_engine_api.registry import load_conformance_layouts, load_engine_config_class
from temper_engine_api.specs import LoraSpec, ModelSpec, PrecisionSpec
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.huggingface.huggingface_model import load_hf_config

MODEL = ModelSpec(path="/a/model")
VALUE_MODEL = ModelSpec(path="/a/model", model_type="value_model")
FP16 = PrecisionSpec(compute="fp16")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"sequence_parallel": True}, "tensor_parallel is 1"),
        ({"virtual_pipeline": 2}, "both must be at least 2"),
        ({"virtual_pipeline": 1, "pipeline_parallel": 2}, "both must be at least 2"),
    ],
)
def test_sizes_without_meaning_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        MegatronConfig(model=MODEL, **changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"float8": "tensorwise"},
            "float8 is tensorwise, but layers is torch, .* set layers to transformer_engine",
        ),
        (
            {"float8": "blockwise", "layers": "transformer_engine", "precision": FP16},
            "float8 is blockwise, but precision.compute is fp16: .* set it to bf16",
        ),
        (
            {
                "float8": "tensorwise",
                "layers": "transformer_engine",
                "lora": LoraSpec(rank=2, alpha=4.0),
            },
            "float8 is tensorwise, but lora is on, .* set float8 to none",
        ),
        (
            {"float8": "tensorwise", "layers": "transformer_engine", "model": VALUE_MODEL},
            "model.model_type is value_model, whose scalar head prevents float8 products",
        ),
        (
            {
                "float8": "blockwise",
                "layers": "transformer_engine",
                "tensor_parallel": 2,
                "sequence_parallel": True,
            },
            "have not been tested together: set float8 to tensorwise",
        ),
        (
            {"layers": "transformer_engine", "precision": PrecisionSpec(compute="fp32")},
            "precision.compute is fp32, which TransformerEngine multiplies in TF32",
        ),
        (
            {"layers": "transformer_engine", "device": "cpu"},
            "device is cpu, and TransformerEngine needs CUDA: set layers to torch",
        ),
    ],
)
def test_layers_that_cannot_compute_as_requested_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        MegatronConfig(**{"model": MODEL, **changes})


def test_replica_size_is_the_product_of_all_splits():
    config = MegatronConfig(model=MODEL, tensor_parallel=2, pipeline_parallel=3, context_parallel=4)
    assert config.replica_size == 24


def test_the_engine_is_found_by_its_name():
    assert load_engine_config_class("megatron") is MegatronConfig


def test_layouts_set_fields_that_exist_and_fill_their_ranks():
    known = {field.name for field in fields(MegatronConfig)}
    layouts = load_conformance_layouts("megatron")
    assert {"tp2", "pp2", "pp2-vpp2", "cp2", "dp2-distopt", "tp2-pp2"} <= {
        layout.name for layout in layouts
    }
    for layout in layouts:
        assert layout.fields.keys() <= known
        assert layout.world_size % MegatronConfig(model=MODEL, **layout.fields).replica_size == 0


@pytest.mark.parametrize(
    ("stages", "layers", "match"),
    [
        (1, (4,), "pipeline_parallel is 1: remove it"),
        (2, (4,), "must be 2 numbers of at least 1"),
        (2, (4, 0), "must be 2 numbers of at least 1"),
    ],
)
def test_layers_that_do_not_fit_the_stages_are_refused(stages, layers, match):
    with pytest.raises(ConfigError, match=match):
        MegatronConfig(model=MODEL, pipeline_parallel=stages, layers_per_stage=layers)


def test_model_directory_with_an_unreadable_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ConfigError,
        match=r"cannot read the config of the model in .*: Unrecognized model.* config.json",
    ):
        load_hf_config(ModelSpec(path=str(tmp_path)))


def test_model_directory_with_an_invalid_setting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": "320"}')
    with pytest.raises(
        ConfigError, match=r"/config.json has an invalid setting: .*'vocab_size' expected int"
    ):
        load_hf_config(ModelSpec(path=str(tmp_path)))
