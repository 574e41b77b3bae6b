"""Conformance tests of call order: invalid orders raise and leave the engine usable."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    Update,
    fail_during_training,
    measure_update,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    assert_all_close,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.failing_probe import InjectedError
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.distributed.rank_connections import list_groups
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import ConfigError, EngineStateError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.weights import NamedWeight


def test_invalid_call_order_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Calls out of order raise EngineStateError, and the engine still works afterwards."""
    engine_under_test.run(
        call_out_of_order, setup=oracle.make_setup(QWEN2_GROUPED), batch=oracle.get_batch()
    )


def call_out_of_order(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> None:
    """Try each invalid call, then run an update."""
    engine = rank.temporary_engine(setup)
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    with engine.train_mode(), pytest.raises(EngineStateError, match="Objective"):
        engine.forward_backward_batch(local_batch, forward_only=False)
    engine.set_loss_fn(ClippedPpoProbe())
    with pytest.raises(EngineStateError, match="train_mode"):
        engine.forward_backward_batch(local_batch, forward_only=False)
    with pytest.raises(EngineStateError, match="eval_mode"):
        engine.forward_backward_batch(local_batch, forward_only=True)
    with engine.eval_mode(), pytest.raises(EngineStateError, match="train_mode"):
        engine.forward_backward_batch(local_batch, forward_only=False)
    with (
        engine.eval_mode(),
        pytest.raises(EngineStateError, match="exit the outer context"),
        engine.train_mode(),
    ):
        pass
    with (
        engine.train_mode(),
        torch.inference_mode(),
        pytest.raises(EngineStateError, match="inference_mode"),
    ):
        engine.forward_backward_batch(local_batch, forward_only=False)
    with engine.train_mode(), pytest.raises(EngineStateError, match="advantages"):
        engine.forward_backward_batch(replace(local_batch, columns={}), forward_only=False)
    with pytest.raises(EngineStateError, match="no gradients"):
        engine.optimizer_step()
    # None of the rejected calls may have left the engine in a mode or an update half done.
    assert run_update(engine, [local_batch]).report.outcome == "stepped"


def test_evaluation_in_inference_mode_does_not_disturb_training(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """An update has the oracle's gradient norm if the first pass was in `torch.inference_mode`.

    Tensors that an engine makes in its first pass, such as gathered parameters, could not be used
    in a backward pass.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch).grad_norm
    for norm in engine_under_test.run(norm_after_inference_mode, setup=setup, batch=batch):
        assert_close(norm, expected, LOGPROB, quantity="gradient norm")


def norm_after_inference_mode(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> float:
    """Evaluate a new engine in inference mode, then return the gradient norm of an update."""
    engine = rank.temporary_engine(setup)
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    with torch.inference_mode(), engine.eval_mode():
        engine.forward_backward_batch(local_batch, forward_only=True, outputs=[HeadOutput.LOGPROB])
    engine.set_loss_fn(ClippedPpoProbe())
    return run_update(engine, [local_batch]).grad_norm


def test_call_after_final_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """After a final backward call, further calls raise until gradients are zeroed."""
    engine_under_test.run(
        call_after_final, setup=oracle.make_setup(QWEN2_GROUPED), batch=oracle.get_batch()
    )


def call_after_final(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> None:
    """Call backward before and after the step without zeroing gradients."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    with engine.train_mode():
        engine.forward_backward_batch(local_batch, forward_only=False)
        # Try both values: an engine that checks only final calls would add to reduced gradients.
        for is_final in (True, False):
            with pytest.raises(EngineStateError, match="optimizer_zero_grad"):
                engine.forward_backward_batch(local_batch, forward_only=False, final=is_final)
    engine.optimizer_step()
    with engine.train_mode(), pytest.raises(EngineStateError, match="optimizer_zero_grad"):
        engine.forward_backward_batch(local_batch, forward_only=False)
    with pytest.raises(EngineStateError, match="no gradients"):
        engine.optimizer_step()


def test_step_without_gradients_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """`optimizer_step` after `optimizer_zero_grad` raises EngineStateError."""
    engine_under_test.run(
        step_after_zeroing, setup=oracle.make_setup(QWEN2_GROUPED), batch=oracle.get_batch()
    )


def step_after_zeroing(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> None:
    """Run backward, zero the gradients, then step."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    with engine.train_mode():
        engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH), forward_only=False
        )
    engine.optimizer_zero_grad()
    with pytest.raises(EngineStateError, match="no gradients"):
        engine.optimizer_step()


def test_engine_without_optimizer_only_evaluates(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """An engine without an optimizer evaluates; training raises EngineStateError."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED, optimizer=None), oracle.get_batch()
    expected = oracle.get_outputs(oracle.make_setup(QWEN2_GROUPED), batch, HeadOutput.LOGPROB)
    for column in engine_under_test.run(evaluate_frozen, setup=setup, batch=batch):
        assert_close(
            column,
            expected,
            LOGPROB,
            quantity="log-probs",
            batch=batch,
            num_ranks=engine_under_test.num_data_ranks,
        )


def evaluate_frozen(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> torch.Tensor:
    """Check that an engine without an optimizer refuses to train; return its log-probs."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    with engine.train_mode(), pytest.raises(EngineStateError, match="no optimizer"):
        engine.forward_backward_batch(local_batch, forward_only=False)
    with pytest.raises(EngineStateError, match="no optimizer"):
        engine.optimizer_step()
    assert engine.current_lr == 0.0
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            local_batch, forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    return engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids).columns[
        HeadOutput.LOGPROB
    ]


def test_modes_end_after_an_exception(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """An exception inside a mode leaves the mode, and the next update is right."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    gradients = engine_under_test.run(update_after_interruptions, setup=setup, batch=batch)[0]
    assert_all_close(gradients, expected.gradients, GRADIENT, quantity="gradient")


def update_after_interruptions(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> dict[str, torch.Tensor]:
    """Raise before and after a backward pass, then update; return the gradients."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    with pytest.raises(InjectedError), engine.eval_mode():
        raise InjectedError
    for is_final in (False, True):
        engine.optimizer_zero_grad()
        with pytest.raises(InjectedError):
            fail_during_training(engine, local_batch, is_final=is_final)
    return run_update(engine, [local_batch]).gradients


def test_engine_is_unusable_before_init_model(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Constructing an engine reads no file; using it before `init_model` raises."""
    engine_under_test.run(use_before_init, setup=oracle.make_setup(QWEN2_GROUPED))


def use_before_init(rank: Rank, *, setup: EngineSetup) -> None:
    """Use an engine before `init_model`, and construct engines with invalid arguments."""
    engine = rank.construct_engine(setup)
    with pytest.raises(EngineStateError, match="init_model"):
        _ = engine.topology
    with pytest.raises(EngineStateError, match="init_model"):
        engine.lr_scheduler_step()
    assert engine.num_schedule_steps == 0, "lr_scheduler_step() advanced the schedule"
    # Reading the path only in init_model lets a process construct an engine without the files.
    rank.construct_engine(replace(setup, model_path=setup.model_path + "-that-does-not-exist"))
    with pytest.raises(ConfigError, match=rank.engine_class.config_class.__name__):
        rank.engine_class("not a configuration")  # type: ignore[arg-type]  # the wrong type is what is tested


def test_second_init_model_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """`init_model` runs once: a second call raises and leaves the engine usable."""
    engine_under_test.run(
        init_twice, setup=oracle.make_setup(QWEN2_GROUPED), batch=oracle.get_batch()
    )


def init_twice(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> None:
    """Call `init_model` again before an update and after `close`."""
    engine: BaseEngine = rank.construct_engine(setup)
    engine.init_model()
    with pytest.raises(EngineStateError, match="construct another"):
        engine.init_model()
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    assert run_update(engine, [local_batch]).report.outcome == "stepped"
    engine.close()
    with pytest.raises(EngineStateError, match="construct another"):
        engine.init_model()


def test_move_to_an_unknown_device_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Names other than "cpu" and "device" are refused by `to`."""
    engine_under_test.run(move_to_unknown, setup=oracle.make_setup(QWEN2_GROUPED))


def move_to_unknown(rank: Rank, *, setup: EngineSetup) -> None:
    """Pass an unknown name, as a user might who expects torch device names."""
    with pytest.raises(ConfigError, match="cuda:0"):
        rank.cached_engine(setup).to("cuda:0")  # type: ignore[arg-type]  # the wrong value is what is tested


def test_weight_stream_does_not_mix_two_versions(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    """A stream of weights or state that is read on after an update or a load raises."""
    engine_under_test.run(
        change_within_streams,
        setup=oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW),
        batch=oracle.get_batch(),
        folder=str(tmp_path),
    )


def change_within_streams(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, folder: str
) -> None:
    """Change the weights within a stream, with each kind of stream and each change."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    step = engine.save_checkpoint(folder, global_step=0)
    with engine.export_weights() as stream:
        weights = [NamedWeight(each.name, each.tensor.clone()) for each in stream]
    changes: dict[str, Callable[[], object]] = {
        "optimizer_step": lambda: run_update(engine, [local_batch]),
        "load_weights": lambda: engine.load_weights(weights),
        "load_checkpoint": lambda: engine.load_checkpoint(step),
    }
    has_state = Capability.PORTABLE_STATE in engine.capabilities
    if has_state:
        state = list(engine.export_state())
        changes["load_state"] = lambda: engine.load_state(state)
    for name, change in changes.items():
        with engine.export_weights() as stream:
            change_within(stream, change, names=("export_weights", name))
        if has_state:
            change_within(engine.export_state(), change, names=("export_state", name))


def change_within(
    stream: Iterator[object], change: Callable[[], object], *, names: tuple[str, str]
) -> None:
    """Read one item, change the weights, and check that the next one is refused."""
    next(stream)
    change()
    message = "no error"
    try:
        next(stream)
    except EngineStateError as error:
        message = str(error)
    assert f"updated while {names[0]}" in message, (
        f"{names[0]}() must refuse to continue with other weights after {names[1]}(): {message}"
    )


@pytest.mark.bitwise
def test_engine_after_a_closed_engine_gives_the_same_update(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A new engine shares no state with a closed one: the same update gives the same bits."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW), oracle.get_batch()
    for first, second in engine_under_test.run(
        update_closed_and_new_engine, setup=setup, batch=batch
    ):
        assert_same_state(second.state, first.state)
        assert second.grad_norm == first.grad_norm


def update_closed_and_new_engine(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> list[Update]:
    """Build, update and close two engines; return both updates."""
    updates = []
    for _ in range(2):
        engine: BaseEngine = rank.construct_engine(setup)
        engine.init_model()
        engine.set_loss_fn(ClippedPpoProbe())
        updates.append(run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)]))
        engine.close()
        # The owner of an engine closes it again if init_model() did so after a failure.
        engine.close()
    return updates


def test_close_destroys_the_groups_of_the_engine(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """`close` destroys the process groups that the engine created, and no other one."""
    for num_before, num_open, num_after in engine_under_test.run(
        count_groups, setup=oracle.make_setup(QWEN2_GROUPED)
    ):
        assert num_after == num_before, (
            f"{num_before} process groups existed before the engine, {num_open} next to it and "
            f"{num_after} after close(): destroy those that your engine created, and only those"
        )


def count_groups(rank: Rank, *, setup: EngineSetup) -> tuple[int, int, int]:
    """Return the number of process groups before, next to and after an engine."""
    # Engines in a process may share groups, which the last one destroys.
    rank.close_all()
    num_before = len(list_groups())
    engine: BaseEngine = rank.construct_engine(setup)
    engine.init_model()
    num_open = len(list_groups())
    engine.close()
    return num_before, num_open, len(list_groups())


def test_reading_gradients_changes_no_weight(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The kit's gradient reading (AdamW with lr 0) leaves weights bitwise unchanged.

    Engines are cached between tests on that condition.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    masters = oracle.get_update(setup, ClippedPpoProbe(), batch).masters
    update = engine_under_test.run(
        measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch
    )[0]
    assert_all_close(update.masters, masters, LOGPROB, quantity="weights")
    # Equal and not close: engines are cached, so small changes would add up over the tests.
    assert all(torch.equal(update.masters[name], master) for name, master in masters.items())
