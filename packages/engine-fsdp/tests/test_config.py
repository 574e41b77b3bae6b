"""Test that invalid settings are rejected with a message, without importing torch."""

import re
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig, ModelSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig

MODEL = ModelSpec(architecture={"model_type": "qwen2"})
NEEDS_CHECKS = pytest.mark.skipif(
    not hasattr(EngineConfig, "__post_init__"), reason="needs an engine-api that checks words"
)


def test_importing_the_configuration_needs_no_torch() -> None:
    code = "import sys, temper_engine_fsdp.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fsdp_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="fsdp_size is 0"):
        FSDPConfig(model=MODEL, fsdp_size=0)


def test_an_empty_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match="head_chunk_tokens is 0"):
        FSDPConfig(model=MODEL, head_chunk_tokens=0)


def test_torch_varlen_on_the_cpu_names_both_keys() -> None:
    with pytest.raises(ConfigError, match="attention torch_varlen needs CUDA, but device is cpu"):
        FSDPConfig(model=MODEL, attention="torch_varlen", device="cpu")


def test_torch_varlen_in_float32_names_both_keys() -> None:
    with pytest.raises(ConfigError, match=r"precision\.compute is fp32"):
        FSDPConfig(model=MODEL, attention="torch_varlen", precision=PrecisionSpec(compute="fp32"))


def test_a_size_of_safetensors_files_that_are_not_written_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="huggingface_shard_bytes is 1000, but has no effect without save_huggingface_weights",
    ):
        FSDPConfig(model=MODEL, huggingface_shard_bytes=1000)
    FSDPConfig(model=MODEL, huggingface_shard_bytes=1000, save_huggingface_weights=True)


def test_cores_near_a_gpu_are_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="numa_affinity is on, but has no effect with device cpu"):
        FSDPConfig(model=MODEL, numa_affinity=True, device="cpu")
    FSDPConfig(model=MODEL, numa_affinity=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        pytest.param(
            {"strategy": "fsdp"},
            "strategy is 'fsdp', but must be 'fsdp2' or 'fsdp1'",
            marks=NEEDS_CHECKS,
        ),
        pytest.param(
            {"attention": "flash"},
            "attention is 'flash', but must be 'auto', 'sdpa_varlen' or",
            marks=NEEDS_CHECKS,
        ),
        pytest.param(
            {"device": "gpu"},
            "device is 'gpu', but must be 'auto', 'cpu' or 'cuda'",
            marks=NEEDS_CHECKS,
        ),
        pytest.param(
            {"fsdp_size": 1.5},
            "fsdp_size is 1.5, but must be a whole number or null",
            marks=NEEDS_CHECKS,
        ),
        ({"sequence_parallel": 0}, "sequence_parallel is 0, but must be at least 1"),
        (
            {"head_keeps_logits": True, "head_chunk_tokens": 8},
            "head_chunk_tokens has no effect with head_keeps_logits",
        ),
        ({"liger_layers": True, "device": "cpu"}, "liger_layers needs CUDA, but device is cpu"),
        (
            {"liger_layers": True, "compile_layers": True},
            "liger_layers and compile_layers are both on",
        ),
        ({"forward_prefetch": -1}, "forward_prefetch is -1, but must be at least 0"),
        ({"wrap_together": 0}, "wrap_together is 0, but must be at least 1"),
        (
            {"strategy": "fsdp1", "wrap_together": 2},
            "wrap_together is 2, but strategy fsdp1 wraps modules one by one",
        ),
        (
            {"reshard_after_forward": 1},
            (
                "reshard_after_forward is 1, but must be true, false, or a number of ranks of "
                "at least 2"
            ),
        ),
        (
            {"checkpointing_keeps_products": True},
            (
                "checkpointing_keeps_products is on, but has no effect without "
                "activation_checkpointing"
            ),
        ),
        (
            {"offload_activations": True},
            "offload_activations is on, but has no effect without activation_checkpointing",
        ),
        (
            {
                "activation_checkpointing": True,
                "checkpointing_keeps_products": True,
                "compile_layers": True,
            },
            "checkpointing_keeps_products and compile_layers are both on",
        ),
        (
            {"huggingface_shard_bytes": 0, "save_huggingface_weights": True},
            "huggingface_shard_bytes is 0, but must be at least 1",
        ),
        ({"profile_from": 3}, "profile_from is 3, but has no effect without profile_to"),
        ({"profile_memory": True}, "profile_memory is True, but has no effect without profile_to"),
        (
            {"profile_to": "traces", "profile_updates": 0},
            "profile_updates is 0, but must be at least 1",
        ),
        (
            {"strategy": "fsdp1", "reshard_after_forward": False},
            "reshard_after_forward is False, but strategy fsdp1 always reshards",
        ),
        (
            {"strategy": "fsdp1", "forward_prefetch": 2},
            "forward_prefetch is 2, but strategy fsdp1 prefetches at most 1 layer",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_settings_that_exclude_each_other_are_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        FSDPConfig(model=MODEL, **settings)


def test_a_report_of_the_conformance_kit_names_this_distribution_however_it_was_installed() -> None:
    from temper_engine_api.conformance.results import collect_versions

    assert collect_versions("temper_engine_fsdp.engine")["temper-engine-fsdp"] == version(
        "temper-engine-fsdp"
    )
