"""Causal attention inside each sequence of a pack, for a rank that has all keys and the queries of a contiguous slice of the pack.

No mask over the pack is ever made: on CUDA torch's variable-length kernel runs once per layer, elsewhere (and in float32, which that kernel
does not know) torch's attention runs once per sequence. S queries on this rank, C context-parallel ranks.
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
class AttentionLayout:
    """Who sees whom: a token sees those of its own sequence up to itself. It travels in the place of Megatron's packed parameters."""

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
    qkv_format: str = "sbhd"
    """What Megatron asks of such parameters: tokens lie along the first dimension, beside a batch of one."""


def attention_layout(starts: Sequence[int], *, mine: slice, device: torch.device) -> AttentionLayout:
    """The layout of one rank's slice.

    Args:
        starts: running sums of the lengths of the pack's sequences, padding included.
        mine: this rank's tokens, at least one.
        device: of the running sums.
    """
    found = [
        (min(end, mine.stop) - max(start, mine.start), min(end, mine.stop) - start)
        for start, end in pairwise(starts)
        if start < mine.stop and end > mine.start and end > start
    ]
    num_queries, num_keys = (tuple(column) for column in zip(*found, strict=True))
    return AttentionLayout(
        num_queries=num_queries,
        num_keys=num_keys,
        keys=slice(mine.stop - sum(num_keys), mine.stop),
        query_starts=_running_sums(num_queries, device),
        key_starts=_running_sums(num_keys, device),
    )


def _running_sums(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32, non_blocking=True)


def attend(query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, *, scale: float | None) -> Tensor:
    """Mixed values of this rank's tokens.

    Args:
        query: [S, H, D] of this rank's tokens.
        key: [S C, K, D] of the whole pack; H is a multiple of K.
        value: the same.
        layout: see AttentionLayout.
        scale: of the logits; None is 1 / sqrt(D).

    Returns:
        [S, H, D].
    """
    key, value = key[layout.keys], value[layout.keys]
    if query.is_cuda and query.dtype is not torch.float32:
        return _in_one_kernel(query, key, value, layout, scale=scale)
    return _one_by_one(query, key, value, layout, scale=scale)


def _in_one_kernel(query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, *, scale: float | None) -> Tensor:
    # Where a sequence has fewer queries than keys, the last of both meet.
    sizes = (layout.query_starts, layout.key_starts, max(layout.num_queries), max(layout.num_keys))
    q, k, v = (x.contiguous() for x in (query, key, value))
    if q.shape[1] != k.shape[1] and _NEEDS_FLAG:
        mixed = varlen_attn(q, k, v, *sizes, scale=scale, window_size=(-1, 0), enable_gqa=True)
    else:
        mixed = varlen_attn(q, k, v, *sizes, scale=scale, window_size=(-1, 0))
    assert isinstance(mixed, Tensor)
    return mixed


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, *, scale: float | None) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    mixed = []
    for parts in zip(query.split(layout.num_queries), *(x.split(layout.num_keys) for x in (key, value)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        is_cut = q.shape[2] != k.shape[2]
        mask = causal_lower_right(q.shape[2], k.shape[2]) if is_cut else None
        rows = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not is_cut, scale=scale, enable_gqa=is_grouped)
        mixed.append(rows[0].transpose(0, 1))
    return torch.cat(mixed)
