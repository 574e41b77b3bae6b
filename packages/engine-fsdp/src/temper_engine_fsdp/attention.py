"""Attention over sequences laid end to end, registered with transformers so that every model of its interface gets it.

No mask over the pack is ever made: its layout is computed once per micro-batch and travels through the model's keyword arguments.
On a CPU, sequences of similar length are padded on the right to the longest of their bucket; under causal attention that is exact.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from temper_engine_api.errors import ConfigError
from temper_engine_fsdp.config import AttentionKernel

SDPA_VARLEN = "temper_sdpa_varlen"
TORCH_VARLEN = "temper_torch_varlen"

MIN_BUCKET_TOKENS = 1024
"""A bucket with fewer tokens takes sequences of any length, since a call costs more than the padding it avoids."""
SHORTEST_SHARE = 0.75
"""A sequence shorter than this share of a bucket's longest begins a new bucket."""


class Bucket:
    """Sequences that run as one attention call."""

    def __init__(self, *, num_sequences: int, length: int) -> None:
        self.num_sequences = num_sequences
        self.length = length

    @property
    def num_rows(self) -> int:
        """Rows with padding."""
        return self.num_sequences * self.length


class PackLayout:
    """Where the sequences of one micro-batch lie. A plain class: FSDP would take dataclasses apart on the way into a module."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device, kernel: str = SDPA_VARLEN) -> None:
        self.max_length = max(lengths)
        self.num_tokens = sum(lengths)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.buckets: list[Bucket] = []
        self.is_padded = False
        if kernel == TORCH_VARLEN:
            return
        order, self.buckets = _make_buckets(lengths)
        self.is_padded = len(self.buckets) > 1 or self.buckets[0].num_rows != self.num_tokens
        if self.is_padded:
            maps = _padding_maps(lengths, starts=starts, order=order, buckets=self.buckets)
            self.source, self.place = (index.to(device) for index in maps)

    def banded_mask(self, length: int, *, window: int, device: torch.device) -> Tensor | None:
        """[length, length] bool for causal attention over the last ``window`` positions; None where that is all of them."""
        if length <= window:
            return None
        distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
        return (distance >= 0) & (distance < window)


def _make_buckets(lengths: Sequence[int]) -> tuple[list[int], list[Bucket]]:
    if min(lengths) == max(lengths):
        return list(range(len(lengths))), [Bucket(num_sequences=len(lengths), length=lengths[0])]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    buckets = [Bucket(num_sequences=0, length=lengths[order[0]])]
    for i in order:
        last = buckets[-1]
        if lengths[i] < SHORTEST_SHARE * last.length and last.num_rows >= MIN_BUCKET_TOKENS:
            buckets.append(Bucket(num_sequences=1, length=lengths[i]))
        else:
            last.num_sequences += 1
    return order, buckets


def _padding_maps(
    lengths: Sequence[int], *, starts: Sequence[int], order: Sequence[int], buckets: Sequence[Bucket]
) -> tuple[Tensor, Tensor]:
    """Source token of each padded row [P], a sequence's last token standing for its padding, and the row of each token [T]."""
    ordered = torch.tensor(order)
    size = torch.tensor(lengths)[ordered]
    first = torch.tensor(starts[:-1])[ordered]
    padded = torch.tensor([bucket.length for bucket in buckets for _ in range(bucket.num_sequences)])
    row_start = padded.cumsum(0) - padded
    within = torch.arange(int(padded.sum())) - torch.repeat_interleave(row_start, padded)
    last = torch.repeat_interleave(size - 1, padded)
    source = torch.repeat_interleave(first, padded) + torch.minimum(within, last)
    is_real = within <= last
    place = torch.empty(sum(lengths), dtype=torch.int64)
    place[source[is_real]] = torch.nonzero(is_real)[:, 0]
    return source, place


