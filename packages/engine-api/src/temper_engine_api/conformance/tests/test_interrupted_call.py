"""Conformance tests of exceptions outside of training calls: in a mode, move, save, load, build.

If one rank raises, every other one names it and its message within 10 s. If all raise, the engine
continues, but not with incomplete gradients or weights.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

import pytest

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    THREE_MICRO_BATCHES,
    Update,
    collect_weights,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import assert_same_state
from temper_engine_api.conformance.inputs.failing_probe import InjectedError
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.distributed import rank_failures
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import ConfigError, EngineStateError, RankFailedError
from temper_engine_api.topology import Topology
from temper_engine_api.weights import NamedWeight

REPORT_LIMIT_S = 10.0
"""Time within which the other ranks must report the failure of one."""
SHORT_AGREEMENT_S = 1.0
"""AGREEMENT_S of tests in which the other ranks do not raise: the failed one need not wait."""
MESSAGE = "injected outside of a call"
BuildFailure = Literal["missing_model", "after_building"]
Load = Literal["load_weights", "load_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """Exceptions of a rank after a failure."""

    error: str
    """Message of its first exception."""
    time_s: float
    """Time of this exception in seconds since 1970."""
    failed_s: float = 0.0
    """Time of the failure on the rank that caused it; 0 on others."""
    later_error: str = ""
    """Message of a later call."""


def assert_reported(outcomes: list[RankOutcome], *, message: str) -> None:
    """Check that each rank named the failed one, which is the last, in time."""
    culprit = len(outcomes) - 1
    failed_s = outcomes[culprit].failed_s
    assert failed_s, "the last rank did not fail"
    for rank, outcome in enumerate(outcomes):
        assert message in outcome.error, f"rank {rank} hides the failure: {outcome.error}"
        waited_s = outcome.time_s - failed_s
        assert waited_s < REPORT_LIMIT_S, f"rank {rank} raised {waited_s:.1f} s after the failure"
        if rank != culprit:
            assert f"rank {culprit} raised" in outcome.error, (
                f"rank {rank} does not name the failed rank: {outcome.error}"
            )


@pytest.mark.parametrize("mode", ["train_mode", "eval_mode"])
def test_other_ranks_report_a_rank_that_fails_in_a_mode(
    engine_under_test: EngineUnderTest, oracle: OracleCache, mode: str
) -> None:
    """If the body of a mode raises on one rank, between two calls, the others name it."""
    if engine_under_test.world_size == 1:
        return
    outcomes = engine_under_test.run(
        fail_in_mode,
        setup=oracle.make_setup(QWEN2_GROUPED),
        batch=oracle.get_batch(),
        mode=mode,
        culprit=engine_under_test.world_size - 1,
    )
    engine_under_test.rank_pool.replace_group()
    assert_reported(outcomes, message=MESSAGE)
    for outcome in outcomes:
        assert MESSAGE in outcome.later_error, f"a later call does not say: {outcome.later_error}"


def fail_in_mode(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, mode: str, culprit: int
) -> RankOutcome:
    """Raise on one rank between two calls in a mode."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    engine.optimizer_zero_grad()
    failed_s = 0.0

    def run_two_calls() -> None:
        nonlocal failed_s
        is_training = mode == "train_mode"
        with getattr(engine, mode)():
            engine.forward_backward_batch(
                local_batch, forward_only=not is_training, final=not is_training
            )
            if rank.index == culprit:
                failed_s = time.time()
                raise InjectedError(MESSAGE)
            engine.forward_backward_batch(local_batch, forward_only=not is_training)
        # At the latest this call waits for the failed rank.
        engine.gather_objects(rank.index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_failures, "AGREEMENT_S", SHORT_AGREEMENT_S)
        with pytest.raises((InjectedError, RankFailedError)) as caught:
            run_two_calls()
        time_s = time.time()
    with pytest.raises(RankFailedError) as later:
        engine.gather_objects(rank.index)
    return RankOutcome(
        error=str(caught.value), time_s=time_s, failed_s=failed_s, later_error=str(later.value)
    )


