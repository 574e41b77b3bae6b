"""Test balancing against bounds, and against an exhaustive search."""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.balance import assign_to_ranks, balance_bins, pack_bins

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def loads_of(costs: list[int], ranks: list[int], num_ranks: int) -> list[int]:
    return [
        sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == r)
        for r in range(num_ranks)
    ]


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=7), num_ranks=st.integers(1, 3))
def test_largest_load_is_close_to_the_best_of_all_assignments(
    costs: list[int], num_ranks: int
) -> None:
    best = min(
        max(loads_of(costs, list(choice), num_ranks))
        for choice in product(range(num_ranks), repeat=len(costs))
    )
    largest_load = max(
        loads_of(
            costs, assign_to_ranks(torch.tensor(costs), num_ranks=num_ranks).tolist(), num_ranks
        )
    )
    assert (
        largest_load <= 4 / 3 * best + 1
    )  # Graham's bound for longest-first without limits on the counts is 4/3 - 1/(3 ranks)


def test_swaps_even_out_loads_that_equal_counts_forced() -> None:
    # Equal counts would put one more item next to each 100; 100 | 100 | 34 33 33 is even.
    ranks = assign_to_ranks(torch.tensor([100, 100, 34, 33, 33]), num_ranks=3).tolist()
    assert sorted(loads_of([100, 100, 34, 33, 33], ranks, 3)) == [100, 100, 100]


def test_rank_with_the_longest_item_gets_no_other() -> None:
    ranks = assign_to_ranks(torch.tensor([90, 10, 10, 10, 10, 10, 10, 10]), num_ranks=2).tolist()
    assert sorted(loads_of([90, *[10] * 7], ranks, 2)) == [70, 90]


def test_single_rank_gets_all_items() -> None:
    assert assign_to_ranks(torch.tensor([3, 1, 2]), num_ranks=1).tolist() == [0, 0, 0]


@given(sizes=SIZES, capacity=st.integers(40, 90))
def test_bins_hold_every_item_once_and_at_most_their_capacity(
    sizes: list[int], capacity: int
) -> None:
    bins = pack_bins(sizes, capacity=capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in b) <= capacity for b in bins)


@given(sizes=SIZES, capacity=st.integers(40, 90))
def test_no_two_bins_fit_into_one(sizes: list[int], capacity: int) -> None:
    loads = sorted(sum(sizes[i] for i in b) for b in pack_bins(sizes, capacity=capacity))
    assert len(loads) < 2 or loads[0] + loads[1] > capacity


@given(sizes=SIZES, num_bins=st.integers(1, 12), capacity=st.integers(40, 200))
def test_balanced_bins_respect_the_capacity_or_are_none(
    sizes: list[int], num_bins: int, capacity: int
) -> None:
    bins = balance_bins(sizes, [size**2 for size in sizes], num_bins=num_bins, capacity=capacity)
    if bins is None:
        assert (
            sum(sizes) + max(sizes) * num_bins > capacity * num_bins
        )  # some bin was left with less room than the largest item
        return
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert len(bins) == num_bins
    assert all(sum(sizes[i] for i in b) <= capacity for b in bins)