class _Spread(torch.autograd.Function):
    """Tokens [T, ...] to padded rows [P, ...]. Causal attention gives padding no gradient, so each token's is that of its own row."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tokens: Tensor, layout: PackLayout) -> Tensor:
        ctx.layout = layout  # type: ignore[attr-defined]
        return tokens.index_select(0, layout.source)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.layout.place), None  # type: ignore[attr-defined]


class _Collect(torch.autograd.Function):
    """Padded rows [P, ...] back to tokens [T, ...]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, rows: Tensor, layout: PackLayout) -> Tensor:
        ctx.layout = layout  # type: ignore[attr-defined]
        return rows.index_select(0, layout.place)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        layout: PackLayout = ctx.layout  # type: ignore[attr-defined]
        rows = grad.new_zeros((layout.source.shape[0], *grad.shape[1:]))
        return rows.index_copy_(0, layout.place, grad), None


def _spread(tokens: Tensor, layout: PackLayout) -> Tensor:
    if not layout.is_padded:
        return tokens
    rows: Tensor = _Spread.apply(tokens, layout)  # type: ignore[no-untyped-call]
    return rows


def _collect(rows: Tensor, layout: PackLayout) -> Tensor:
    if not layout.is_padded:
        return rows
    tokens: Tensor = _Collect.apply(rows, layout)  # type: ignore[no-untyped-call]
    return tokens


def sdpa_varlen_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: PackLayout,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention signature of transformers: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""
    _refuse(attention_mask, softcap=softcap)
    # Packed rows first: [T, H, D].
    columns = [_spread(x[0].transpose(0, 1).to(value.dtype), packing) for x in (query, key, value)]
    sizes = [bucket.num_rows for bucket in packing.buckets]
    parts = []
    for bucket, *qkv in zip(packing.buckets, *(x.split(sizes) for x in columns), strict=True):
        q, k, v = (x.reshape(bucket.num_sequences, bucket.length, *x.shape[1:]).transpose(1, 2) for x in qkv)
        window = bucket.length if sliding_window is None else sliding_window
        band = packing.banded_mask(bucket.length, window=window, device=q.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, dropout_p=dropout, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(out.transpose(1, 2).reshape(bucket.num_rows, *columns[0].shape[1:]))
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return _collect(rows, packing)[None], None


def torch_varlen_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: PackLayout,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The same on torch's variable-length flash attention (CUDA, bf16)."""
    _refuse(attention_mask, softcap=softcap)
    if dropout:
        raise ConfigError(f"attention torch_varlen has no dropout, but the model asks for {dropout}: use sdpa_varlen.")
    # Rotary embeddings may leave query and key in float32; the kernel wants the compute dtype.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    starts, longest = packing.starts, packing.max_length
    kernel = _varlen_kernel(is_grouped=q.shape[1] != k.shape[1])
    attended: Tensor = kernel(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=window)
    return attended[None], None


@cache
def _varlen_kernel(*, is_grouped: bool) -> Callable[..., Any]:
    # torch 2.11 takes grouped heads without a flag; later versions ask for one.
    takes_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if is_grouped and takes_flag else varlen_attn


def _refuse(attention_mask: Tensor | None, *, softcap: float | None) -> None:
    assert attention_mask is None, "our mask function gives None"
    if softcap is not None:
        raise ConfigError(f"this model caps attention logits at {softcap}, which packed attention does not support yet.")


def _no_mask(*_: object, **__: object) -> None:
    return None


def choose_kernel(wanted: AttentionKernel, *, device: torch.device, compute: str) -> str:
    """The registered name of the kernel to use.

    Raises:
        ConfigError: the kernel wanted cannot run there.
    """
    if wanted == "torch_varlen" and device.type != "cuda":
        raise ConfigError("attention torch_varlen needs CUDA, but this engine runs on the CPU: use auto or sdpa_varlen.")
    if wanted == "torch_varlen" or (wanted == "auto" and device.type == "cuda" and compute == "bf16"):
        return TORCH_VARLEN
    return SDPA_VARLEN


def register() -> None:
    """Make both kernels known to transformers; calling it again changes nothing."""
    for name, forward in ((SDPA_VARLEN, sdpa_varlen_forward), (TORCH_VARLEN, torch_varlen_forward)):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, _no_mask)
