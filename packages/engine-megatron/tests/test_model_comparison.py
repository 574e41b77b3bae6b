"""Test that models of other families are accepted only if tiny ones compute as in transformers."""

import subprocess

import pytest
from transformers import AutoConfig

from temper_engine_api.errors import CapabilityError
from temper_engine_megatron.huggingface import model_comparison
from temper_engine_megatron.huggingface.model_comparison import check_computes_alike, shrink_config

GEMMA = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}


def test_tiny_model_has_the_kinds_of_layers_of_the_model():
    config = AutoConfig.for_model(
        "gemma3_text", num_attention_heads=8, num_key_value_heads=4, sliding_window=512
    )
    tiny = shrink_config(config)
    assert tiny["layer_types"] == config.layer_types[:4]
    assert (tiny["num_attention_heads"], tiny["num_key_value_heads"]) == (4, 2)
    assert (tiny["hidden_size"], tiny["sliding_window"]) == (32, 6)
    assert tiny["rope_parameters"] == config.rope_parameters


def test_model_that_computes_otherwise_is_refused_with_the_difference(monkeypatch):
    # The bridge translates Gemma, but its own class scales the embedding.
    refused = r"computes a tiny model of it otherwise than transformers: the gradient of .* off by"
    with pytest.raises(CapabilityError, match=refused):
        check_computes_alike(AutoConfig.for_model("gemma", **GEMMA))

    def fail(*_, **__):
        raise AssertionError("models that differ in sizes only are not measured again")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(CapabilityError, match=refused):
        check_computes_alike(AutoConfig.for_model("gemma", **{**GEMMA, "num_hidden_layers": 18}))


@pytest.mark.nightly
def test_model_that_computes_alike_is_accepted(monkeypatch):
    monkeypatch.setattr(model_comparison, "TESTED_MODEL_TYPES", ())
    check_computes_alike(AutoConfig.for_model("qwen3", num_hidden_layers=28))


@pytest.mark.nightly
def test_model_that_the_engine_cannot_build_is_refused_with_the_error():
    # OLMoE normalizes all heads together.
    with pytest.raises(CapabilityError, match="cannot compute a tiny model of it"):
        check_computes_alike(AutoConfig.for_model("olmoe"))
