"""Measure the FLOP/s of causal attention kernels on one long sequence with grouped heads."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from tools.gpu.fsdp_timing import measure_times
from tools.gpu.fsdp_workload import Scale

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps a query [T, H, D], key and value [T, K, D] to attention outputs [T, H, D]."""


def measure_kernel_rates(
    shape: Mapping[str, int], *, length: int, scale: Scale
) -> dict[str, object]:
    """Return TFLOP/s of each kernel, forward only and with backward, or why it failed."""
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim = shape["head_dim"]
    query, key, value = (
        torch.randn(length, n, head_dim, device=scale.device, dtype=torch.bfloat16)
        for n in (heads, kv_heads, kv_heads)
    )
    # Causal, forward and backward; the forward pass is a third of it.
    flops = 6.0 * length**2 * heads * head_dim
    rates: dict[str, object] = {}
    for name, kernel in _build_kernels(length, scale.device).items():
        try:
            forward_s, both_s = _measure_seconds(kernel, (query, key, value), scale)
        # A kernel that does not run here must not end the measurement of the others.
        except (RuntimeError, ImportError, TypeError, AssertionError) as error:
            rates[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        rates[name] = {
            "forward_tflops": round(flops / 3e12 / forward_s),
            "both_tflops": round(flops / 1e12 / both_s),
        }
    rates["sdpa_cudnn_new_length_ms"] = measure_new_length_ms(shape, length=length, scale=scale)
    return rates


def measure_new_length_ms(shape: Mapping[str, int], *, length: int, scale: Scale) -> list[float]:
    """Measure how many more ms cuDNN takes for a new length, forward and backward."""
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    extra_ms = []
    for new_length in range(length - 3, length):
        kernel = partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION)
        query, key, value = (
            torch.randn(
                new_length,
                n,
                shape["head_dim"],
                device=scale.device,
                dtype=torch.bfloat16,
                requires_grad=True,
            )
            for n in (heads, kv_heads, kv_heads)
        )
        inputs, upstream = (query, key, value), torch.randn_like(query)
        run_once = partial(_forward_and_backward, kernel, inputs, upstream)
        first_s = measure_times(scale, run_once, repeats=1)[0]
        extra_ms.append(round(1e3 * (first_s - measure_times(scale, run_once, repeats=3)[1]), 1))
    return extra_ms


def _forward_and_backward(kernel: Kernel, inputs: tuple[Tensor, ...], upstream: Tensor) -> None:
    query, key, value = inputs
    torch.autograd.grad(kernel(query, key, value), inputs, upstream)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *, backend: SDPBackend) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    with sdpa_kernel(backend):
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _measure_seconds(
    kernel: Kernel, inputs: tuple[Tensor, ...], scale: Scale
) -> tuple[float, float]:
    """Return the median seconds of the forward pass, and of both passes."""
    query, key, value = (x.detach().requires_grad_() for x in inputs)
    upstream = torch.randn_like(kernel(query, key, value))

    both = partial(_forward_and_backward, kernel, (query, key, value), upstream)
    both()
    forward_s = measure_times(scale, lambda: kernel(query, key, value), repeats=5)[2]
    return forward_s, measure_times(scale, both, repeats=5)[2]


def _build_kernels(length: int, device: str) -> dict[str, Kernel]:
    # Query and key share these sequence starts, because there is only one sequence.
    starts = torch.tensor([0, length], device=device, dtype=torch.int32)

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = varlen_attn(q, k, v, starts, starts, length, length, window_size=(-1, 0))
        assert isinstance(attended, Tensor)
        return attended

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(_is_causal, None, None, length, length, device=device)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        attended = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(attended, Tensor)
        return attended[0].transpose(0, 1)

    return {
        "varlen": varlen,
        "sdpa_flash": partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        "flex": flex,
    }


def _is_causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
