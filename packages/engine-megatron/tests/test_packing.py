"""Test a rank's slice of a micro-batch: its tokens, positions and attention."""

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_megatron.model.micro_batch_layout import (
    MicroBatchLayout,
    build_local_micro_batch,
)
from temper_engine_megatron.model.packed_attention import Scores, compute_attention


def build_slice(batch, *, is_packed=True, **sizes):
    layout = MicroBatchLayout(is_packed=is_packed, device=torch.device("cpu"), **sizes)
    return build_local_micro_batch(batch, layout, trained_tokens=4)


def micro():
    return from_sequences(
        [torch.arange(10, 13), torch.arange(20, 22)], loss_masks=[torch.zeros(3), torch.zeros(2)]
    )


def test_slices_are_contiguous_and_padded_at_the_end():
    # 5 tokens padded to 8, four for each of two ranks.
    first, second = (
        build_slice(micro(), cp_size=2, cp_rank=rank, token_multiple=4) for rank in (0, 1)
    )
    assert first.tokens.tolist() == [[10, 11, 12, 20]]
    assert second.tokens.tolist() == [[21, 0, 0, 0]]
    assert (first.positions.tolist(), second.positions.tolist()) == ([[0, 1, 2, 0]], [[1, 0, 0, 0]])
    assert first.local_index.tolist() == [0, 1, 2, 3, -1]
    assert second.local_index.tolist() == [-1, -1, -1, -1, 0]


def test_rows_are_padded_to_the_longest_and_sliced_at_the_same_positions():
    # 3 tokens and 2, padded to 4 positions each; each rank has two positions of both rows.
    first, second = (
        build_slice(micro(), is_packed=False, cp_size=2, cp_rank=rank, token_multiple=4)
        for rank in (0, 1)
    )
    assert (first.tokens.tolist(), second.tokens.tolist()) == (
        [[10, 11], [20, 21]],
        [[12, 0], [0, 0]],
    )
    assert second.positions.tolist() == [[2, 0], [0, 0]]
    assert (first.local_index.tolist(), second.local_index.tolist()) == (
        [0, 2, -1, 1, 3],
        [-1, -1, 0, -1, -1],
    )
    assert (first.attention.num_keys, second.attention.num_keys) == (2, 4)


def test_slice_has_the_keys_of_a_sequence_that_starts_before_it():
    # 3 tokens, 2, and 3 of padding as a sequence; the second slice starts inside the second one.
    first, second = (
        build_slice(micro(), cp_size=2, cp_rank=rank, token_multiple=4).attention for rank in (0, 1)
    )
    assert (first.num_queries, first.num_keys, first.keys) == ((3, 1), (3, 1), slice(0, 4))
    assert (second.num_queries, second.num_keys, second.keys) == ((1, 3), (2, 3), slice(3, 8))
    assert second.query_starts.tolist() == [0, 1, 4]
    assert second.key_starts.tolist() == [0, 2, 5]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "scores",
    [
        Scores(scale=0.3),
        Scores(scale=0.3, window=3),
        Scores(scale=0.3, window=3, sinks=torch.tensor([1.0, -1.0, 0.5, 2.0]).double()),
    ],
    ids=["full", "window", "sinks"],
)
def test_attention_stays_within_each_sequence(cp_size, is_packed, scores):
    # 5, 2 and 9 tokens, four query and two key heads; the slices cut the last sequence in three.
    draw = torch.Generator().manual_seed(0)
    sizes = (5, 2, 9)
    query = torch.randn(16, 4, 8, generator=draw, dtype=torch.float64)
    key, value = (torch.randn(16, 2, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    batch = from_sequences(
        [torch.zeros(n) for n in sizes], loss_masks=[torch.zeros(n) for n in sizes]
    )
    slices = [
        build_slice(
            batch, is_packed=is_packed, cp_size=cp_size, cp_rank=rank, token_multiple=cp_size
        )
        for rank in range(cp_size)
    ]
    keys, values = (torch.cat([to_local_grid(x, each) for each in slices]) for x in (key, value))
    mixed = torch.zeros_like(query)
    for each in slices:
        attended = compute_attention(
            to_local_grid(query, each), keys, values, each.attention, scores=scores
        ).flatten(0, 1)
        mixed[each.local_index >= 0] = attended[each.local_index[each.local_index >= 0]]
    expected = [
        causal_attention(q, k, v, scores)
        for q, k, v in zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
    ]
    torch.testing.assert_close(mixed, torch.cat(expected))


def to_local_grid(tokens, local):
    """Return [S, R, ...] of a rank, with 9 at padding so that attention to it is noticed."""
    grid = torch.full((local.tokens.numel(), *tokens.shape[1:]), 9.0, dtype=tokens.dtype)
    grid[local.local_index[local.local_index >= 0]] = tokens[local.local_index >= 0]
    return grid.view(local.tokens.shape[1], local.tokens.shape[0], *tokens.shape[1:])


def causal_attention(query, key, value, scores):
    """Compute causal attention of one sequence with an explicit softmax."""
    logits = scores.scale * torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, dim=1))
    visible = torch.ones(len(query), len(query), dtype=torch.bool).tril()
    if scores.window is not None:
        visible &= visible.triu(1 - scores.window)
    logits = logits.masked_fill(~visible, -torch.inf)
    if scores.sinks is not None:
        column = scores.sinks[:, None, None].expand(-1, len(query), 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(-1)[..., : len(query)]
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, dim=1))


def test_micro_batch_has_the_weights_of_its_tokens():
    batch = from_sequences([torch.zeros(5)], loss_masks=[torch.tensor([0, 0, 1, 1, 1])])
    second = build_slice(batch, cp_size=2, cp_rank=1, token_multiple=4)
    # Three of the mini-batch's four trained tokens, over five tokens. The slice has tokens 4 to 7;
    # only 4 is real.
    tokens = second.attention.router_tokens
    torch.testing.assert_close(tokens.weights, torch.tensor([[0.15, 0, 0, 0]]))
    assert tokens.sequence_index.tolist() == [[0, 1, 1, 1]]
    assert tokens.is_real.tolist() == [[True, False, False, False]]
    assert tokens.lengths.tolist() == [5, 1]


def test_position_ids_of_the_batch_are_kept():
    given = from_sequences([torch.arange(3)], loss_masks=[torch.zeros(3)])
    given = type(given)(
        **{
            **{f: getattr(given, f) for f in given.__slots__},
            "position_ids": torch.tensor([5, 7, 9]),
        }
    )
    assert build_slice(given, cp_size=1, cp_rank=0, token_multiple=2).positions.tolist() == [
        [5, 7, 9, 0]
    ]
