"""The bridge is imported without what it asks for needlessly, and says what Megatron's parameters are made of."""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_megatron.bridge_compat import PIP_LINE, Recipe, Translation

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


def config(model_type="qwen2", **fields):
    return AutoConfig.for_model(model_type, **{**SIZES, **fields})


def test_nobody_is_made_to_believe_that_transformer_engine_is_there():
    absent = {name for name in ("transformer_engine", "triton") if importlib.util.find_spec(name) is None}
    Translation(config())
    from megatron.core.extensions.transformer_engine import HAVE_TE

    assert not {name for name in sys.modules if name.partition(".")[0] in absent}
    assert ("transformer_engine" in absent) != HAVE_TE


def forget_the_bridge(monkeypatch):
    for name in [name for name in sys.modules if name == "megatron.bridge" or name.startswith("megatron.bridge.")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_missing_bridge_is_one_sentence_with_the_command(monkeypatch):
    forget_the_bridge(monkeypatch)
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(ConfigError, match="needs Megatron-Bridge, which is not installed") as caught:
        Translation(config())
    assert PIP_LINE in str(caught.value)


class Broken:
    """A finder under whose eyes one package can't be imported."""

    def __init__(self, name, error):
        self.name, self.error = name, error

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise self.error


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'omegaconf'", name="omegaconf"), RuntimeError("the package is empty")], ids=repr
)
def test_a_bridge_that_can_not_be_imported_is_not_called_missing(monkeypatch, error):
    forget_the_bridge(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [Broken("megatron.bridge.models", error), *sys.meta_path])
    with pytest.raises(ConfigError, match="is installed, but importing it failed with") as caught:
        Translation(config())
    assert str(error) in str(caught.value)
    assert "not installed" not in str(caught.value)


@pytest.mark.parametrize(("name", "version"), [("megatron-core", "0.19.2"), ("megatron-bridge", "0.6.0")])
def test_other_lines_are_refused_with_the_tested_version(monkeypatch, name, version):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda asked: version if asked == name else real(asked))
    with pytest.raises(ConfigError, match=rf"{name} is {version}.* is tested\): pip install"):
        Translation(config())


def source(module):
    """The tree of a module, which is not imported."""
    root, _, path = module.partition(".")
    (file,) = (found for folder in sys.modules[root].__path__ if (found := Path(folder, f"{path.replace('.', '/')}.py")).exists())
    return ast.parse(file.read_text())


@pytest.mark.parametrize(
    ("name", "importer"),
    [
        ("transformer_engine", "megatron.bridge.peft.lora_layers"),
        ("triton", "megatron.core.inference.contexts.attention_context.triton.tensor_ops"),
    ],
)
def test_what_a_stand_in_is_given_for_is_still_imported_without_asking(name, importer):
    # One that fails says that upstream asks now: take the stand-in away.
    Translation(config())
    imports = [node for node in source(importer).body if isinstance(node, ast.Import)]
    assert name in {alias.name.partition(".")[0] for node in imports for alias in node.names}


def test_the_router_still_lacks_the_name_that_it_is_given():
    Translation(config())
    names = (node for node in ast.walk(source("megatron.core.transformer.moe.moe_utils")) if isinstance(node, ast.Name))
    assert "te_general_gemm" not in {name.id for name in names if isinstance(name.ctx, ast.Store)}


def test_the_rotary_base_is_told_and_would_still_be_missed(monkeypatch):
    described = config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert Translation(described).settings.rotary_base == 5e5
    # As the bridge finds it without help: nothing where transformers 4 had it.
    monkeypatch.setattr("temper_engine_megatron.bridge_compat._as_causal_lm", lambda hf_config: hf_config)
    described.architectures = ["Qwen2ForCausalLM"]
    assert Translation(described).settings.rotary_base == 10000


def test_all_that_the_engine_sets_are_fields_that_megatron_has(start):
    settings = start()._parts.runner._chunks.settings
    untouched = Translation(config()).settings
    untouched.finalize()
    assert vars(settings).keys() - vars(untouched).keys() - {field.name for field in dataclasses.fields(settings)} == set()


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_every_parameter_of_a_plain_layer_is_known(model_type):
    translation = Translation(config(model_type))
    layer = "decoder.layers.1."
    assert translation.recipe_of(layer + "input_layernorm.weight").names == ("model.layers.1.input_layernorm.weight",)
    assert translation.recipe_of(layer + "pre_mlp_layernorm.weight").names == ("model.layers.1.post_attention_layernorm.weight",)
    assert translation.recipe_of(layer + "self_attention.linear_qkv.weight").kind == "qkv"
    assert translation.recipe_of(layer + "mlp.linear_fc1.weight") == Recipe(
        kind="gated", names=("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight")
    )
    with pytest.raises(CapabilityError, match="what nonesuch is made of"):
        translation.recipe_of("nonesuch")


def test_joined_heads_split_again():
    translation = Translation(config())
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(rows, 32, generator=draw) for rows in (32, 16, 16)]
    again = translation.split_heads(translation.join_heads(parts))
    assert all(torch.equal(part, back) for part, back in zip(parts, again, strict=True))
    # Four queries over two keys: each key and value follows its two queries, 8 rows a head.
    assert torch.equal(translation.join_heads(parts)[16:24], parts[1][:8])


def test_an_architecture_without_a_translation_is_refused_by_name():
    with pytest.raises(CapabilityError, match="GPT2LMHeadModel"):
        Translation(AutoConfig.for_model("gpt2"))
