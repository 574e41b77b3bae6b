"""Test that the config rejects parallel sizes that do not make a layout."""

from dataclasses import fields
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_engine_api.registry import load_conformance_layouts, load_engine_config_class
from temper_engine_api.specs import ModelSpec
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.huggingface.huggingface_model import load_hf_config

MODEL = ModelSpec(path="/a/model")


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
