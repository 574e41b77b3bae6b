"""Laws: where tensors live between contexts changes no number."""

from pathlib import Path

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.measurements import (
    WHOLE,
    Interrupted,
    Update,
    interrupted_training,
    measure_outputs,
    share_of,
    state_of,
    update_once,
    weights_of,
)
from temper_engine_api.conformance.harness.rank import TRAINS, Rank, Recipe
from temper_engine_api.conformance.harness.rfc_loop import (
    mean_cost,
    postprocess_fn,
    preprocess_fn,
    rfc_loop,
)
from temper_engine_api.conformance.harness.tolerances import assert_all_equal, assert_same_state
from temper_engine_api.conformance.inputs.probes import TokenProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import Reference
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import ResidencySpec
from temper_engine_api.weights import TrainingState

OFFLOADS = (
    ResidencySpec(offload_parameters=True),
    ResidencySpec(offload_optimizer=True),
    ResidencySpec(offload_parameters=True, offload_optimizer=True),
)
EVERYTHING = OFFLOADS[-1]
every_offload = pytest.mark.parametrize(
    "residency",
    [
        pytest.param(spec, id=name, marks=pytest.mark.claims(Capability.OFFLOAD))
        for spec, name in zip(OFFLOADS, ("parameters", "optimizer", "everything"), strict=True)
    ],
)


@pytest.mark.bitwise
@every_offload
def test_offloading_changes_no_number(
    subject: Subject, reference: Reference, residency: ResidencySpec
) -> None:
    batches = [reference.batch(seed=seed) for seed in range(2)]
    stays = subject.run(
        everyday, recipe=reference.recipe(QWEN2_GROUPED, optimizer=TRAINS), batches=batches
    )
    leaves = subject.run(
        everyday,
        recipe=reference.recipe(QWEN2_GROUPED, optimizer=TRAINS, residency=residency),
        batches=batches,
    )
    for (update, weights), (want, want_weights) in zip(leaves, stays, strict=True):
        assert_same_state(update.state, want.state)
        assert update.grad_norm == want.grad_norm
        assert_all_equal(weights, want_weights, what="weights")


def everyday(
    rank: Rank, *, recipe: Recipe, batches: list[SequenceBatch]
) -> tuple[Update, dict[str, torch.Tensor]]:
    """Evaluate, train in two calls with a pause between them, export."""
    engine = rank.engine(recipe)
    engine.set_loss_fn(TokenProbe())
    for batch in batches:
        share = share_of(engine, batch, split=WHOLE)
        with engine.eval_mode():
            engine.forward_backward_batch(share, forward_only=True, outputs=[HeadOutput.LOGPROB])
        engine.optimizer_zero_grad()
        for is_final in (False, True):
            with engine.train_mode():
                engine.forward_backward_batch(share, forward_only=False, final=is_final)
        engine.optimizer_step()
    return update_once(engine, [share_of(engine, batches[0], split=WHOLE)]), weights_of(engine)


@pytest.mark.claims(Capability.OFFLOAD)
def test_rfc_loop_runs_with_everything_offloaded(subject: Subject, reference: Reference) -> None:
    batches = [reference.batch(seed=seed) for seed in range(3)]
    stays, leaves = (
        subject.run(
            rfc_loop,
            recipe=reference.recipe(QWEN2_GROUPED, optimizer=TRAINS, residency=residency),
            batches=batches,
            loss_fn=mean_cost,
            preprocess_fn=preprocess_fn,
            postprocess_fn=postprocess_fn,
        )
        for residency in (ResidencySpec(), EVERYTHING)
    )
    for result, want in zip(leaves, stays, strict=True):
        assert (result.losses, result.grad_norms) == (want.losses, want.grad_norms)
        assert_same_state(result.state, want.state)


@pytest.mark.claims(Capability.OFFLOAD)
def test_residency_is_restored_when_a_body_raises(subject: Subject, reference: Reference) -> None:
    offloaded = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS, residency=EVERYTHING)
    batch = reference.batch()
    for interrupted, calm in subject.run(
        update_with_and_without_interruption, recipe=offloaded, batch=batch
    ):
        assert_same_state(interrupted.state, calm.state)


def update_with_and_without_interruption(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch
) -> tuple[Update, Update]:
    """The first engine was interrupted in both modes before its update."""
    interrupted, calm = rank.engine(recipe), rank.engine(recipe)
    for engine in (interrupted, calm):
        engine.set_loss_fn(TokenProbe())
    share = share_of(interrupted, batch, split=WHOLE)
    with pytest.raises(Interrupted), interrupted.eval_mode():
        raise Interrupted
    with pytest.raises(Interrupted):
        interrupted_training(interrupted, share, is_final=False)
    return update_once(interrupted, [share]), update_once(calm, [share])


@pytest.mark.claims(Capability.OFFLOAD)
def test_saving_offloaded_state_leaves_training_as_it_was(
    subject: Subject, reference: Reference, tmp_path: Path
) -> None:
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS, residency=EVERYTHING)
    for saved, loaded, continued, resumed in subject.run(
        save_offloaded, recipe=recipe, batch=reference.batch(), folder=tmp_path
    ):
        assert_same_state(loaded, saved)
        assert_same_state(resumed, continued)


def save_offloaded(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch, folder: Path
) -> tuple[dict[str, TrainingState], ...]:
    """State when saved and when loaded, then after one more update in either engine."""
    first, second = rank.engine(recipe), rank.engine(recipe)
    for engine in (first, second):
        engine.set_loss_fn(TokenProbe())
    share = share_of(first, batch, split=WHOLE)
    saved = dict(update_once(first, [share]).state)
    first.save_checkpoint(str(folder), global_step=1)
    second.load_checkpoint(str(folder))
    loaded = state_of(second)
    return (
        saved,
        loaded,
        dict(update_once(first, [share]).state),
        dict(update_once(second, [share]).state),
    )


@pytest.mark.bitwise
def test_moving_by_hand_changes_no_number(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS), reference.batch()
    for moved, still in subject.run(update_after_moves, recipe=recipe, batch=batch):
        assert_same_state(moved.state, still.state)
        assert moved.grad_norm == still.grad_norm


def update_after_moves(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch
) -> tuple[Update, Update]:
    """Two updates each; the first engine is moved away and back between them, and once more without being brought back."""
    moved, still = rank.engine(recipe), rank.engine(recipe)
    for engine in (moved, still):
        engine.set_loss_fn(TokenProbe())
    share = share_of(moved, batch, split=WHOLE)
    for engine in (moved, still):
        update_once(engine, [share])
    moved.to("cpu")
    moved.to("device", optimizer=False)
    moved.to("device")
    moved.to("cpu", model=False)
    return update_once(moved, [share]), update_once(still, [share])


@pytest.mark.bitwise
@pytest.mark.claims(Capability.OFFLOAD)
def test_offloaded_weights_answer_as_well(subject: Subject, reference: Reference) -> None:
    batch = reference.batch()
    stays, leaves = (
        subject.run(
            measure_outputs,
            recipe=reference.recipe(QWEN2_GROUPED, residency=residency),
            batch=batch,
            requested_outputs=[HeadOutput.LOGPROB],
        )[0].columns[HeadOutput.LOGPROB]
        for residency in (ResidencySpec(), EVERYTHING)
    )
    assert torch.equal(stays, leaves)