def test_other_ranks_report_a_rank_that_fails_to_move(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """If `to()`, which an engine implements itself, raises on one rank, the others name it."""
    if engine_under_test.world_size == 1:
        return
    outcomes = engine_under_test.run(
        fail_to_move,
        setup=oracle.make_setup(QWEN2_GROUPED),
        culprit=engine_under_test.world_size - 1,
    )
    engine_under_test.rank_pool.replace_group()
    assert_reported(outcomes, message="banana")


def fail_to_move(rank: Rank, *, setup: EngineSetup, culprit: int) -> RankOutcome:
    """Move to an unknown device on one rank, and to a known one on the others."""
    engine = rank.temporary_engine(setup)
    is_culprit, failed_s = rank.index == culprit, time.time()

    def move() -> None:
        engine.to("banana" if is_culprit else "device")  # type: ignore[arg-type]
        engine.gather_objects(rank.index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_failures, "AGREEMENT_S", SHORT_AGREEMENT_S)
        with pytest.raises((ConfigError, RankFailedError)) as caught:
            move()
    return RankOutcome(
        error=str(caught.value), time_s=time.time(), failed_s=failed_s if is_culprit else 0.0
    )


@pytest.mark.if_claimed(Capability.BACKGROUND_SAVE)
def test_other_ranks_report_a_rank_that_fails_in_a_background_save(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    """If a saving thread raises, the threads of the other ranks name it; the engine trains on."""
    if engine_under_test.world_size == 1:
        return
    outcomes = engine_under_test.run(
        fail_in_background_save,
        setup=oracle.make_setup(QWEN2_GROUPED),
        folder=tmp_path,
        culprit=engine_under_test.world_size - 1,
    )
    assert_reported(outcomes, message=MESSAGE)


def fail_in_background_save(
    rank: Rank, *, setup: EngineSetup, folder: Path, culprit: int
) -> RankOutcome:
    """Raise on one rank's saving thread, before a collective in which the others wait."""
    engine = rank.temporary_engine(setup)
    failed_s = 0.0

    def run_out_of_memory(item: object) -> NoReturn:
        nonlocal failed_s
        failed_s = time.time()
        raise MemoryError(MESSAGE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_failures, "AGREEMENT_S", SHORT_AGREEMENT_S)
        if rank.index == culprit:
            patch.setattr(engine, "_gather_in_background", run_out_of_memory)
        engine.save_checkpoint(str(folder), global_step=1, in_background=True)
        with pytest.raises((MemoryError, RankFailedError)) as caught:
            engine.finish_saving()
        time_s = time.time()
    engine.gather_objects(rank.index)
    return RankOutcome(error=str(caught.value), time_s=time_s, failed_s=failed_s)


@pytest.mark.parametrize("failure", ["missing_model", "after_building"])
def test_other_ranks_report_a_rank_that_fails_in_init_model(
    engine_under_test: EngineUnderTest, oracle: OracleCache, failure: BuildFailure
) -> None:
    """If `init_model()` raises on one rank, the others name it there, or in their next call."""
    if engine_under_test.world_size == 1:
        return
    outcomes = engine_under_test.run(
        fail_to_build,
        setup=oracle.make_setup(QWEN2_GROUPED),
        failure=failure,
        culprit=engine_under_test.world_size - 1,
    )
    engine_under_test.rank_pool.replace_group()
    assert_reported(outcomes, message=MESSAGE if failure == "after_building" else "no-such-model")


def fail_to_build(
    rank: Rank, *, setup: EngineSetup, failure: BuildFailure, culprit: int
) -> RankOutcome:
    """Build an engine; one rank has no model, or raises at the end."""
    is_culprit = rank.index == culprit
    if is_culprit and failure == "missing_model":
        setup = replace(setup, model_path=setup.model_path + "/no-such-model")
    engine = rank.construct_engine(setup)
    build, failed_s, is_built = engine._build, time.time(), False

    def build_or_raise() -> Topology:
        nonlocal failed_s, is_built
        topology = build()
        failed_s, is_built = time.time(), True
        if is_culprit and failure == "after_building":
            raise InjectedError(MESSAGE)
        return topology

    def start() -> None:
        engine.init_model()
        engine.gather_objects(rank.index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_failures, "AGREEMENT_S", SHORT_AGREEMENT_S)
        patch.setattr(engine, "_build", build_or_raise)
        with pytest.raises(Exception, match=r"") as caught:  # an engine raises its own types
            start()
    outcome = RankOutcome(
        error=str(caught.value), time_s=time.time(), failed_s=failed_s if is_culprit else 0.0
    )
    if is_built:
        engine.close()
    return outcome


def test_exception_between_the_calls_of_an_update_makes_it_incomplete(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """An exception that leaves `train_mode()` before the final call costs the update."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW), oracle.get_batch()
    for update, expected in engine_under_test.run(
        interrupt_between_calls, setup=setup, batch=batch
    ):
        assert update.grad_norm == expected.grad_norm
        assert_same_state(update.state, expected.state)


def interrupt_between_calls(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[Update, Update]:
    """Return the update after an interrupted one, and the same without it."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=THREE_MICRO_BATCHES)
    engine.optimizer_zero_grad()

    def stop_before_the_final_call() -> NoReturn:
        with engine.train_mode():
            engine.forward_backward_batch(local_batch, forward_only=False, final=False)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_before_the_final_call()
    with pytest.raises(EngineStateError, match="optimizer_zero_grad"):
        engine.optimizer_step()
    engine.optimizer_zero_grad()
    update = run_update(engine, [local_batch], zeroes_gradients=False)
    other = rank.temporary_engine(setup)
    other.set_loss_fn(ClippedPpoProbe())
    return update, run_update(other, [rank_slice(other, batch, split=THREE_MICRO_BATCHES)])


@pytest.mark.parametrize("call", ["load_weights", "load_state"])
def test_interrupted_load_is_completed_before_training(
    engine_under_test: EngineUnderTest, oracle: OracleCache, call: Load
) -> None:
    """After a load that raised halfway, training and saving raise until a load succeeds."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW), oracle.get_batch()
    for update, expected in engine_under_test.run(
        interrupt_load, setup=setup, batch=batch, call=call
    ):
        assert update.grad_norm == expected.grad_norm
        assert_same_state(update.state, expected.state)


def interrupt_load(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, call: Load
) -> tuple[Update, Update]:
    """Return two updates: after an interrupted and then a complete load, and after a complete load.

    The second engine loads, too: under bf16 compute, weights are exported in bf16 and change the
    float32 parameters.
    """
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    with engine.export_state() as states:
        tensors: list[object] = list(states)
    if call == "load_weights":
        tensors = [NamedWeight(*each) for each in collect_weights(engine).items()]
    load: Callable[[Iterable[object]], None] = getattr(engine, call)
    with pytest.raises(InjectedError):
        load(stop_at_second(tensors))
    engine.optimizer_zero_grad()
    with pytest.raises(EngineStateError, match=rf"{call}\(\)"):
        train(engine, rank_slice(engine, batch, split=ONE_MICRO_BATCH))
    with pytest.raises(EngineStateError, match=rf"{call}\(\)"):
        engine.write_part("not-written")
    load(iter(tensors))
    update = run_update(engine, [local_batch])
    other = rank.temporary_engine(setup)
    other.set_loss_fn(ClippedPpoProbe())
    getattr(other, call)(iter(tensors))
    return update, run_update(other, [rank_slice(other, batch, split=ONE_MICRO_BATCH)])


def stop_at_second(tensors: Iterable[object]) -> Iterator[object]:
    """Yield the first tensor, then raise."""
    for index, tensor in enumerate(tensors):
        if index == 1:
            raise InjectedError("injected in the stream")
        yield tensor


def train(engine: BaseEngine, local_batch: object) -> None:
    """Run a training call."""
    with engine.train_mode():
        engine.forward_backward_batch(local_batch, forward_only=False)  # type: ignore[arg-type]
