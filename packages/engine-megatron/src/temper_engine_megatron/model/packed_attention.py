"""Causal attention within each sequence, for a rank with all keys and a slice of the queries.

Sequences are concatenated to a pack, or each is a row padded on the right. No mask over a full pack
is built: on CUDA torch's variable-length kernel handles a layer in one call. Elsewhere, and in
float32, which that kernel does not support, scaled dot-product attention runs once per sequence.

Shapes: S tokens on this rank in each of R rows (a pack is one row), C context-parallel ranks.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

# torch 2.11 detects grouped heads by shape; later versions require a flag that 2.11 does not have.
_NEEDS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTokens:
    """This rank's tokens of a micro-batch as routers see them: R rows with S positions."""

    sequence_index: Tensor
    """[R, S] int64 sequence index per token; B at padding."""
    weights: Tensor
    """[R, S] float32 weight per token in the router losses; 0 at padding.

    The sequence's fraction of the mini-batch's trained tokens, divided by its token count."""
    lengths: Tensor
    """[B + 1] float32 token counts per sequence, on all ranks; 1 for the padding."""
    is_real: Tensor
    """[R, S] bool; False at dummies and padding."""
    choices: Tensor | None
    """[R, S, layers, K] int64 prescribed experts, -1 where the router chooses; None without any."""
    records_choices: bool
    """True if routers keep the experts that they choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLayout:
    """Sequence boundaries of a pack on one rank; passed as Megatron's `packed_seq_params`.

    A token attends to the tokens in its own sequence, up to itself.
    """

    num_queries: tuple[int, ...]
    """Tokens per sequence in this rank's slice, for the N sequences that have any there.

    Padding counts as a sequence."""
    num_keys: tuple[int, ...]
    """Tokens of these sequences up to the last query.

    More than `num_queries` only for the first sequence, which may start before the slice."""
    keys: slice
    """Positions of these keys in the pack; contiguous, up to the end of the slice."""
    query_starts: Tensor
    """[N + 1] int32 cumulative sums of `num_queries`, on the device."""
    key_starts: Tensor
    """[N + 1] int32 cumulative sums of `num_keys`, on the device."""
    router_tokens: RouterTokens
    """This rank's tokens for routers; no other argument reaches the decoder layers."""
    qkv_format: str = "sbhd"
    """Format that Megatron reads from such parameters: sequence first, with a batch of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Layout with one sequence per row: a token attends to its row up to itself."""

    num_keys: int
    """Tokens in a row up to the end of this rank's slice."""
    router_tokens: RouterTokens
    """Same as in `PackLayout`."""
    qkv_format: str = "sbhd"
    """Same as in `PackLayout`, for Megatron."""


def build_pack_layout(
    starts: Sequence[int], *, local: slice, router_tokens: RouterTokens, device: torch.device
) -> PackLayout:
    """Build the layout of one rank's slice.

    Args:
        starts: Cumulative lengths of the sequences in the pack, including padding.
        local: Tokens of this rank, at least one.
        router_tokens: See `PackLayout`.
        device: Device of the cumulative sums.
    """
    # The first sequence may begin before the slice: it has more keys here than queries.
    sizes = [
        (min(end, local.stop) - max(start, local.start), min(end, local.stop) - start)
        for start, end in pairwise(starts)
        if start < local.stop and end > local.start and end > start
    ]
    num_queries, num_keys = (tuple(column) for column in zip(*sizes, strict=True))
    return PackLayout(
        num_queries=num_queries,
        num_keys=num_keys,
        # Only the first sequence can begin before the slice, so all keys are one range that ends
        # with the slice.
        keys=slice(local.stop - sum(num_keys), local.stop),
        query_starts=_cumulative_sums(num_queries, device),
        key_starts=_cumulative_sums(num_keys, device),
        router_tokens=router_tokens,
    )


def _cumulative_sums(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32, non_blocking=True)


def compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackLayout | RowLayout,
    *,
    scale: float | None,
) -> Tensor:
    """Compute attention for this rank's tokens.

    Args:
        query: [S, R, H, D] of this rank's tokens.
        key: [S C, R, K, D] of all tokens; H is a multiple of K.
        value: [S C, R, K, V].
        layout: Sequence boundaries.
        scale: Factor of the attention logits; None means 1 / sqrt(D).

    Returns:
        [S, R, H, V].
    """
    if isinstance(layout, RowLayout):
        q, k, v = (
            x.permute(1, 2, 0, 3) for x in (query, key[: layout.num_keys], value[: layout.num_keys])
        )
        return _causal_attention(q, k, v, scale=scale).permute(2, 0, 1, 3)
    return _pack_attention(query[:, 0], key[:, 0], value[:, 0], layout, scale=scale)[:, None]


def _pack_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, *, scale: float | None
) -> Tensor:
    key, value = key[layout.keys], value[layout.keys]
    if query.is_cuda and query.dtype is not torch.float32:
        return _varlen_attention(query, key, value, layout, scale=scale)
    return _attention_by_sequence(query, key, value, layout, scale=scale)


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, *, scale: float | None
) -> Tensor:
    # The kernel aligns the last query with the last key, which is right for a sequence that starts
    # before this rank's slice.
    sizes = (layout.query_starts, layout.key_starts, max(layout.num_queries), max(layout.num_keys))
    # The kernel needs values as wide as keys.
    q, k, v = (x.contiguous() for x in (query, key, pad(value, (0, key.shape[2] - value.shape[2]))))
    if q.shape[1] != k.shape[1] and _NEEDS_GQA_FLAG:
        mixed = varlen_attn(q, k, v, *sizes, scale=scale, window_size=(-1, 0), enable_gqa=True)
    else:
        mixed = varlen_attn(q, k, v, *sizes, scale=scale, window_size=(-1, 0))
    assert isinstance(mixed, Tensor)
    return mixed[..., : value.shape[2]]


def _attention_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, *, scale: float | None
) -> Tensor:
    # Call the kernel once per sequence. A mask for the full pack would grow with the square of its
    # length.
    mixed = []
    for qkv in zip(
        query.split(layout.num_queries),
        *(x.split(layout.num_keys) for x in (key, value)),
        strict=True,
    ):
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        mixed.append(_causal_attention(q, k, v, scale=scale)[0].transpose(0, 1))
    return torch.cat(mixed)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """Compute attention for queries [B, H, Q, D], the last Q of the N keys [B, K, N, D]."""
    has_earlier_keys = query.shape[2] != key.shape[2]
    # `is_causal` would align the first query with the first key.
    mask = causal_lower_right(query.shape[2], key.shape[2]) if has_earlier_keys else None
    is_grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=not has_earlier_keys,
        scale=scale,
        enable_gqa=is_grouped,
    )
