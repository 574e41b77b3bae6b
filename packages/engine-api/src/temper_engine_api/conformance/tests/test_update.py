"""Conformance tests of the update: AdamW, clipping, schedules and skipped updates."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    TWO_MICRO_BATCHES,
    Update,
    collect_state,
    measure_update,
    measure_updates,
    merge_update_metrics,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import ADAMW, READ_GRADIENTS, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    LOSS,
    UPDATE,
    assert_all_close,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.batches import mask_everything
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.errors import EngineStateError
from temper_engine_api.schedule import compute_learning_rate
from temper_engine_api.specs import OptimizerSpec, ScheduleSpec

SCHEDULES = (
    ScheduleSpec(warmup_steps=2),
    ScheduleSpec(kind="linear", warmup_steps=1, total_steps=4, min_lr_ratio=0.1),
    ScheduleSpec(kind="cosine", total_steps=3),
)
LINEAR_DECAY = ScheduleSpec(kind="linear", total_steps=10)


def test_three_updates_match_adamw(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    """Three AdamW updates with clipping and weight decay give the oracle's weights and norms."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    # More than one update, since bias correction and old moments are without effect in the first.
    batches = [oracle.get_batch(seed=seed) for seed in range(3)]
    expected = oracle.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=batches
    )
    updates = engine_under_test.run(
        measure_updates,
        setup=setup,
        objective=ClippedPpoProbe(),
        batches=batches,
        split=TWO_MICRO_BATCHES,
    )[0]
    for update, expected_update in zip(updates, expected, strict=True):
        assert_close(update.grad_norm, expected_update.grad_norm, UPDATE, quantity="gradient norm")
        assert_all_close(
            update.masters, expected_update.masters, UPDATE, quantity="weights after the update"
        )
        assert {state.update_count for state in update.state.values()} == {
            state.update_count for state in expected_update.state.values()
        }


def test_weight_decay_skips_vectors(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Weight decay applies to matrices and not to norms and biases.

    With betas 0 and a huge eps the gradient term vanishes. What is left is the decay: a factor 1 -
    lr * weight_decay = 0.99 for matrices, and 1 for vectors.
    """
    decays = OptimizerSpec(
        lr=0.1, betas=(0.0, 0.0), eps=1e30, weight_decay=0.1, clip_grad_norm=None
    )
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=decays)
    before = oracle.get_update(
        oracle.make_setup(QWEN2_GROUPED), ClippedPpoProbe(), oracle.get_batch()
    ).masters
    updates = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=[oracle.get_batch()]
    )
    for name, weight in updates[0][0].masters.items():
        factor = 0.99 if weight.ndim >= 2 else 1.0
        assert_close(weight, factor * before[name], LOSS, quantity=name)


def test_decays_vectors_decays_vectors(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Weight decay applies to norms and biases too if `decays_vectors` is True."""
    decays = OptimizerSpec(
        lr=0.1,
        betas=(0.0, 0.0),
        eps=1e30,
        weight_decay=0.1,
        decays_vectors=True,
        clip_grad_norm=None,
    )
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=decays)
    before = oracle.get_update(
        oracle.make_setup(QWEN2_GROUPED), ClippedPpoProbe(), oracle.get_batch()
    ).masters
    updates = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=[oracle.get_batch()]
    )
    for name, weight in updates[0][0].masters.items():
        assert_close(weight, 0.99 * before[name], LOSS, quantity=name)


def test_gradient_is_clipped(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    """The optimizer uses the clipped gradient, while `optimizer_step` returns the unclipped norm.

    The norm of the gradient that was used is read from the first moments.
    """
    clipped = replace(READ_GRADIENTS, clip_grad_norm=0.01)
    batch = oracle.get_batch()
    unclipped_norm = oracle.get_update(
        oracle.make_setup(QWEN2_GROUPED), ClippedPpoProbe(), batch
    ).grad_norm
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=clipped)
    update = engine_under_test.run(
        measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch
    )[0]
    used = torch.cat([gradient.flatten().double() for gradient in update.gradients.values()]).norm()
    assert_close(used, 0.01, UPDATE, quantity="norm of the gradient that was used")
    assert_close(update.grad_norm, unclipped_norm, LOSS, quantity="reported norm, before clipping")


