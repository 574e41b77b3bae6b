"""The bridge is imported without what it asks for needlessly, and says what Megatron's parameters are made of."""

import importlib.metadata
import importlib.util
import sys

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
