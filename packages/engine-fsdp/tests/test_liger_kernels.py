"""Test Liger's kernels without a GPU: when they are rejected, and replaced layers.

test_gpu.py tests the kernels themselves.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.huggingface_model import build_model
from temper_engine_fsdp.model.liger_kernels import PLAIN, Kernels, check_kernels, replace_layers

CPU = torch.device("cpu")
SIZES = {"norm": 32, "gate": 48}


def test_liger_on_a_cpu_is_rejected(config: FSDPConfig) -> None:
    with pytest.raises(
        ConfigError, match="liger_layers needs CUDA, but device is cpu: set it to false"
    ):
        replace(config, liger_layers=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA would run it")
def test_liger_without_a_gpu_is_rejected(start: Callable[..., object]) -> None:
    with pytest.raises(
        ConfigError, match="Liger's kernels need CUDA and this engine runs on the CPU"
    ):
        start(liger_layers=True, device="auto")


def test_liger_and_compiled_layers_are_rejected_together(config: FSDPConfig) -> None:
    with pytest.raises(ConfigError, match="compile_layers already fuses these layers"):
        replace(config, device="auto", liger_layers=True, compile_layers=True)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_the_plain_formulas_are_as_exact_as_themselves(compute: torch.dtype) -> None:
    check_kernels(PLAIN, name="plain", device=CPU, compute=compute, sizes=SIZES)


def shifted_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize like Gemma, which multiplies by 1 + weight."""
    return PLAIN.norm(x, weight + 1, eps)


def gate_of_other_order(gate: Tensor, up: Tensor) -> Tensor:
    return PLAIN.gate(up, gate)


def detached_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return correct values with a wrong gradient."""
    return PLAIN.gate(gate, up) + 0 * gate + (up - up.detach())


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (Kernels(norm=shifted_norm, gate=PLAIN.gate), "the norm of strange 1.0 has an error of"),
        (
            Kernels(norm=PLAIN.norm, gate=gate_of_other_order),
            r"the gated unit of strange 1.0 .*\(values\)",
        ),
        (
            Kernels(norm=PLAIN.norm, gate=detached_gate),
            r"the gated unit of strange 1.0 .*\(gradient of the second\)",
        ),
    ],
)
def test_kernels_that_compute_something_else_are_refused(kernels: Kernels, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_kernels(kernels, name="strange 1.0", device=CPU, compute=torch.float32, sizes=SIZES)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_every_known_layer_is_replaced_and_keeps_its_numbers(
    config: FSDPConfig, family: str
) -> None:
    called: list[str] = []

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        called.append("norm")
        return PLAIN.norm(x, weight, eps)

    def gate(first: Tensor, up: Tensor) -> Tensor:
        called.append("gate")
        return PLAIN.gate(first, up)

    spec = ModelSpec(architecture={**config.model.architecture, "model_type": family})
    tokens = torch.arange(12)[None]
    model = build_model(spec, attention="eager")
    before = model(tokens).logits
    replace_layers(model, Kernels(norm=norm, gate=gate))
    torch.testing.assert_close(model(tokens).logits, before)
    # Two layers: a gated unit and two norms each, qwen3 two more for queries and keys; and the last
    # norm.
    assert called.count("gate") == 2
    assert called.count("norm") == 2 * (4 if family == "qwen3" else 2) + 1


def test_a_model_without_supported_layers_is_rejected(config: FSDPConfig) -> None:
    model = build_model(
        ModelSpec(architecture={**config.model.architecture, "model_type": "gemma"}),
        attention="eager",
    )
    with pytest.raises(CapabilityError, match="has no supported layers"):
        replace_layers(model, PLAIN)
