"""Laws: AdamW and clipping as written down, schedules as pure functions of a counter, and updates that must not happen."""

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
FALLING = ScheduleSpec(kind="linear", total_steps=10)


def test_three_updates_match_adamw(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
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
    for update, want in zip(updates, expected, strict=True):
        assert_close(update.grad_norm, want.grad_norm, UPDATE, what="gradient norm")
        assert_all_close(update.masters, want.masters, UPDATE, what="weights after the update")
        assert {state.update_count for state in update.state.values()} == {
            state.update_count for state in want.state.values()
        }


def test_weight_decay_skips_vectors(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    # With betas 0 and an enormous eps the gradient's share of the update vanishes: what is left is the decay, 1 - lr wd = 0.99 exactly
    # for matrices, and nothing for norms and biases.
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
        assert_close(weight, factor * before[name], LOSS, what=name)


def test_decays_vectors_decays_vectors(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
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
        assert_close(weight, 0.99 * before[name], LOSS, what=name)


def test_gradient_is_clipped(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    clipped = replace(READ_GRADIENTS, clip_grad_norm=0.01)
    batch = oracle.get_batch()
    whole_norm = oracle.get_update(
        oracle.make_setup(QWEN2_GROUPED), ClippedPpoProbe(), batch
    ).grad_norm
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=clipped)
    update = engine_under_test.run(
        measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch
    )[0]
    used = torch.cat([gradient.flatten().double() for gradient in update.gradients.values()]).norm()
    assert_close(used, 0.01, UPDATE, what="norm of the gradient that was used")
    assert_close(update.grad_norm, whole_norm, LOSS, what="reported norm, before clipping")


def test_small_gradient_is_not_clipped(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    batch = oracle.get_batch()
    expected = oracle.get_update(oracle.make_setup(QWEN2_GROUPED), ClippedPpoProbe(), batch)
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=replace(READ_GRADIENTS, clip_grad_norm=1e6))
    update = engine_under_test.run(
        measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch
    )[0]
    assert_all_close(update.gradients, expected.gradients, UPDATE, what="gradient")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_learning_rate_follows_the_schedule(
    engine_under_test: EngineUnderTest, oracle: OracleCache, schedule: ScheduleSpec
) -> None:
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=schedule)
    rates = engine_under_test.run(rates_of, setup=setup, batch=oracle.get_batch(), num_updates=4)
    expected = [compute_learning_rate(step, peak=ADAMW.lr, spec=schedule) for step in range(5)]
    assert all(of_rank == expected for of_rank in rates)
    assert expected[0] > 0.0


def rates_of(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, num_updates: int
) -> list[float]:
    """The rate before any update, then what ``lr_scheduler_step`` returns after each."""
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
    # Without decay, and with betas 0 and an eps far below the largest gradients, an update moves those weights by lr * sign(gradient).
    signs = OptimizerSpec(lr=0.4, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0, clip_grad_norm=None)
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=signs, schedule=ScheduleSpec(warmup_steps=4))
    batches = [oracle.get_batch(seed=seed) for seed in range(3)]
    updates = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=batches
    )[0]
    for step, (before, after) in enumerate(pairwise(updates), start=1):
        moved = max(
            float((after.masters[n] - before.masters[n]).abs().max()) for n in after.masters
        )
        assert_close(
            moved, 0.4 * (step + 1) / 4, UPDATE, what=f"largest movement of update {step + 1}"
        )


def test_fully_masked_mini_batch_changes_nothing(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=FALLING)
    batches = [
        oracle.get_batch(),
        mask_everything(oracle.get_batch()),
        mask_everything(oracle.get_batch(seed=1)),
    ]
    for of_rank in engine_under_test.run(
        measure_updates,
        setup=setup,
        objective=ClippedPpoProbe(),
        batches=batches,
        split=TWO_MICRO_BATCHES,
    ):
        trained, *masked = of_rank
        for update in masked:
            assert update.report.outcome == "nothing_trained"
            assert update.grad_norm == 0.0
            assert not update.returns_outputs or merge_update_metrics([update])["loss"] == 0.0
            assert update.next_lr == trained.next_lr
            assert_same_state(update.state, trained.state)


def test_nonfinite_gradient_skips_the_step_on_every_rank(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=FALLING)
    good = oracle.get_batch()
    # One trained token of one sample, so of one rank.
    advantages = good.columns["advantages"].clone()
    advantages[int(good.loss_mask.nonzero()[0])] = math.inf
    updates = engine_under_test.run(
        measure_updates,
        setup=setup,
        objective=ClippedPpoProbe(),
        batches=[good, good.with_columns({"advantages": advantages}), good],
        split=ONE_MICRO_BATCH,
    )
    rates = [compute_learning_rate(step, peak=ADAMW.lr, spec=FALLING) for step in range(3)]
    for first, skipped, later in updates:
        assert not math.isfinite(skipped.grad_norm)
        assert (first.report.outcome, skipped.report.outcome, later.report.outcome) == (
            "stepped",
            "nonfinite",
            "stepped",
        )
        assert (skipped.next_lr, later.next_lr) == (rates[1], rates[2])
        assert_same_state(skipped.state, first.state)
    reported = [
        sample
        for of_rank in updates
        if of_rank[1].returns_outputs
        for sample in of_rank[1].report.sample_ids
    ]
    assert sorted(reported) == sorted(good.sample_ids.tolist())


def test_too_many_skips_in_a_row_stop_the_run(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=replace(ADAMW, max_consecutive_skips=2))
    batch = oracle.get_batch()
    bad = batch.with_columns({"advantages": torch.full_like(batch.columns["advantages"], math.nan)})
    assert (
        engine_under_test.run(skip_until_refused, setup=setup, good=batch, bad=bad)
        == [3] * engine_under_test.world_size
    )


def skip_until_refused(
    rank: Rank, *, setup: EngineSetup, good: SequenceBatch, bad: SequenceBatch
) -> int:
    """Two skips, a good update that forgives them, then skips until the engine stops; how many those were."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
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
    raise AssertionError("nine skips in a row, and the engine went on")


def test_zeroed_gradients_stay_zero(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    update = engine_under_test.run(
        update_after_a_dropped_one, setup=setup, batch=batch, dropped=oracle.get_batch(seed=1)
    )[0]
    assert_all_close(update.gradients, expected.gradients, UPDATE, what="gradient")


def update_after_a_dropped_one(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, dropped: SequenceBatch
) -> Update:
    """Gradients of one mini-batch are dropped, local ones and reduced ones; then another one is trained."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    for is_final in (False, True):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_batch(
                rank_slice(engine, dropped, split=ONE_MICRO_BATCH),
                forward_only=False,
                final=is_final,
            )
    return run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])


def test_leaving_train_mode_keeps_gradients(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    for is_final in (True, False):
        gradients = engine_under_test.run(
            gradients_after_a_pause, setup=setup, batch=batch, is_final=is_final
        )[0]
        assert_all_close(gradients, expected.gradients, UPDATE, what="gradient")


def gradients_after_a_pause(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, is_final: bool
) -> dict[str, Tensor]:
    """Backward, leave, evaluate something, then step."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    with engine.train_mode():
        engine.forward_backward_batch(local_batch, forward_only=False, final=is_final)
    with engine.eval_mode():
        engine.forward_backward_batch(local_batch, forward_only=True)
    engine.optimizer_step()
    return {name: state.first_moment for name, state in collect_state(engine).items()}
