import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import PlanError
from temper_engine_api.topology import Axis, PlanConstraints, Topology
from temper_trainer.batching.step_plan import (
    RoleLayout,
    StepPlan,
    describe_plan,
    measure_plan,
    plan_step,
)
from temper_trainer.config.algorithm import BatchingConfig

SINGLE_RANK = {"actor": RoleLayout()}


def make_samples(lengths: list[int], group_ids: list[int]) -> SequenceBatch:
    masks = [torch.arange(n) >= 1 for n in lengths]
    return from_sequences([torch.arange(n) for n in lengths], loss_masks=masks, group_ids=group_ids)


def make_plan(
    samples: SequenceBatch,
    *,
    mini_batches: int = 1,
    passes: int = 1,
    max_tokens: int = 64,
    seed: int = 0,
) -> StepPlan:
    config = BatchingConfig(num_mini_batches=mini_batches, num_passes=passes, max_tokens=max_tokens)
    return plan_step(samples, config, layouts=SINGLE_RANK, seed=seed)


@given(
    group_ids=st.lists(st.integers(0, 5), min_size=1, max_size=24),
    mini_batches=st.integers(1, 4),
    passes=st.integers(1, 3),
    seed=st.integers(0, 2**40),
)
def test_every_pass_contains_every_sample_once_and_never_splits_a_group(
    group_ids: list[int], mini_batches: int, passes: int, seed: int
) -> None:
    mini_batches = min(mini_batches, len(set(group_ids)))
    plan = make_plan(
        make_samples([3] * len(group_ids), group_ids),
        mini_batches=mini_batches,
        passes=passes,
        seed=seed,
    )
    assert len(plan.mini_batches) == passes * mini_batches
    for first in range(0, len(plan.mini_batches), mini_batches):
        of_pass = plan.mini_batches[first : first + mini_batches]
        assert sorted(i for m in of_pass for i in m.indices) == list(range(len(group_ids)))
        assert sum(m.denominators.groups for m in of_pass) == len(set(group_ids))


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=20),
    dp_size=st.integers(1, 4),
    max_tokens=st.integers(40, 90),
)
def test_micro_batches_respect_the_token_limit_and_ranks_have_equally_many(
    lengths: list[int], dp_size: int, max_tokens: int
) -> None:
    samples = make_samples(lengths, list(range(len(lengths))))
    config = BatchingConfig(max_tokens=max_tokens)
    (mini_batch,) = plan_step(
        samples, config, layouts={"actor": RoleLayout(dp_size=dp_size)}, seed=0
    ).mini_batches
    ranks = mini_batch.plans["actor"].ranks
    assert len({len(rank.micro_batches) for rank in ranks}) == 1
    assert all(
        sum(lengths[mini_batch.indices[i]] for i in micro) <= max_tokens
        for rank in ranks
        for micro in rank.micro_batches
    )


def test_denominators_are_counted_over_the_mini_batch_after_masking() -> None:
    # Lengths 4, 3, 2, each without its first token: 3 + 2 + 1 trained tokens, 3 sequences, 2
    # groups.
    (mini_batch,) = make_plan(make_samples([4, 3, 2], [0, 0, 1])).mini_batches
    counted = mini_batch.denominators
    assert (counted.tokens, counted.sequences, counted.groups) == (6, 3, 2)


def test_roles_have_the_same_mini_batches_and_equal_layouts_the_same_plan() -> None:
    samples = make_samples([9, 8, 7, 6, 5, 4], [0, 0, 1, 1, 2, 2])
    layouts = {
        "actor": RoleLayout(dp_size=2),
        "ref": RoleLayout(dp_size=2),
        "critic": RoleLayout(constraints=PlanConstraints(min_micro_batches=2)),
    }
    plan = plan_step(
        samples, BatchingConfig(num_mini_batches=3, max_tokens=64), layouts=layouts, seed=1
    )
    for mini_batch in plan.mini_batches:
        assert mini_batch.plans["actor"] is mini_batch.plans["ref"]
        assert len(mini_batch.plans["actor"].ranks) == 2
        assert mini_batch.plans["critic"].num_micro_batches == 2
        planned = [
            sorted(i for r in p.ranks for m in r.micro_batches for i in m)
            for p in mini_batch.plans.values()
        ]
        assert planned == [list(range(len(mini_batch.indices)))] * 3