def test_small_gradient_is_not_clipped(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A gradient whose norm is below the limit is used unchanged."""
    batch = oracle.get_batch()
    expected = oracle.get_update(oracle.make_setup(QWEN2_GROUPED), ClippedPpoProbe(), batch)
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=replace(READ_GRADIENTS, clip_grad_norm=1e6))
    update = engine_under_test.run(
        measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch
    )[0]
    assert_all_close(update.gradients, expected.gradients, UPDATE, quantity="gradient")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_learning_rate_follows_the_schedule(
    engine_under_test: EngineUnderTest, oracle: OracleCache, schedule: ScheduleSpec
) -> None:
    """`current_lr` and `lr_scheduler_step` follow the schedule's formula on every rank."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=schedule)
    rates = engine_under_test.run(
        collect_learning_rates, setup=setup, batch=oracle.get_batch(), num_updates=4
    )
    expected = [compute_learning_rate(step, peak=ADAMW.lr, spec=schedule) for step in range(5)]
    assert all(rank_rates == expected for rank_rates in rates)
    assert expected[0] > 0.0


def collect_learning_rates(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, num_updates: int
) -> list[float]:
    """Return the rate before any update, then the rate after each update."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    return [
        engine.current_lr,
        *(run_update(engine, [local_batch]).next_lr for _ in range(num_updates)),
    ]


def test_optimizer_uses_the_scheduled_rate(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Each update moves weights by the scheduled learning rate.

    With betas 0, no decay and a tiny eps, AdamW moves the weights with the largest gradients by lr
    * sign(gradient).
    """
    # With four warmup steps, each of the three updates has a different rate.
    signs = OptimizerSpec(lr=0.4, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0, clip_grad_norm=None)
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=signs, schedule=ScheduleSpec(warmup_steps=4))
    batches = [oracle.get_batch(seed=seed) for seed in range(3)]
    updates = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=batches
    )[0]
    for step, (before, after) in enumerate(pairwise(updates), start=1):
        # The largest movement, because eps makes weights with tiny gradients move less than lr.
        moved = max(
            float((after.masters[n] - before.masters[n]).abs().max()) for n in after.masters
        )
        assert_close(
            moved, 0.4 * (step + 1) / 4, UPDATE, quantity=f"largest movement of update {step + 1}"
        )


