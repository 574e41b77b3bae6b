"""Test that plans lose nothing, keep groups together, respect caps, and are deterministic."""

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.batch import DUMMY_ID, Denominators, SequenceBatch
from temper_engine_api.errors import PlanError
from temper_engine_api.plan import (
    CostModel,
    MiniBatchPlan,
    build_packed_batch,
    format_plan,
    plan_fingerprint,
    plan_mini_batch,
    plan_single_micro_batch,
    split_mini_batches,
)
from temper_engine_api.topology import PlanConstraints

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)
NOTHING = Denominators(tokens=1, sequences=1, groups=1)


def slots(plan: MiniBatchPlan) -> list[tuple[int, ...]]:
    return [micro for rank in plan.ranks for micro in rank.micro_batches]


def log_normal_lengths(number: int, *, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [min(max(int(draw.lognormvariate(7.0, 0.9)), 32), 16384) for _ in range(number)]


@given(lengths=LENGTHS, dp_size=st.integers(1, 6), cap=st.integers(50, 120))
def test_every_sequence_is_in_exactly_one_micro_batch(
    lengths: list[int], dp_size: int, cap: int
) -> None:
    plan = plan_mini_batch(lengths, dp_size=dp_size, max_tokens=cap)
    assert sorted(i for micro in slots(plan) for i in micro) == list(range(len(lengths)))


@given(
    lengths=LENGTHS,
    dp_size=st.integers(1, 6),
    cap=st.integers(56, 120),
    multiple=st.sampled_from([1, 2, 7]),
)
def test_no_micro_batch_exceeds_the_cap_after_padding(
    lengths: list[int], dp_size: int, cap: int, multiple: int
) -> None:
    plan = plan_mini_batch(
        lengths,
        dp_size=dp_size,
        max_tokens=cap,
        constraints=PlanConstraints(token_multiple=multiple),
    )
    padded = [-(-sum(lengths[i] for i in micro) // multiple) * multiple for micro in slots(plan)]
    assert max(padded) <= cap


@given(
    lengths=LENGTHS,
    dp_size=st.integers(1, 6),
    multiple=st.integers(1, 4),
    minimum=st.integers(1, 5),
)
def test_all_ranks_have_the_same_allowed_number_of_micro_batches(
    lengths: list[int], dp_size: int, multiple: int, minimum: int
) -> None:
    constraints = PlanConstraints(micro_batch_multiple=multiple, min_micro_batches=minimum)
    plan = plan_mini_batch(lengths, dp_size=dp_size, max_tokens=60, constraints=constraints)
    (count,) = {len(rank.micro_batches) for rank in plan.ranks}
    assert count == plan.num_micro_batches
    assert count % multiple == 0
    assert count >= minimum


@given(lengths=LENGTHS, dp_size=st.integers(1, 4), data=st.data())
def test_pack_groups_are_never_split(lengths: list[int], dp_size: int, data: st.DataObject) -> None:
    # At most 4 sequences of at most 50 tokens share a pack group: 200 tokens.
    pack_group_ids = [i // 4 for i in data.draw(st.permutations(range(len(lengths))))]
    plan = plan_mini_batch(lengths, dp_size=dp_size, max_tokens=200, pack_group_ids=pack_group_ids)
    assigned = {(pack_group_ids[i], slot) for slot, micro in enumerate(slots(plan)) for i in micro}
    assert len(assigned) == len(set(pack_group_ids))


@given(lengths=LENGTHS, dp_size=st.integers(1, 4), cap=st.integers(50, 120))
def test_micro_batches_are_few(lengths: list[int], dp_size: int, cap: int) -> None:
    # Two bins that are at most half full would have been one, so the bins of the fullest rank
    # are more than half full on average.
    plan = plan_mini_batch(lengths, dp_size=dp_size, max_tokens=cap)
    tokens = [sum(lengths[i] for micro in rank.micro_batches for i in micro) for rank in plan.ranks]
    assert plan.num_micro_batches <= max(1, 2 * max(tokens) // cap + 1)


def test_a_full_fit_takes_no_more_micro_batches_than_needed() -> None:
    # 60 + 40, 70 + 30, 50 + 50: three bins of 100, which spreading by cost alone would miss.
    plan = plan_mini_batch([60, 40, 70, 30, 50, 50], dp_size=1, max_tokens=100)
    assert plan.num_micro_batches == 3


def test_costlier_micro_batches_come_first_on_every_rank() -> None:
    lengths = log_normal_lengths(256, seed=1)
    plan = plan_mini_batch(lengths, dp_size=4, max_tokens=20000)
    for rank in plan.ranks:
        costs = [
            sum(24576 * lengths[i] + lengths[i] ** 2 for i in micro) for micro in rank.micro_batches
        ]
        assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("seed", range(12))
def test_1024_log_normal_sequences_over_64_ranks_balance_within_3_percent(seed: int) -> None:
    lengths = log_normal_lengths(1024, seed=seed)
    costs = [24576 * n + n * n for n in lengths]
    plan = plan_mini_batch(lengths, dp_size=64, max_tokens=32768)
    loads = [sum(costs[i] for micro in rank.micro_batches for i in micro) for rank in plan.ranks]
    assert max(loads) <= 1.03 * max(sum(costs) / 64, *costs)


def test_equal_lengths_give_equal_counts() -> None:
    plan = plan_mini_batch([7] * 103, dp_size=8, max_tokens=1000)
    counts = sorted(sum(len(micro) for micro in rank.micro_batches) for rank in plan.ranks)
    assert counts == [12] + [13] * 7  # 103 = 7 * 13 + 12


@given(lengths=st.lists(st.integers(90, 110), min_size=1, max_size=80), dp_size=st.integers(1, 8))
def test_ranks_get_equal_counts_up_to_one_where_lengths_are_alike(
    lengths: list[int], dp_size: int
) -> None:
    plan = plan_mini_batch(
        lengths, dp_size=dp_size, max_tokens=10_000, cost=CostModel(linear=1, quadratic=0)
    )
    counts = [sum(len(micro) for micro in rank.micro_batches) for rank in plan.ranks]
    assert max(counts) - min(counts) <= 1


@given(lengths=LENGTHS, dp_size=st.integers(1, 4))
def test_the_plan_is_a_function_of_its_arguments(lengths: list[int], dp_size: int) -> None:
    plans = [plan_mini_batch(lengths, dp_size=dp_size, max_tokens=80) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plan_fingerprint(plans[0]) == plan_fingerprint(plans[1])


def test_fingerprints_of_different_plans_differ() -> None:
    one = plan_mini_batch([3, 4, 5], dp_size=1, max_tokens=12)
    other = plan_mini_batch([3, 4, 5], dp_size=1, max_tokens=9)
    assert plan_fingerprint(one) != plan_fingerprint(other)


def test_a_sample_above_the_cap_is_named() -> None:
    with pytest.raises(
        PlanError,
        match=r"sample 1 has 90 tokens, .* may have 64.*raise batching.max_tokens or lower",
    ):
        plan_mini_batch([10, 90, 30], dp_size=2, max_tokens=64)


def test_pack_group_above_the_cap_names_its_longest_sample() -> None:
    with pytest.raises(
        PlanError,
        match=r"sample 2 has 40 tokens and shares its pack group with 1 more, 70 tokens together",
    ):
        plan_mini_batch([30, 5, 40], dp_size=1, max_tokens=64, pack_group_ids=[8, 9, 8])


def test_the_cap_counts_the_padding() -> None:
    plan_mini_batch([60], dp_size=1, max_tokens=64, constraints=PlanConstraints(token_multiple=32))
    with pytest.raises(PlanError, match="counted in multiples of 32"):
        plan_mini_batch(
            [60], dp_size=1, max_tokens=63, constraints=PlanConstraints(token_multiple=32)
        )


def test_the_smallest_padding_is_named_too() -> None:
    with pytest.raises(PlanError, match=r"a micro-batch may have 3, counted in multiples of 2: "):
        plan_mini_batch([3], dp_size=1, max_tokens=3, constraints=PlanConstraints(token_multiple=2))


def test_no_sequences_is_an_error() -> None:
    with pytest.raises(PlanError, match="0 sequences over 2 ranks"):
        plan_mini_batch([], dp_size=2, max_tokens=64)


def test_more_ranks_than_sequences_leaves_empty_micro_batches() -> None:
    plan = plan_mini_batch([4, 5], dp_size=3, max_tokens=64)
    assert sorted(slots(plan)) == [(), (0,), (1,)]


def test_single_micro_batch_plan_follows_the_constraints() -> None:
    plan = plan_single_micro_batch(
        3, constraints=PlanConstraints(micro_batch_multiple=2, min_micro_batches=3)
    )
    assert plan.ranks[0].micro_batches == ((0, 1, 2), (), (), ())


@given(lengths=LENGTHS, dp_size=st.integers(1, 5), cap=st.integers(50, 120))
def test_packing_loses_no_token(
    make_batch: Callable[..., SequenceBatch], lengths: list[int], dp_size: int, cap: int
) -> None:
    batch = make_batch(lengths)
    plan = plan_mini_batch(lengths, dp_size=dp_size, max_tokens=cap)
    parts = [
        build_packed_batch(batch, plan=plan, rank=rank, denominators=NOTHING)
        for rank in range(dp_size)
    ]
    packed = {}
    for part in parts:
        for micro in part.iterate_micro_batches():
            for b, sample in enumerate(micro.sample_ids.tolist()):
                a, z = micro.sequence_starts[b], micro.sequence_starts[b + 1]
                packed[sample] = (micro.tokens[a:z], micro.columns["advantages"][a:z])
    packed.pop(DUMMY_ID, None)
    assert sorted(packed) == list(range(len(lengths)))
    in_order = [packed[i] for i in range(len(lengths))]
    assert torch.equal(torch.cat([tokens for tokens, _ in in_order]), batch.tokens)
    assert torch.equal(torch.cat([column for _, column in in_order]), batch.columns["advantages"])


def test_an_empty_micro_batch_becomes_one_untrained_token(
    make_batch: Callable[..., SequenceBatch],
) -> None:
    plan = plan_mini_batch([4], dp_size=2, max_tokens=64)
    empty = build_packed_batch(make_batch([4]), plan=plan, rank=1, denominators=NOTHING)
    assert (
        empty.sample_ids.tolist()
        == empty.group_ids.tolist()
        == empty.pack_group_ids.tolist()
        == [DUMMY_ID]
    )
    assert empty.loss_mask.tolist() == [False]
    assert empty.temperature.tolist() == [1.0]
    assert empty.columns["advantages"].tolist() == [0.0]
    assert empty.sequence_columns["scores"].tolist() == [0.0]


def test_dummy_has_position_ids_and_media_if_the_batch_has(
    make_batch: Callable[..., SequenceBatch],
) -> None:
    batch = replace(make_batch([4, 2]), position_ids=torch.arange(18).view(3, 6), media=("a", "b"))
    plan = plan_mini_batch(
        [4, 2], dp_size=1, max_tokens=4, constraints=PlanConstraints(min_micro_batches=3)
    )
    packed = build_packed_batch(batch, plan=plan, rank=0, denominators=NOTHING)
    assert packed.position_ids is not None
    assert packed.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 5, 0],
        [6, 7, 8, 9, 10, 11, 0],
        [12, 13, 14, 15, 16, 17, 0],
    ]
    assert packed.media == ("a", "b", None)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=20),
    seed=st.one_of(st.none(), st.integers(0, 5)),
    data=st.data(),
)
def test_each_group_is_in_exactly_one_mini_batch(
    sizes: list[int], seed: int | None, data: st.DataObject
) -> None:
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    number = data.draw(st.integers(1, len(sizes)))
    parts = split_mini_batches(groups, num_mini_batches=number, seed=seed)
    assert sorted(i for part in parts for i in part) == list(range(len(groups)))
    assert all(parts)
    assigned = {(groups[i], m) for m, part in enumerate(parts) for i in part}
    assert len(assigned) == len(sizes)


@given(
    num_groups=st.integers(1, 30),
    group_size=st.integers(1, 4),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_equal_groups_fill_mini_batches_equally(
    num_groups: int, group_size: int, seed: int, data: st.DataObject
) -> None:
    number = data.draw(st.integers(1, num_groups))
    groups = [g for g in range(num_groups) for _ in range(group_size)]
    for parts in (
        split_mini_batches(groups, num_mini_batches=number, seed=s) for s in (None, seed)
    ):
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= group_size


def test_split_depends_only_on_the_seed() -> None:
    groups = [i // 2 for i in range(40)]
    one, again, other = (
        split_mini_batches(groups, num_mini_batches=4, seed=seed) for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_without_a_seed_the_order_is_kept() -> None:
    parts = split_mini_batches([5, 5, 3, 3, 9, 9, 1, 1], num_mini_batches=2, seed=None)
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_cut_without_a_seed_follows_the_middle_of_a_group() -> None:
    # Half of 11 is 5.5, and the second group's middle is at 4 + 4 / 2 = 6.
    parts = split_mini_batches([0] * 4 + [1] * 4 + [2] * 3, num_mini_batches=2, seed=None)
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]


def test_cut_without_a_seed_leaves_no_mini_batch_empty() -> None:
    # A third of 12 is 4, which the first two groups do not reach; each still gets a
    # mini-batch, because 3 groups must fill 3 mini-batches.
    parts = split_mini_batches([0, 1] + [2] * 10, num_mini_batches=3, seed=None)
    assert parts == [[0], [1], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


def test_groups_joined_by_a_pack_group_stay_in_one_mini_batch() -> None:
    parts = split_mini_batches(
        [0, 0, 1, 1, 2, 2], num_mini_batches=2, seed=3, pack_group_ids=[0, 7, 7, 3, 4, 5]
    )
    assert sorted(parts) == [[0, 1, 2, 3], [4, 5]]


def test_more_mini_batches_than_groups_is_an_error() -> None:
    with pytest.raises(PlanError, match="2 groups can't fill 3 mini-batches"):
        split_mini_batches([0, 0, 1], num_mini_batches=3, seed=0)


def test_formatted_plan_counts_sequences_and_tokens() -> None:
    table = format_plan(plan_mini_batch([10, 20, 30], dp_size=2, max_tokens=64), [10, 20, 30])
    assert [line.split() for line in table.splitlines()[1:3]] == [
        ["0", "1", "30", "30", "1.000"],
        ["1", "2", "30", "30", "1.000"],
    ]
    assert "micro-batches per rank: 1" in table


def test_costs_are_linear_and_quadratic_in_the_length() -> None:
    # 1 + 2 * 1 = 3 and 3 + 2 * 9 = 21: a quarter and seven quarters of their mean, 12.
    table = format_plan(
        plan_mini_batch([1, 3], dp_size=2, max_tokens=3),
        [1, 3],
        cost=CostModel(linear=1, quadratic=2),
    )
    assert sorted(line.split()[-1] for line in table.splitlines()[1:3]) == ["0.250", "1.750"]


def test_100k_sequences_are_planned_in_seconds() -> None:
    # bench/balance.py limits the assignment to 100 ms; this limit also suits a busy machine.
    lengths = log_normal_lengths(100_000, seed=0)
    begun = time.process_time()
    plan_mini_batch(lengths, dp_size=64, max_tokens=32768)
    assert time.process_time() - begun < 10
