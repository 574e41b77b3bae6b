"""Liger's kernels in the layers of a Hugging Face model: norms and gated units, each module for itself, nothing of transformers patched.

They are taken on CUDA alone, and only after they have computed there what the plain formulas do, in the compute dtype of the engine.
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

from temper_engine_api.errors import CapabilityError, ConfigError

NORMS = frozenset(
    {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm"}
)
"""x / rms(x) in float32, back in the dtype of x, times the weight."""
GATED = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP"})
"""down(silu(gate(x)) * up(x))."""
_MAX_ERROR_RATIO = 2.0
"""Root mean square error of a kernel over that of the plain formula in the same dtype: both round, in another order."""
_ROWS = 64
_EPS = 1e-6


class _Norm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...


class _Gate(Protocol):
    def __call__(self, gate: Tensor, up: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Two functions with gradient."""

    norm: _Norm
    gate: _Gate


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of NORMS."""
    wide = x.float() if x.dtype != torch.float64 else x
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Of GATED."""
    return functional.silu(gate) * up


PLAIN = Kernels(norm=plain_norm, gate=plain_gate)


def load_kernels(device: torch.device) -> Kernels:
    """Liger's.

    Raises:
        ConfigError: the engine does not run on CUDA, or Liger is not installed.
    """
    if device.type != "cuda":
        raise ConfigError(
            "liger_layers is on, but Liger's kernels run on CUDA and this engine on the CPU: "
            "switch it off."
        )
    try:
        norms, gates = (
            import_module("liger_kernel.ops.rms_norm"),
            import_module("liger_kernel.ops.swiglu"),
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"liger_layers is on, but {error.name} is not installed: pip install "
            "'temper-engine-fsdp[liger]', or switch it off."
        ) from error
    apply_norm: Callable[..., Tensor] = norms.LigerRMSNormFunction.apply
    # Not in place: the gradient that arrives may be another's too.
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
    """Compare values and gradients with the plain formulas in float64, and both errors with each other.

    Args:
        kernels: to be tried.
        name: for the sentence.
        device: where.
        compute: dtype of what they get.
        sizes: "norm" and "gate", entries of a row of each.

    Raises:
        ConfigError: they are further from float64 than the plain formulas in the compute dtype.
    """
    generator = torch.Generator().manual_seed(0)
    x, entropy_coeff = (torch.randn(_ROWS, sizes["norm"], generator=generator) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(sizes["norm"], generator=generator)
    gate, up, gate_slope = (
        torch.randn(_ROWS, sizes["gate"], generator=generator) for _ in range(3)
    )
    trials: Mapping[
        str, tuple[Callable[[Kernels], Callable[..., Tensor]], list[Tensor], Tensor]
    ] = {
        "norm": (lambda k: lambda a, b: k.norm(a, b, _EPS), [x, weight], entropy_coeff),
        "gated unit": (lambda k: k.gate, [gate, up], gate_slope),
    }
    for kind, (choose, inputs, upstream) in trials.items():
        start = [tensor.to(device, compute) for tensor in (*inputs, upstream)]
        exact = _with_gradients(choose(PLAIN), [tensor.double() for tensor in start])
        plain, tried = (_with_gradients(choose(k), start) for k in (PLAIN, kernels))
        for part, a, b, c in zip(
            ("values", "gradient of the first input", "gradient of the second"),
            exact,
            plain,
            tried,
            strict=True,
        ):
            allowed = _MAX_ERROR_RATIO * _rms_error(a, b) + torch.finfo(compute).eps * float(
                a.abs().mean()
            )
            if not (error_found := _rms_error(a, c)) <= allowed:
                raise ConfigError(
                    f"liger_layers is on, but the {kind} of {name} has an error of "
                    f"{error_found:.1e} in {compute} on this device, where the "
                    f"plain formula has {_rms_error(a, b):.1e} ({part}): switch it off, or try "
                    "another version."
                )


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors[:-1]]
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs, tensors[-1])]


def _rms_error(exact: Tensor, error_found: Tensor) -> float:
    return float((error_found.detach().double() - exact).square().mean().sqrt())


def apply_liger_kernels(hf: PreTrainedModel, *, device: torch.device, compute: torch.dtype) -> None:
    """Let the norms and gated units of a model compute with Liger's kernels, once these are found equal.

    Raises:
        ConfigError: not on CUDA, not installed, or not equal.
        CapabilityError: the model has no layer that they know.
    """
    kernels = load_kernels(device)
    sizes = {"norm": hf.config.hidden_size, "gate": hf.config.intermediate_size}
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
    """Give each module that is known a forward of its own.

    Raises:
        CapabilityError: there is none, or a gated unit has another activation than silu.
    """
    norms = [module for module in hf.modules() if type(module).__name__ in NORMS]
    gated = [module for module in hf.modules() if type(module).__name__ in GATED]
    if not norms or not gated:
        raise CapabilityError(
            f"liger_layers is on, but {type(hf).__name__} has none of the layers that are known "
            f"({', '.join(sorted(NORMS | GATED))}): "
            "switch it off."
        )
    if hf.config.hidden_act not in ("silu", "swish"):
        raise CapabilityError(
            f"liger_layers is on, but {type(hf).__name__} gates with {hf.config.hidden_act}, not "
            "silu: switch it off."
        )
    for module in norms:
        module.forward = partial(_norm_forward, module, kernels.norm)
    for module in gated:
        module.forward = partial(_gated_forward, module, kernels.gate)


def _norm_forward(module: nn.Module, norm: _Norm, hidden_states: Tensor) -> Tensor:
    return norm(hidden_states, cast(Tensor, module.weight), cast(float, module.variance_epsilon))


def _gated_forward(module: nn.Module, gate: _Gate, x: Tensor) -> Tensor:
    # Looked up at each call: an adapter puts others in their places.
    first, second, down = (
        module.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj")
    )
    result: Tensor = down(gate(first(x), second(x)))
    return result
