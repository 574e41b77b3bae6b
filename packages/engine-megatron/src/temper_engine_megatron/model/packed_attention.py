"""Causal attention inside each sequence, for a rank that has all keys and the queries of a contiguous slice of the tokens.

Sequences lie end to end in a pack, or each in a row of its own that is padded on the right. No mask over a pack is ever made: on CUDA
torch's variable-length kernel runs once per layer, elsewhere (and in float32, which that kernel does not know) torch's attention runs once
per sequence. S tokens on this rank in each of R rows (a pack is one row), C context-parallel ranks.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

_NEEDS_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 takes grouped heads without a flag; later versions ask for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLayout:
    """Who sees whom in a pack: a token sees those of its own sequence up to itself. It travels where Megatron has packed parameters."""

    num_queries: tuple[int, ...]
    """Tokens of each sequence that lie in this rank's slice, for the N sequences that have any there; padding is one of its own."""
    num_keys: tuple[int, ...]
    """Tokens of each of them up to the last query: all but the first sequence begin inside the slice."""
    keys: slice
    """Where those tokens lie in the pack: side by side, up to the end of the slice."""
    query_starts: Tensor
    """[N + 1] int32 running sums of num_queries, on the device."""
    key_starts: Tensor
    """[N + 1] int32 running sums of num_keys."""
    share: float
    """Of this micro-batch in the trained tokens of the mini-batch, for layers with experts, which are told nothing else."""
    qkv_format: str = "sbhd"
    """What Megatron asks of such parameters: tokens lie along the first dimension, beside a batch of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Who sees whom where each sequence has a row of its own: a token sees those of its row up to itself."""

    last: int
    """Tokens of a row up to the end of this rank's slice."""
    share: float
    """As that of PackLayout."""
    qkv_format: str = "sbhd"
    """As that of PackLayout."""


def build_pack_layout(
    starts: Sequence[int], *, mine: slice, share: float, device: torch.device
) -> PackLayout:
    """The layout of one rank's slice.

    Args:
        starts: running sums of the lengths of the pack's sequences, padding included.
        mine: this rank's tokens, at least one.
        share: see PackLayout.
        device: of the running sums.
    """
    found = [
        (min(end, mine.stop) - max(start, mine.start), min(end, mine.stop) - start)
        for start, end in pairwise(starts)
        if start < mine.stop and end > mine.start and end > start
    ]
    num_queries, num_keys = (tuple(column) for column in zip(*found, strict=True))
    return PackLayout(
        num_queries=num_queries,
        num_keys=num_keys,
        keys=slice(mine.stop - sum(num_keys), mine.stop),
        query_starts=_running_sums(num_queries, device),
        key_starts=_running_sums(num_keys, device),
        share=share,
    )


def _running_sums(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32, non_blocking=True)


def compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackLayout | RowLayout,
    *,
    scale: float | None,
) -> Tensor:
    """Mixed values of this rank's tokens.

    Args:
        query: [S, R, H, D] of this rank's tokens.
        key: [S C, R, K, D] of all tokens; H is a multiple of K.
        value: the same.
        layout: see PackLayout and RowLayout.
        scale: of the logits; None is 1 / sqrt(D).

    Returns:
        [S, R, H, D].
    """
    if isinstance(layout, RowLayout):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key[: layout.last], value[: layout.last]))
        return _causal(q, k, v, scale=scale).permute(2, 0, 1, 3)
    return _attend_in_pack(query[:, 0], key[:, 0], value[:, 0], layout, scale=scale)[:, None]


def _attend_in_pack(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, *, scale: float | None
) -> Tensor:
    key, value = key[layout.keys], value[layout.keys]
    if query.is_cuda and query.dtype is not torch.float32:
        return _in_one_kernel(query, key, value, layout, scale=scale)
    return _one_by_one(query, key, value, layout, scale=scale)


def _in_one_kernel(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, *, scale: float | None
) -> Tensor:
    # Where a sequence has fewer queries than keys, the last of both meet.
    sizes = (layout.query_starts, layout.key_starts, max(layout.num_queries), max(layout.num_keys))
    q, k, v = (x.contiguous() for x in (query, key, value))
    if q.shape[1] != k.shape[1] and _NEEDS_FLAG:
        mixed = varlen_attn(q, k, v, *sizes, scale=scale, window_size=(-1, 0), enable_gqa=True)
    else:
        mixed = varlen_attn(q, k, v, *sizes, scale=scale, window_size=(-1, 0))
    assert isinstance(mixed, Tensor)
    return mixed


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, *, scale: float | None
) -> Tensor:
    mixed = []
    for parts in zip(
        query.split(layout.num_queries),
        *(x.split(layout.num_keys) for x in (key, value)),
        strict=True,
    ):
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        mixed.append(_causal(q, k, v, scale=scale)[0].transpose(0, 1))
    return torch.cat(mixed)


def _causal(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """Attention of queries [B, H, Q, D] that are the last ones of the keys' [B, K, N, D] tokens."""
    is_cut = query.shape[2] != key.shape[2]
    mask = causal_lower_right(query.shape[2], key.shape[2]) if is_cut else None
    is_grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=not is_cut, scale=scale, enable_gqa=is_grouped
    )
