"""Conformance tests of offload: moving tensors between devices changes no number."""

from pathlib import Path

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    Update,
    collect_state,
    collect_weights,
    fail_during_training,
    measure_outputs,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.rfc_loop import (
    mean_cost,
    postprocess_fn,
    preprocess_fn,
    rfc_loop,
)
from temper_engine_api.conformance.harness.tolerances import (
    LOGPROB,
    assert_all_equal,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.failing_probe import InjectedError
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import OffloadSpec
from temper_engine_api.weights import TrainingState

OFFLOADS = (
    OffloadSpec(parameters=True),
    OffloadSpec(optimizer=True),
    OffloadSpec(parameters=True, optimizer=True),
)
OFFLOAD_ALL = OFFLOADS[-1]
every_offload = pytest.mark.parametrize(
    "offload",
    [
        pytest.param(spec, id=name, marks=pytest.mark.if_claimed(Capability.OFFLOAD))
        for spec, name in zip(OFFLOADS, ("parameters", "optimizer", "everything"), strict=True)
    ],
)


@pytest.mark.bitwise
@every_offload
def test_offloading_changes_no_number(
    engine_under_test: EngineUnderTest, oracle: OracleCache, offload: OffloadSpec
) -> None:
    """Training with offloaded parameters or optimizer gives bitwise equal state and weights."""
    batches = [oracle.get_batch(seed=seed) for seed in range(2)]
    not_offloaded = engine_under_test.run(
        evaluate_train_export,
        setup=oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW),
        batches=batches,
    )
    offloaded = engine_under_test.run(
        evaluate_train_export,
        setup=oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, offload=offload),
        batches=batches,
    )
    for (update, weights), (expected, expected_weights) in zip(
        offloaded, not_offloaded, strict=True
    ):
        assert_same_state(update.state, expected.state)
        assert update.grad_norm == expected.grad_norm
        assert_all_equal(weights, expected_weights, quantity="weights")


def evaluate_train_export(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]
) -> tuple[Update, dict[str, torch.Tensor]]:
    """Evaluate, train in two calls with a pause between them, then export."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    for batch in batches:
        local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
        with engine.eval_mode():
            engine.forward_backward_batch(
                local_batch, forward_only=True, outputs=[HeadOutput.LOGPROB]
            )
        engine.optimizer_zero_grad()
        # Gradients must survive the pause between calls, when they may be offloaded.
        for is_final in (False, True):
            with engine.train_mode():
                engine.forward_backward_batch(local_batch, forward_only=False, final=is_final)
        engine.optimizer_step()
    return run_update(
        engine, [rank_slice(engine, batches[0], split=ONE_MICRO_BATCH)]
    ), collect_weights(engine)


@pytest.mark.if_claimed(Capability.OFFLOAD)
def test_rfc_loop_runs_with_everything_offloaded(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The RFC's loop gives the same losses, norms and state with everything offloaded."""
    batches = [oracle.get_batch(seed=seed) for seed in range(3)]
    not_offloaded, offloaded = (
        engine_under_test.run(
            rfc_loop,
            setup=oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, offload=offload),
            batches=batches,
            loss_fn=mean_cost,
            preprocess_fn=preprocess_fn,
            postprocess_fn=postprocess_fn,
        )
        for offload in (OffloadSpec(), OFFLOAD_ALL)
    )
    for result, expected in zip(offloaded, not_offloaded, strict=True):
        assert (result.losses, result.grad_norms) == (expected.losses, expected.grad_norms)
        assert_same_state(result.state, expected.state)


@pytest.mark.if_claimed(Capability.OFFLOAD)
def test_offload_is_restored_after_an_exception(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """After an exception inside either mode, an offloaded engine trains as if none happened."""
    offloaded = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, offload=OFFLOAD_ALL)
    batch = oracle.get_batch()
    for interrupted, undisturbed in engine_under_test.run(
        update_with_and_without_interruption, setup=offloaded, batch=batch
    ):
        assert_same_state(interrupted.state, undisturbed.state)


