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
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Rule for the attention scores of a layer."""

    scale: float | None = None
    """Factor of the products of queries and keys; None means 1 / sqrt(D)."""
    window: int | None = None
    """Number of last keys that a query sees, its own among them; None is all."""
    sinks: Tensor | None = None
    """[H] scores that take part in the softmax of a head and add nothing to the output."""


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


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        slices = [torch.empty_like(local) for _ in range(group.size())]
        # gloo sends the memory of a tensor as it is, ignoring strides.
        dist.all_gather(slices, local.contiguous(), group=group)
        return torch.cat(slices)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        total = grad.contiguous().clone()
        # Queries of every rank used these keys and values.
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()], None


def gather_sequence(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [S, ...] of every rank to [S C, ...] in rank order; gradients are summed."""
    if group.size() == 1:
        return local
    gathered: Tensor = _GatherSequence.apply(local, group)  # type: ignore[no-untyped-call]
    return gathered


def compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackLayout | RowLayout,
    *,
    scores: Scores,
) -> Tensor:
    """Compute attention for this rank's tokens.

    Args:
        query: [S, R, H, D] of this rank's tokens.
        key: [S C, R, K, D] of all tokens; H is a multiple of K.
        value: [S C, R, K, V].
        layout: Sequence boundaries.
        scores: How scores are computed from queries and keys.

    Returns:
        [S, R, H, V].
    """
    if isinstance(layout, RowLayout):
        q, k, v = (
            x.permute(1, 2, 0, 3) for x in (query, key[: layout.num_keys], value[: layout.num_keys])
        )
        return _causal_attention(q, k, v, scores=scores).permute(2, 0, 1, 3)
    return _pack_attention(query[:, 0], key[:, 0], value[:, 0], layout, scores=scores)[:, None]


def _pack_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, *, scores: Scores
) -> Tensor:
    key, value = key[layout.keys], value[layout.keys]
    has_kernel = query.is_cuda and query.dtype is not torch.float32
    if has_kernel and scores.sinks is None:
        return _varlen_attention(query, key, value, layout, scores=scores)
    return _attention_by_sequence(query, key, value, layout, scores=scores)


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, *, scores: Scores
) -> Tensor:
    # The kernel aligns the last query with the last key, which is right for a sequence that starts
    # before this rank's slice.
    sizes = (layout.query_starts, layout.key_starts, max(layout.num_queries), max(layout.num_keys))
    # The kernel needs values as wide as keys.
    q, k, v = (x.contiguous() for x in (query, key, pad(value, (0, key.shape[2] - value.shape[2]))))
    # The window counts the tokens to the left, without the query's own.
    window = (-1 if scores.window is None else scores.window - 1, 0)
    if q.shape[1] != k.shape[1] and _NEEDS_GQA_FLAG:
        mixed = varlen_attn(
            q, k, v, *sizes, scale=scores.scale, window_size=window, enable_gqa=True
        )
    else:
        mixed = varlen_attn(q, k, v, *sizes, scale=scores.scale, window_size=window)
    assert isinstance(mixed, Tensor)
    return mixed[..., : value.shape[2]]


def _attention_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, *, scores: Scores
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
        mixed.append(_causal_attention(q, k, v, scores=scores)[0].transpose(0, 1))
    return torch.cat(mixed)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scores: Scores) -> Tensor:
    """Compute attention for queries [B, H, Q, D], the last Q of the N keys [B, K, N, D]."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if scores.sinks is not None or (scores.window is not None and scores.window < num_keys):
        return _masked_attention(query, key, value, scores=scores)
    has_earlier_keys = num_queries != num_keys
    # `is_causal` would align the first query with the first key.
    mask = causal_lower_right(num_queries, num_keys) if has_earlier_keys else None
    is_grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=not has_earlier_keys,
        scale=scores.scale,
        enable_gqa=is_grouped,
    )


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, *, scores: Scores) -> Tensor:
    """Compute attention with a window or sinks, for the arguments of `_causal_attention`."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    position = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
    distance = position - torch.arange(num_keys, device=query.device)
    mask = distance >= 0
    if scores.window is not None:
        mask &= distance < scores.window
    scale = query.shape[3] ** -0.5 if scores.scale is None else scores.scale
    if scores.sinks is not None:
        query, key, value = _add_sinks(query, key, value, sinks=scores.sinks / scale)
        mask = pad(mask, (1, 0), value=True)
    is_grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=is_grouped
    )


def _add_sinks(
    query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key before the others whose product with every query is the sink of the head [H].

    Its value is 0. One more dimension of the heads holds the sink in that key, and 1 in all
    queries. Each head has its own sink, so the keys of a group are repeated.
    """
    num_heads, num_groups = query.shape[1], key.shape[1]
    key, value = (x.repeat_interleave(num_heads // num_groups, dim=1) for x in (key, value))
    # Kernels need rows that start at multiples of 16 bytes.
    width = 8
    query = torch.cat([query, pad(query.new_ones(*query.shape[:3], 1), (0, width - 1))], dim=-1)
    sink_key = pad(sinks.to(key.dtype)[:, None], (key.shape[3], width - 1))
    sink_key = sink_key[None, :, None].expand(len(key), -1, -1, -1)
    key = torch.cat([sink_key, pad(key, (0, width))], dim=2)
    return query, key, pad(value, (0, 0, 1, 0))
