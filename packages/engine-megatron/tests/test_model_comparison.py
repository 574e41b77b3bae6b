"""Test that models of other families are accepted only if tiny ones compute as in transformers."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from temper_engine_api.errors import CapabilityError
from temper_engine_api.process_folders import remove_orphans
from temper_engine_megatron.comparison_process import compare_tensors
from temper_engine_megatron.huggingface import model_comparison
from temper_engine_megatron.huggingface.model_comparison import (
    check_computes_alike,
    list_untested_fields,
    shrink_config,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
GEMMA = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}


def check(config, collective_timeout_s=600.0):
    check_computes_alike(config, collective_timeout_s=collective_timeout_s)


def test_tiny_model_has_the_kinds_of_layers_of_the_model():
    config = AutoConfig.for_model(
        "gemma3_text", num_attention_heads=8, num_key_value_heads=4, sliding_window=512
    )
    tiny = shrink_config(config)
    # Every sixth layer has full attention.
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    assert (tiny["layer_types"], tiny["num_hidden_layers"]) == (kinds, 4)
    assert (tiny["num_attention_heads"], tiny["num_key_value_heads"]) == (4, 2)
    assert (tiny["hidden_size"], tiny["sliding_window"]) == (32, 6)
    assert tiny["rope_parameters"] == config.rope_parameters


def test_tiny_model_has_dense_layers_and_layers_with_experts():
    config = AutoConfig.for_model("deepseek_v2", num_hidden_layers=8, first_k_dense_replace=5)
    tiny = shrink_config(config)
    assert (tiny["num_hidden_layers"], tiny["first_k_dense_replace"]) == (4, 3)


def test_tiny_model_has_layers_with_windows_and_without():
    config = AutoConfig.for_model("qwen2", use_sliding_window=True, max_window_layers=28)
    tiny = shrink_config(config)
    assert set(tiny["layer_types"]) == set(config.layer_types)
    assert tiny["max_window_layers"] == tiny["layer_types"].index("sliding_attention")


@pytest.mark.parametrize(
    ("model_type", "fields", "untested"),
    [
        ("mistral", {"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ("gemma3_text", {"hidden_activation": "silu"}, ["hidden_activation='silu'"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias=True"]),
        ("llama", {"mlp_bias": True, "hidden_size": 64}, ["mlp_bias=True"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ("glm4_moe", {"partial_rotary_factor": 1.0}, ["partial_rotary_factor=1"]),
        ("glm4_moe", {"partial_rotary_factor": 0.5}, []),
        ("qwen2", {"use_sliding_window": True, "tie_word_embeddings": True}, []),
        ("llama", {"rope_parameters": YARN}, ["rope_type='yarn'"]),
        ("mixtral", {"rope_parameters": YARN, "head_dim": 128}, ["rope_type='yarn'"]),
        ("qwen2", {"rope_parameters": YARN}, []),
        ("gemma3_text", {"rope_parameters": {"full_attention": YARN}}, ["rope_type='yarn'"]),
        ("nemotron_h", {"moe_latent_size": 16, "mamba_num_heads": 64}, ["moe_latent_size=16"]),
    ],
)
def test_fields_that_change_the_computation_are_not_covered(model_type, fields, untested):
    assert list_untested_fields(AutoConfig.for_model(model_type, **fields)) == untested


def test_tiny_model_has_each_single_part_of_nemotron_layers():
    config = AutoConfig.for_model("nemotron_h", hybrid_override_pattern="MEMEM*EMEM-")
    kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    assert shrink_config(config)["layers_block_type"] == kinds


# Nightly: each comparison starts a process that builds the model in both libraries, also in the
# tests below. Every day, the kit compares the tested families with transformers.
@pytest.mark.nightly
def test_narrow_experts_of_nemotron_compute_as_in_transformers(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check(AutoConfig.for_model("nemotron_h", moe_latent_size=1024))
    (result,) = map(json.loads, (path.read_text() for path in tmp_path.rglob("*.json")))
    assert result["difference"] < 1e-5


# Nightly: starts a process for a comparison, as above.
@pytest.mark.nightly
def test_two_shared_experts_of_glm_compute_as_in_transformers():
    check(AutoConfig.for_model("glm4_moe", n_shared_experts=2))


# Nightly: starts a process for a comparison, as above.
@pytest.mark.nightly
@pytest.mark.parametrize("fields", [{}, {"sliding_window": None}, {"rope_parameters": YARN}])
def test_mistral_computes_as_in_transformers(fields):
    check(AutoConfig.for_model("mistral", **fields))


# Nightly: starts a process for a comparison, as above.
@pytest.mark.nightly
def test_mistral_with_another_activation_is_refused():
    # The bridge passes over the field.
    with pytest.raises(CapabilityError, match=r"MistralConfig\. It does not compute"):
        check(AutoConfig.for_model("mistral", hidden_act="gelu"))


def test_family_of_a_killed_comparison_is_compared_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Ends without a result, as a process without memory does.
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    refused = r"Qwen2Config with hidden_act='gelu'\. It cannot .* \(exit status 1: no output\)"
    with pytest.raises(CapabilityError, match=refused):
        check(AutoConfig.for_model("qwen2", hidden_act="gelu"))
    assert not list(tmp_path.rglob("*.json"))


# Nightly: starts a process that starts another one, which imports Megatron.
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel ends the process")
def test_killed_engine_leaves_no_comparison_and_no_folder(tmp_path):
    program = (
        "from temper_engine_megatron.huggingface.model_comparison import _measure\n"
        "_measure({}, timeout_s=600)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}) as engine:
        children = Path(f"/proc/{engine.pid}/task/{engine.pid}/children")
        while not (child := children.read_text().split()):
            assert engine.poll() is None
            time.sleep(0.01)
        engine.kill()
    deadline = time.monotonic() + 10
    while is_running(child[0]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(remove_orphans(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_slow_comparison_is_refused_before_other_hosts_time_out(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CapabilityError, match=r"took more than 0\.05 s"):
        check(AutoConfig.for_model("gemma", **GEMMA), collective_timeout_s=0.1)


def test_changed_sources_have_another_result(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "engine_copy" / "layer.py"
    source.parent.mkdir()
    (source.parent / "__init__.py").touch()
    monkeypatch.setattr(model_comparison, "_SOURCES", ("engine_copy",))
    files = set()
    for text in ("x = 1", "x = 2", "x = 1"):
        source.write_text(text)
        files.add(model_comparison._find_cache_file({"hidden_size": 8}))
    assert len(files) == 2


def test_gradient_that_is_not_finite_is_reported():
    finite = {name: torch.ones(2) for name in ("a", "b")}
    broken = {**finite, "b": torch.tensor([1.0, float("nan")])}
    assert compare_tensors(broken, finite).quantity == "b is not finite in the engine"
    assert compare_tensors(finite, broken).quantity == "b is not finite in transformers"
    assert compare_tensors(finite, finite).difference == 0.0


def test_model_that_computes_otherwise_is_refused_with_the_difference(monkeypatch):
    # The bridge translates Gemma, but its own class scales the embedding.
    refused = r"does not compute a tiny model of it as transformers does: the gradient of .* off by"
    with pytest.raises(CapabilityError, match=refused):
        check(AutoConfig.for_model("gemma", **GEMMA))

    def fail(*_, **__):
        raise AssertionError("models that differ in sizes only are not measured again")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(CapabilityError, match=refused):
        check(AutoConfig.for_model("gemma", **{**GEMMA, "num_hidden_layers": 18}))


# Nightly: starts a process for a comparison, as above.
@pytest.mark.nightly
def test_model_that_computes_alike_is_accepted(monkeypatch):
    monkeypatch.setattr(model_comparison, "TESTED_MODEL_TYPES", ())
    check(AutoConfig.for_model("qwen3", num_hidden_layers=28))


# Nightly: starts a process for a comparison, as above.
@pytest.mark.nightly
def test_model_that_the_engine_cannot_build_is_refused_with_the_error():
    # OLMoE normalizes all heads together.
    with pytest.raises(CapabilityError, match=r"cannot compute a tiny model of it \(\w+Error: "):
        check(AutoConfig.for_model("olmoe"))