def test_fully_masked_mini_batch_changes_nothing(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A mini-batch without trained tokens changes no weight, moment, count or learning rate."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=LINEAR_DECAY)
    batches = [
        # A real update first, so that moments and counts are not 0 and decay would show.
        oracle.get_batch(),
        mask_everything(oracle.get_batch()),
        mask_everything(oracle.get_batch(seed=1)),
    ]
    for updates in engine_under_test.run(
        measure_updates,
        setup=setup,
        objective=ClippedPpoProbe(),
        batches=batches,
        split=TWO_MICRO_BATCHES,
    ):
        trained, *masked = updates
        for update in masked:
            assert update.report.outcome == "nothing_trained"
            assert update.grad_norm == 0.0
            assert not update.returns_outputs or merge_update_metrics([update])["loss"] == 0.0
            assert update.next_lr == trained.next_lr
            assert_same_state(update.state, trained.state)


def test_nonfinite_gradient_skips_the_step_on_every_rank(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Every rank skips the step and reports all sample ids if one advantage is infinite.

    State, counts and schedule stay as they were, and the next step works.
    """
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=LINEAR_DECAY)
    good = oracle.get_batch()
    # A single trained token is infinite, so only one data-parallel rank sees it locally.
    advantages = good.columns["advantages"].clone()
    advantages[int(good.loss_mask.nonzero()[0])] = math.inf
    updates = engine_under_test.run(
        measure_updates,
        setup=setup,
        objective=ClippedPpoProbe(),
        batches=[good, good.with_columns({"advantages": advantages}), good],
        split=ONE_MICRO_BATCH,
    )
    rates = [compute_learning_rate(step, peak=ADAMW.lr, spec=LINEAR_DECAY) for step in range(3)]
    for first, skipped, later in updates:
        assert not math.isfinite(skipped.grad_norm)
        assert (first.report.outcome, skipped.report.outcome, later.report.outcome) == (
            "stepped",
            "nonfinite",
            "stepped",
        )
        # The schedule counts updates, so a skipped one does not advance it.
        assert (skipped.next_lr, later.next_lr) == (rates[1], rates[2])
        assert_same_state(skipped.state, first.state)
    reported = [
        sample
        for updates_of_rank in updates
        if updates_of_rank[1].returns_outputs
        for sample in updates_of_rank[1].report.sample_ids
    ]
    assert sorted(reported) == sorted(good.sample_ids.tolist())


def test_nonfinite_gradient_of_an_earlier_call_skips_the_step(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The step is skipped if only the first of two calls had a gradient that is not finite."""
    setup, good = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW), oracle.get_batch()
    bad = good.with_columns({"advantages": torch.full_like(good.columns["advantages"], math.inf)})
    for update in engine_under_test.run(update_in_two_calls, setup=setup, batches=[bad, good]):
        assert not math.isfinite(update.grad_norm)
        assert update.report.outcome == "nonfinite"


def update_in_two_calls(rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]) -> Update:
    """Run one call per batch, then one step."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    return run_update(
        engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH) for batch in batches]
    )


def test_too_many_skips_in_a_row_stop_the_run(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The engine raises EngineStateError after more than `max_consecutive_skips` skips in a row."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=replace(ADAMW, max_consecutive_skips=2))
    batch = oracle.get_batch()
    bad = batch.with_columns({"advantages": torch.full_like(batch.columns["advantages"], math.nan)})
    assert (
        engine_under_test.run(skip_until_error, setup=setup, good=batch, bad=bad)
        == [3] * engine_under_test.world_size
    )


def skip_until_error(
    rank: Rank, *, setup: EngineSetup, good: SequenceBatch, bad: SequenceBatch
) -> int:
    """Skip twice, update, then skip until the engine raises; return that number of skips."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    # The successful update must reset the count of consecutive skips.
    for batch in (bad, bad, good):
        run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])
    for count in range(1, 10):
        try:
            run_update(engine, [rank_slice(engine, bad, split=ONE_MICRO_BATCH)])
        except EngineStateError:
            assert engine.num_nonfinite_updates == 2 + count, (
                f"counted {engine.num_nonfinite_updates}"
            )
            return count
    raise AssertionError(
        "the engine did not stop after nine consecutive skipped steps; max_consecutive_skips is 2"
    )


@pytest.mark.parametrize("is_final", [False, True], ids=["local", "reduced"])
def test_zeroed_gradients_stay_zero(
    engine_under_test: EngineUnderTest, oracle: OracleCache, is_final: bool
) -> None:
    """After `optimizer_zero_grad`, an update sees no earlier gradient, local or reduced."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    update = engine_under_test.run(
        update_after_a_dropped_one,
        setup=setup,
        batch=batch,
        dropped=oracle.get_batch(seed=1),
        is_final=is_final,
    )[0]
    assert_all_close(update.gradients, expected.gradients, UPDATE, quantity="gradient")


def update_after_a_dropped_one(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, dropped: SequenceBatch, is_final: bool
) -> Update:
    """Drop one batch's gradients, which are reduced if the call was final; train on another.

    Nothing may come between: a final call would reduce local gradients, and hide that they stay.
    """
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(
            rank_slice(engine, dropped, split=ONE_MICRO_BATCH), forward_only=False, final=is_final
        )
    return run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])


def test_leaving_train_mode_keeps_gradients(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Gradients survive leaving `train_mode` and a forward pass in `eval_mode`."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    for is_final in (True, False):
        gradients = engine_under_test.run(
            gradients_after_a_pause, setup=setup, batch=batch, is_final=is_final
        )[0]
        assert_all_close(gradients, expected.gradients, UPDATE, quantity="gradient")


def gradients_after_a_pause(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, is_final: bool
) -> dict[str, Tensor]:
    """Run backward, leave the mode, evaluate, step; return the gradients."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    with engine.train_mode():
        engine.forward_backward_batch(local_batch, forward_only=False, final=is_final)
    with engine.eval_mode():
        engine.forward_backward_batch(local_batch, forward_only=True)
    engine.optimizer_step()
    return {name: state.first_moment for name, state in collect_state(engine).items()}
