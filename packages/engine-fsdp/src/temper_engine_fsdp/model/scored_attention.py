"""Causal attention whose scores SDPA has no argument for: sinks and soft-capping.

Both work on padded rows of equally long sequences, like one SDPA call.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad
from torch.utils.checkpoint import checkpoint

QUERY_BLOCK_SCORES = 1 << 26
"""Number of scores per query block with soft-capping; bounds the memory."""


def add_sinks(
    query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a token in front of each sequence whose score is the head's sink.

    A sink takes part in the softmax of its head and adds nothing to the output
    (https://arxiv.org/abs/2309.17453, and gpt-oss with a trained logit per head). As a separate
    token it needs no kernel: the value is zero, and one more dimension of the heads holds the
    score, with 1 in all queries and the sink in the key. Causal attention lets every token see it.

    Args:
        query: [N, H, L, D].
        key: [N, K, L, D].
        value: [N, K, L, D'].
        sinks: [H] logits.
        scaling: Factor of the attention scores, which must leave the sink unchanged.

    Returns:
        Query, key and value with L + 1 tokens and H heads each, since each head has its own sink.
    """
    num_heads, (num_sequences, num_kv_heads, length, head_dim) = query.shape[1], key.shape
    key, value = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (key, value))
    sink_key = torch.cat(
        [sinks.new_zeros(num_heads, head_dim), sinks[:, None] / scaling], dim=1
    ).to(key.dtype)
    sink_key = sink_key[None, :, None].expand(num_sequences, -1, -1, -1)
    ones = query.new_ones(num_sequences, num_heads, length, 1)
    # The query in front is dropped again by the caller, so its values do not matter.
    query = pad(torch.cat([query, ones], dim=-1), (0, 0, 1, 0))
    key = torch.cat([sink_key, pad(key, (0, 1))], dim=2)
    return query, key, pad(value, (0, 0, 1, 0))


def add_sink_to_mask(mask: Tensor) -> Tensor:
    """Return the mask [L + 1, L + 1] for `add_sinks`: every token attends to the sink."""
    return pad(mask, (1, 0, 1, 0), value=True)


def attend_with_softcap(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor,
    scaling: float,
    softcap: float,
    dropout_p: float,
) -> Tensor:
    """Compute attention with scores softcap * tanh(scores / softcap).

    Source: Gemma 2, arXiv:2408.00118, section 2. Only the scores for one block of queries are in
    memory at a time; the backward pass computes them again.

    Args:
        query: [N, H, L, D].
        key: [N, K, L, D].
        value: [N, K, L, D'].
        mask: [L, L] bool, True where attention is allowed.
        scaling: Factor of the attention scores.
        softcap: Limit of the scores.
        dropout_p: Dropout probability.

    Returns:
        [N, H, L, D'].
    """
    num_sequences, num_heads, length, _ = query.shape
    groups = num_heads // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    block = max(1, QUERY_BLOCK_SCORES // (num_sequences * num_heads * length))
    attend = partial(_attend_block, scaling=scaling, softcap=softcap, dropout_p=dropout_p)
    parts = []
    for first in range(0, length, block):
        # Later keys are masked for all queries of the block.
        end = min(first + block, length)
        arguments = (
            query[:, :, first:end],
            key[:, :, :end],
            value[:, :, :end],
            mask[first:end, :end],
        )
        parts.append(
            checkpoint(attend, *arguments, use_reentrant=False)
            if torch.is_grad_enabled() and block < length
            else attend(*arguments)
        )
    return torch.cat(parts, dim=2)


def _attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float,
    softcap: float,
    dropout_p: float,
) -> Tensor:
    scores = (query @ key.transpose(2, 3)) * (scaling / softcap)
    scores = (scores.tanh() * softcap).masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return dropout(weights, dropout_p) @ value