def test_plan_depends_only_on_the_seed_and_passes_differ() -> None:
    samples = make_samples([3] * 16, list(range(16)))
    first = make_plan(samples, mini_batches=4, passes=2, seed=5)
    assert first == make_plan(samples, mini_batches=4, passes=2, seed=5)
    assert first != make_plan(samples, mini_batches=4, passes=2, seed=6)
    indices = [m.indices for m in first.mini_batches]
    assert sorted(indices[:4]) != sorted(indices[4:])
    assert len({m.seed for m in first.mini_batches}) == 8


def test_first_pass_contains_the_first_mini_batches() -> None:
    plan = make_plan(make_samples([3] * 8, list(range(8))), mini_batches=2, passes=3)
    assert plan.first_pass == plan.mini_batches[:2]


def test_layout_has_the_dp_size_and_constraints_of_the_topology() -> None:
    constraints = PlanConstraints(token_multiple=8)
    topology = Topology(
        world_size=4,
        global_rank=3,
        dp=Axis(size=2, rank=1),
        tp=Axis(size=2, rank=1),
        plan_constraints=constraints,
    )
    assert RoleLayout.from_topology(topology) == RoleLayout(dp_size=2, constraints=constraints)


def test_sample_beyond_the_token_limit_names_the_configuration_keys() -> None:
    with pytest.raises(
        PlanError, match=r"65 tokens.*64.*raise batching\.max_tokens or lower sampling\.max_tokens"
    ):
        make_plan(make_samples([3, 65], [0, 1]), max_tokens=64)


def test_step_with_fewer_groups_than_mini_batches_makes_fewer_updates() -> None:
    plan = make_plan(make_samples([3] * 8, [0] * 4 + [1] * 4), mini_batches=3, passes=2)
    assert [sorted(m.indices) in ([0, 1, 2, 3], [4, 5, 6, 7]) for m in plan.mini_batches] == [
        True
    ] * 4
    assert len(plan.first_pass) == 2


def test_plan_metrics_describe_a_single_pass() -> None:
    # Two ranks get 6 and 2 tokens: the fullest has 6 over a mean of 4, imbalance 0.5. One
    # micro-batch each, no dummy.
    samples = make_samples([6, 2], [0, 1])
    plan = plan_step(
        samples,
        BatchingConfig(num_passes=3, max_tokens=8),
        layouts={"actor": RoleLayout(dp_size=2)},
        seed=0,
    )
    assert measure_plan(plan, samples, role="actor") == pytest.approx(
        {
            "batch/tokens": 8,
            "batch/trained_tokens": 6,
            "batch/updates": 3,
            "batch/micro_batches": 1,
            "batch/dummy_fraction": 0,
            "batch/imbalance": 0.5,
        }
    )


def test_micro_batches_with_only_a_dummy_are_counted() -> None:
    # One sample on four ranks: three of four micro-batches hold a dummy; 5 tokens over a mean of
    # 1.25 is 3 above 1.
    samples = make_samples([5], [0])
    plan = plan_step(
        samples, BatchingConfig(max_tokens=8), layouts={"actor": RoleLayout(dp_size=4)}, seed=0
    )
    metrics = measure_plan(plan, samples, role="actor")
    assert (metrics["batch/dummy_fraction"], metrics["batch/imbalance"]) == (0.75, 3.0)


def test_description_shows_sizes_and_each_distinct_plan_once() -> None:
    samples = make_samples([6, 2, 4], [0, 1, 2])
    layouts = {"actor": RoleLayout(dp_size=2), "ref": RoleLayout(dp_size=2), "critic": RoleLayout()}
    text = describe_plan(
        plan_step(samples, BatchingConfig(num_passes=2, max_tokens=12), layouts=layouts, seed=0),
        samples,
    )
    assert "samples: 3, tokens: 12; updates: 2 (passes: 2, mini-batches per pass: 1)" in text
    assert "trained tokens: 9 of 12, sequences: 3, groups: 3" in text
    assert "actor, ref:" in text
    assert "critic:" in text
