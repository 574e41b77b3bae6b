"""Test buckets and padding maps of a micro-batch."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_fsdp.model.pack_layout import (
    CALL_COST,
    PackLayout,
    _make_buckets,
    pad_input,
    round_length,
    unpad_output,
)

CPU = torch.device("cpu")


def test_equal_lengths_are_one_bucket_without_padding() -> None:
    layout = PackLayout([5, 5, 5], device=CPU)
    assert [(b.num_sequences, b.length) for b in layout.buckets] == [(3, 5)]
    assert not layout.is_padded


def test_one_long_sequence_is_one_bucket() -> None:
    layout = PackLayout([4000], device=CPU)
    assert [(b.num_sequences, b.length) for b in layout.buckets] == [(1, 4000)]


def test_many_short_sequences_are_few_calls_with_little_padding() -> None:
    lengths = [10 + i % 21 for i in range(256)]
    layout = PackLayout(lengths, device=CPU)
    assert len(layout.buckets) <= 7
    assert sum(b.num_rows for b in layout.buckets) <= 1.2 * sum(lengths)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=8))
def test_no_other_buckets_are_cheaper(lengths: list[int]) -> None:
    def cost(buckets: list[tuple[int, int]]) -> int:
        return sum(CALL_COST["cpu"] + number * length**2 for number, length in buckets)

    ordered = sorted(lengths, reverse=True)
    cuts = [
        [0, *inner, len(ordered)]
        for r in range(len(ordered))
        for inner in combinations(range(1, len(ordered)), r)
    ]
    cheapest = min(
        cost([(end - first, ordered[first]) for first, end in pairwise(cut)]) for cut in cuts
    )
    assert (
        cost([(b.num_sequences, b.length) for b in PackLayout(lengths, device=CPU).buckets])
        == cheapest
    )


def test_a_call_costs_more_on_cuda() -> None:
    _, buckets = _make_buckets([60] * 30 + [200], call_cost=CALL_COST["cuda"])
    assert len(buckets) == 2
    _, buckets = _make_buckets([60] * 3 + [200], call_cost=CALL_COST["cuda"])
    assert len(buckets) == 1


def test_a_long_sequence_does_not_pad_the_short_ones() -> None:
    layout = PackLayout([60] * 30 + [2000], device=CPU)
    assert [(b.num_sequences, b.length) for b in layout.buckets] == [(1, 2000), (30, 60)]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_padding_then_unpadding_returns_every_token(lengths: list[int]) -> None:
    layout = PackLayout(lengths, device=CPU)
    tokens = torch.arange(float(sum(lengths))).reshape(-1, 1, 1)
    rows, _, _ = pad_input(tokens, tokens, tokens, layout)
    assert torch.equal(unpad_output(rows, layout), tokens)
    assert rows.shape[0] == sum(b.num_rows for b in layout.buckets)


def test_each_row_of_a_bucket_holds_one_sequence_in_order() -> None:
    # Lengths 2 and 3: the longest first, then the other with its last token repeated as padding.
    layout = PackLayout([2, 3], device=CPU)
    tokens = torch.tensor([10.0, 11.0, 20.0, 21.0, 22.0]).reshape(-1, 1, 1)
    rows, _, _ = pad_input(tokens, tokens, tokens, layout)
    assert rows.flatten().tolist() == [20.0, 21.0, 22.0, 10.0, 11.0, 11.0]


def test_sliding_window_mask_allows_the_last_positions() -> None:
    band = PackLayout([4], device=CPU).sliding_window_mask(4, window=2)
    assert band is not None
    assert band.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("window", [None, 4, 9])
def test_a_window_over_the_full_sequence_needs_no_mask(window: int | None) -> None:
    assert PackLayout([4], device=CPU).sliding_window_mask(4, window=window) is None


def test_matmul_precision_is_put_back_after_attention() -> None:
    before = torch.get_float32_matmul_precision()
    layout = PackLayout([2, 3], device=CPU)
    tokens = torch.zeros(5, 1, 1, requires_grad=True)
    torch.set_float32_matmul_precision("medium")
    try:
        rows, _, _ = pad_input(tokens, tokens, tokens, layout)
        inside = torch.get_float32_matmul_precision()
        unpad_output(rows, layout).sum().backward()
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    assert (inside, after) == ("highest", "medium")


@pytest.mark.parametrize(
    ("length", "rounded"),
    [(1, 128), (128, 128), (129, 256), (2048, 2048), (2049, 2304), (8193, 9216), (16384, 16384)],
)
def test_lengths_round_up_to_eighths_of_a_power_of_two(length: int, rounded: int) -> None:
    assert round_length(length) == rounded


def test_few_bucket_lengths_recur_over_many_micro_batches() -> None:
    lengths = {round_length(length) for length in range(2048, 16385)}
    assert len(lengths) == 1 + 3 * 8


def test_buckets_of_rounded_lengths_give_every_token_back() -> None:
    lengths = [300, 5, 120, 129, 300]
    layout = PackLayout(lengths, device=CPU, rounds_lengths=True)
    assert all(bucket.length % 128 == 0 for bucket in layout.buckets)
    tokens = torch.arange(float(sum(lengths))).reshape(-1, 1, 1)
    rows, _, _ = pad_input(tokens, tokens, tokens, layout)
    assert torch.equal(unpad_output(rows, layout), tokens)