def update_with_and_without_interruption(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[Update, Update]:
    """Interrupt the first engine in both modes, then update both engines."""
    interrupted, undisturbed = rank.temporary_engine(setup), rank.temporary_engine(setup)
    for engine in (interrupted, undisturbed):
        engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(interrupted, batch, split=ONE_MICRO_BATCH)
    with pytest.raises(InjectedError), interrupted.eval_mode():
        raise InjectedError
    with pytest.raises(InjectedError):
        fail_during_training(interrupted, local_batch, is_final=False)
    return run_update(interrupted, [local_batch]), run_update(undisturbed, [local_batch])


@pytest.mark.if_claimed(Capability.OFFLOAD)
def test_saving_offloaded_state_does_not_change_training(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    """Saving an offloaded engine writes its state exactly and does not disturb training."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, offload=OFFLOAD_ALL)
    for saved, loaded, continued, resumed in engine_under_test.run(
        save_offloaded, setup=setup, batch=oracle.get_batch(), folder=tmp_path
    ):
        assert_same_state(loaded, saved)
        assert_same_state(resumed, continued)


def save_offloaded(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, folder: Path
) -> tuple[dict[str, TrainingState], ...]:
    """Return the state when saved and loaded, and after one more update of either engine."""
    first, second = rank.temporary_engine(setup), rank.temporary_engine(setup)
    for engine in (first, second):
        engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(first, batch, split=ONE_MICRO_BATCH)
    saved = dict(run_update(first, [local_batch]).state)
    first.save_checkpoint(str(folder), global_step=1)
    second.load_checkpoint(str(folder))
    loaded = collect_state(second)
    return (
        saved,
        loaded,
        dict(run_update(first, [local_batch]).state),
        dict(run_update(second, [local_batch]).state),
    )


@pytest.mark.bitwise
def test_manual_moves_change_no_number(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Moving the engine with `to` changes no number, also when it is not moved back."""
    # Use ADAMW, because moments that are lost in a move change the second update.
    setup, batch = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW), oracle.get_batch()
    for moved, unmoved in engine_under_test.run(update_after_moves, setup=setup, batch=batch):
        assert_same_state(moved.state, unmoved.state)
        assert moved.grad_norm == unmoved.grad_norm


def update_after_moves(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[Update, Update]:
    """Update two engines twice; move the first in between, and leave its optimizer on the CPU."""
    moved, unmoved = rank.temporary_engine(setup), rank.temporary_engine(setup)
    for engine in (moved, unmoved):
        engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(moved, batch, split=ONE_MICRO_BATCH)
    for engine in (moved, unmoved):
        run_update(engine, [local_batch])
    moved.to("cpu")
    moved.to("device", optimizer=False)
    moved.to("device")
    moved.to("cpu", model=False)
    return run_update(moved, [local_batch]), run_update(unmoved, [local_batch])


def test_moving_between_backward_and_step_keeps_gradients(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Moving the engine to the host and back after the backward pass keeps the gradient."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    for norm in engine_under_test.run(norm_with_a_move_between, setup=setup, batch=batch):
        assert_close(norm, expected.grad_norm, LOGPROB, quantity="gradient norm")


def norm_with_a_move_between(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> float:
    """Run backward, move to the host and back, step; return the gradient norm."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    with engine.train_mode():
        engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH), forward_only=False
        )
    engine.to("cpu")
    engine.to("device")
    return engine.optimizer_step()


@pytest.mark.bitwise
@pytest.mark.if_claimed(Capability.OFFLOAD)
def test_offloaded_weights_give_the_same_logprobs(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Log-probs are bitwise equal with and without offload."""
    batch = oracle.get_batch()
    not_offloaded, offloaded = (
        engine_under_test.run(
            measure_outputs,
            setup=oracle.make_setup(QWEN2_GROUPED, offload=offload),
            batch=batch,
            requested_outputs=[HeadOutput.LOGPROB],
        )[0].columns[HeadOutput.LOGPROB]
        for offload in (OffloadSpec(), OFFLOAD_ALL)
    )
    assert torch.equal(not_offloaded, offloaded)
