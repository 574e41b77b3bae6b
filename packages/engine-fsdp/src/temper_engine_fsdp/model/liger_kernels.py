"""Use Liger's kernels for the norms and gated MLPs of a Hugging Face model.

Only the modules of this model are changed; transformers is not patched. The kernels run on CUDA
only, after a test shows that they are as accurate as the plain formulas in the compute dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from temper_engine_api.errors import CapabilityError, ConfigError, format_install

NORMS = frozenset(
    {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm"}
)
"""Classes that compute x / rms(x) in float32, cast to the dtype of x, times the weight."""
GATED = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP"})
"""Classes that compute down(silu(gate(x)) * up(x))."""
_MAX_ERROR_RATIO = 2.0
"""Largest accepted RMS error relative to the plain formula in the same dtype; rounding order
differs."""
_ROWS = 64
_EPS = 1e-6


class _Norm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...


class _Gate(Protocol):
    def __call__(self, gate: Tensor, up: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """A norm and a gated activation, both differentiable."""

    norm: _Norm
    gate: _Gate


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm as the classes in NORMS do."""
    wide = x.float() if x.dtype != torch.float64 else x
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Compute the gated activation as the classes in GATED do."""
    return functional.silu(gate) * up


PLAIN = Kernels(norm=plain_norm, gate=plain_gate)


def load_kernels(device: torch.device) -> Kernels:
    """Import Liger's kernels.

    Raises:
        ConfigError: If the device is not CUDA, or liger-kernel is not installed.
    """
    if device.type != "cuda":
        raise ConfigError(
            "liger_layers is on, but Liger's kernels need CUDA and this engine runs on the CPU: "
            "set it to false."
        )
    try:
        norms, gates = (
            import_module("liger_kernel.ops.rms_norm"),
            import_module("liger_kernel.ops.swiglu"),
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"liger_layers is on, but {error.name} is not installed: run "
            f"{format_install('temper-engine-fsdp[liger]')}, or set it to false."
        ) from error
    apply_norm: Callable[..., Tensor] = norms.LigerRMSNormFunction.apply
    # The last argument turns off the in-place gradient: autograd may pass the same tensor to other
    # consumers.
    return Kernels(
        norm=lambda x, weight, eps: apply_norm(x, weight, eps, 0.0, "llama", False),
        gate=gates.LigerSiLUMulFunction.apply,
    )


def check_kernels(
    kernels: Kernels,
    *,
    name: str,
    device: torch.device,
    compute: torch.dtype,
    sizes: Mapping[str, int],
) -> None:
    """Check that kernels are about as close to float64 as the plain formulas.

    Args:
        kernels: Kernels under test.
        name: Name used in the error message.
        device: Device of the test.
        compute: Dtype of the inputs.
        sizes: Row lengths for "norm" and "gate".

    Raises:
        ConfigError: If a kernel's error exceeds the limit, a multiple of the plain formula's error.
    """
    generator = torch.Generator().manual_seed(0)
    x, norm_grad = (torch.randn(_ROWS, sizes["norm"], generator=generator) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(sizes["norm"], generator=generator)
    gate, up, gate_grad = (torch.randn(_ROWS, sizes["gate"], generator=generator) for _ in range(3))
    cases: Mapping[str, tuple[Callable[[Kernels], Callable[..., Tensor]], list[Tensor], Tensor]] = {
        "norm": (lambda k: lambda a, b: k.norm(a, b, _EPS), [x, weight], norm_grad),
        "gated unit": (lambda k: k.gate, [gate, up], gate_grad),
    }
    for kind, (choose, inputs, grad) in cases.items():
        # Round the inputs first: only the arithmetic is compared, not how inputs are rounded.
        rounded = [tensor.to(device, compute) for tensor in (*inputs, grad)]
        exact = _with_gradients(choose(PLAIN), [tensor.double() for tensor in rounded])
        plain, tested = (_with_gradients(choose(k), rounded) for k in (PLAIN, kernels))
        for part, expected, by_formula, by_kernel in zip(
            ("values", "gradient of the first input", "gradient of the second"),
            exact,
            plain,
            tested,
            strict=True,
        ):
            formula_error = _rms_error(expected, by_formula)
            kernel_error = _rms_error(expected, by_kernel)
            # The second term allows one rounding where the plain formula happens to be exact.
            allowed = _MAX_ERROR_RATIO * formula_error + torch.finfo(compute).eps * float(
                expected.abs().mean()
            )
            # `not <=` instead of `>`, so that a kernel that returns NaN fails too.
            if not kernel_error <= allowed:
                raise ConfigError(
                    f"liger_layers is on, but the {kind} of {name} has an error of "
                    f"{kernel_error:.1e} in {compute} on this device, while the plain formula has "
                    f"{formula_error:.1e} ({part}): set it to false, or install another version."
                )


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return a function's value and gradients; the last tensor is the output gradient."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors[:-1]]
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs, tensors[-1])]


def _rms_error(exact: Tensor, computed: Tensor) -> float:
    return float((computed.detach().double() - exact).square().mean().sqrt())


def apply_liger_kernels(hf: PreTrainedModel, *, device: torch.device, compute: torch.dtype) -> None:
    """Test Liger's kernels and use them in the norms and gated MLPs of a model.

    Raises:
        ConfigError: If they are not available or not accurate on this device.
        CapabilityError: If the model has no supported layer.
    """
    kernels = load_kernels(device)
    text = hf.config.get_text_config(decoder=True)
    sizes = {"norm": text.hidden_size, "gate": text.intermediate_size}
    with torch.enable_grad():
        check_kernels(
            kernels,
            name=f"liger-kernel {version('liger-kernel')}",
            device=device,
            compute=compute,
            sizes=sizes,
        )
    replace_layers(hf, kernels)


def replace_layers(hf: PreTrainedModel, kernels: Kernels) -> None:
    """Replace the forward method of each supported module.

    Raises:
        CapabilityError: If there is no supported module, or the activation is not silu.
    """
    norms = [module for module in hf.modules() if type(module).__name__ in NORMS]
    gated = [module for module in hf.modules() if type(module).__name__ in GATED]
    if not norms or not gated:
        raise CapabilityError(
            f"liger_layers is on, but {type(hf).__name__} has no supported layers "
            f"({', '.join(sorted(NORMS | GATED))}): set it to false."
        )
    activation = hf.config.get_text_config(decoder=True).hidden_act
    if activation not in ("silu", "swish"):
        raise CapabilityError(
            f"liger_layers is on, but {type(hf).__name__} uses the activation "
            f"{activation}, not silu: set it to false."
        )
    for module in norms:
        module.forward = partial(_norm_forward, module, kernels.norm)
    for module in gated:
        module.forward = partial(_gated_forward, module, kernels.gate)


def _norm_forward(module: nn.Module, norm: _Norm, hidden_states: Tensor) -> Tensor:
    return norm(hidden_states, cast(Tensor, module.weight), cast(float, module.variance_epsilon))


def _gated_forward(module: nn.Module, gate: _Gate, x: Tensor) -> Tensor:
    # Looked up at each call, because attaching an adapter replaces the submodules.
    first, second, down = (
        module.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj")
    )
    result: Tensor = down(gate(first(x), second(x)))
    return result
