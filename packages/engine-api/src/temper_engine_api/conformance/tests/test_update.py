"""Laws: AdamW and clipping as written down, schedules as pure functions of a counter, and updates that must not happen."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.measurements import (
    TWO,
    WHOLE,
    Update,
    measure_update,
    measure_updates,
    merged,
    share_of,
    state_of,
    update_once,
)
from temper_engine_api.conformance.harness.rank import READ_GRADIENTS, TRAINS, Rank, Recipe
from temper_engine_api.conformance.harness.tolerances import (
    LOSS,
    UPDATE,
    assert_all_close,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.batches import without_training
from temper_engine_api.conformance.inputs.probes import TokenProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import Reference
from temper_engine_api.errors import EngineStateError
from temper_engine_api.schedule import learning_rate
from temper_engine_api.specs import OptimizerSpec, ScheduleSpec

SCHEDULES = (
    ScheduleSpec(warmup_steps=2),
    ScheduleSpec(kind="linear", warmup_steps=1, total_steps=4, min_lr_ratio=0.1),
    ScheduleSpec(kind="cosine", total_steps=3),
)
FALLING = ScheduleSpec(kind="linear", total_steps=10)


def test_three_updates_equal_adamw_by_hand(subject: Subject, reference: Reference) -> None:
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS)
    batches = [reference.batch(seed=seed) for seed in range(3)]
    expected = reference.run(
        measure_updates, recipe=recipe, objective=TokenProbe(), batches=batches
    )
    updates = subject.run(
        measure_updates, recipe=recipe, objective=TokenProbe(), batches=batches, split=TWO
    )[0]
    for update, want in zip(updates, expected, strict=True):
        assert_close(update.grad_norm, want.grad_norm, UPDATE, what="gradient norm")
        assert_all_close(update.masters, want.masters, UPDATE, what="weights after the update")
        assert {state.update_count for state in update.state.values()} == {
            state.update_count for state in want.state.values()
        }


def test_weight_decay_spares_vectors(subject: Subject, reference: Reference) -> None:
    # With betas 0 and an enormous eps the gradient's share of the update vanishes: what is left is the decay, 1 - lr wd = 0.99 exactly
    # for matrices, and nothing for norms and biases.
    decays = OptimizerSpec(
        lr=0.1, betas=(0.0, 0.0), eps=1e30, weight_decay=0.1, clip_grad_norm=None
    )
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=decays)
    before = reference.update(
        reference.recipe(QWEN2_GROUPED), TokenProbe(), reference.batch()
    ).masters
    updates = subject.run(
        measure_updates, recipe=recipe, objective=TokenProbe(), batches=[reference.batch()]
    )
    for name, weight in updates[0][0].masters.items():
        factor = 0.99 if weight.ndim >= 2 else 1.0
        assert_close(weight, factor * before[name], LOSS, what=name)


def test_weight_decay_reaches_vectors_where_asked(subject: Subject, reference: Reference) -> None:
    decays = OptimizerSpec(
        lr=0.1,
        betas=(0.0, 0.0),
        eps=1e30,
        weight_decay=0.1,
        decays_vectors=True,
        clip_grad_norm=None,
    )
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=decays)
    before = reference.update(
        reference.recipe(QWEN2_GROUPED), TokenProbe(), reference.batch()
    ).masters
    updates = subject.run(
        measure_updates, recipe=recipe, objective=TokenProbe(), batches=[reference.batch()]
    )
    for name, weight in updates[0][0].masters.items():
        assert_close(weight, 0.99 * before[name], LOSS, what=name)


def test_clip_is_applied(subject: Subject, reference: Reference) -> None:
    clipped = replace(READ_GRADIENTS, clip_grad_norm=0.01)
    batch = reference.batch()
    whole_norm = reference.update(reference.recipe(QWEN2_GROUPED), TokenProbe(), batch).grad_norm
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=clipped)
    update = subject.run(measure_update, recipe=recipe, objective=TokenProbe(), batch=batch)[0]
    used = torch.cat([gradient.flatten().double() for gradient in update.gradients.values()]).norm()
    assert_close(used, 0.01, UPDATE, what="norm of the gradient that was used")
    assert_close(update.grad_norm, whole_norm, LOSS, what="reported norm, before clipping")


def test_a_gradient_below_the_limit_is_not_clipped(subject: Subject, reference: Reference) -> None:
    batch = reference.batch()
    expected = reference.update(reference.recipe(QWEN2_GROUPED), TokenProbe(), batch)
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=replace(READ_GRADIENTS, clip_grad_norm=1e6))
    update = subject.run(measure_update, recipe=recipe, objective=TokenProbe(), batch=batch)[0]
    assert_all_close(update.gradients, expected.gradients, UPDATE, what="gradient")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_learning_rate_is_a_pure_function_of_the_step(
    subject: Subject, reference: Reference, schedule: ScheduleSpec
) -> None:
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS, schedule=schedule)
    rates = subject.run(rates_of, recipe=recipe, batch=reference.batch(), num_updates=4)
    expected = [learning_rate(step, peak=TRAINS.lr, spec=schedule) for step in range(5)]
    assert all(of_rank == expected for of_rank in rates)
    assert expected[0] > 0.0


def rates_of(rank: Rank, *, recipe: Recipe, batch: SequenceBatch, num_updates: int) -> list[float]:
    """The rate before any update, then what ``lr_scheduler_step`` returns after each."""
    engine = rank.engine(recipe)
    engine.set_loss_fn(TokenProbe())
    share = share_of(engine, batch, split=WHOLE)
    return [engine.current_lr, *(update_once(engine, [share]).next_lr for _ in range(num_updates))]


def test_the_scheduled_rate_is_the_one_that_is_used(subject: Subject, reference: Reference) -> None:
    # Without decay, and with betas 0 and an eps far below the largest gradients, an update moves those weights by lr * sign(gradient).
    signs = OptimizerSpec(lr=0.4, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0, clip_grad_norm=None)
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=signs, schedule=ScheduleSpec(warmup_steps=4))
    batches = [reference.batch(seed=seed) for seed in range(3)]
    updates = subject.run(measure_updates, recipe=recipe, objective=TokenProbe(), batches=batches)[
        0
    ]
    for step, (before, after) in enumerate(pairwise(updates), start=1):
        moved = max(
            float((after.masters[n] - before.masters[n]).abs().max()) for n in after.masters
        )
        assert_close(
            moved, 0.4 * (step + 1) / 4, UPDATE, what=f"largest movement of update {step + 1}"
        )


def test_all_masked_mini_batch_updates_nothing(subject: Subject, reference: Reference) -> None:
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS, schedule=FALLING)
    batches = [
        reference.batch(),
        without_training(reference.batch()),
        without_training(reference.batch(seed=1)),
    ]
    for of_rank in subject.run(
        measure_updates, recipe=recipe, objective=TokenProbe(), batches=batches, split=TWO
    ):
        trained, *masked = of_rank
        for update in masked:
            assert update.report.outcome == "nothing_trained"
            assert update.grad_norm == 0.0
            assert not update.returns_outputs or merged([update])["loss"] == 0.0
            assert update.next_lr == trained.next_lr
            assert_same_state(update.state, trained.state)


def test_nonfinite_gradient_skips_on_every_rank(subject: Subject, reference: Reference) -> None:
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS, schedule=FALLING)
    good = reference.batch()
    # One trained token of one sample, so of one rank.
    advantages = good.columns["advantages"].clone()
    advantages[int(good.loss_mask.nonzero()[0])] = math.inf
    updates = subject.run(
        measure_updates,
        recipe=recipe,
        objective=TokenProbe(),
        batches=[good, good.with_columns({"advantages": advantages}), good],
        split=WHOLE,
    )
    rates = [learning_rate(step, peak=TRAINS.lr, spec=FALLING) for step in range(3)]
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


def test_too_many_skips_in_a_row_stop_the_run(subject: Subject, reference: Reference) -> None:
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=replace(TRAINS, max_consecutive_skips=2))
    batch = reference.batch()
    bad = batch.with_columns({"advantages": torch.full_like(batch.columns["advantages"], math.nan)})
    assert (
        subject.run(skip_until_refused, recipe=recipe, good=batch, bad=bad)
        == [3] * subject.world_size
    )


def skip_until_refused(
    rank: Rank, *, recipe: Recipe, good: SequenceBatch, bad: SequenceBatch
) -> int:
    """Two skips, a good update that forgives them, then skips until the engine stops; how many those were."""
    engine = rank.engine(recipe)
    engine.set_loss_fn(TokenProbe())
    for batch in (bad, bad, good):
        update_once(engine, [share_of(engine, batch, split=WHOLE)])
    for count in range(1, 10):
        try:
            update_once(engine, [share_of(engine, bad, split=WHOLE)])
        except EngineStateError:
            assert engine.num_nonfinite_updates == 2 + count, (
                f"counted {engine.num_nonfinite_updates}"
            )
            return count
    raise AssertionError("nine skips in a row, and the engine went on")


def test_zeroed_gradients_do_not_come_back(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    expected = reference.update(recipe, TokenProbe(), batch)
    update = subject.run(
        update_after_a_dropped_one, recipe=recipe, batch=batch, dropped=reference.batch(seed=1)
    )[0]
    assert_all_close(update.gradients, expected.gradients, UPDATE, what="gradient")


def update_after_a_dropped_one(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch, dropped: SequenceBatch
) -> Update:
    """Gradients of one mini-batch are dropped, local ones and reduced ones; then another one is trained."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    for is_final in (False, True):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_batch(
                share_of(engine, dropped, split=WHOLE), forward_only=False, final=is_final
            )
    return update_once(engine, [share_of(engine, batch, split=WHOLE)])


def test_leaving_train_mode_keeps_gradients(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    expected = reference.update(recipe, TokenProbe(), batch)
    for is_final in (True, False):
        gradients = subject.run(
            gradients_after_a_pause, recipe=recipe, batch=batch, is_final=is_final
        )[0]
        assert_all_close(gradients, expected.gradients, UPDATE, what="gradient")


def gradients_after_a_pause(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch, is_final: bool
) -> dict[str, Tensor]:
    """Backward, leave, evaluate something, then step."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    share = share_of(engine, batch, split=WHOLE)
    with engine.train_mode():
        engine.forward_backward_batch(share, forward_only=False, final=is_final)
    with engine.eval_mode():
        engine.forward_backward_batch(share, forward_only=True)
    engine.optimizer_step()
    return {name: state.first_moment for name, state in state_of(engine).items()}
