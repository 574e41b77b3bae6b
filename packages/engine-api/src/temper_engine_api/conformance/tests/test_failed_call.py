"""Conformance tests for exceptions in calls: the update is lost, later updates do not change.

When all ranks raise, the engine continues after `optimizer_zero_grad`. When only some ranks raise,
the process group is broken: every rank reports the failed rank, and the engine rejects later calls.
With pipeline stages, the group always breaks, because only the last stage computes losses.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn, TypeVar, get_args

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    THREE_MICRO_BATCHES,
    Update,
    collect_state,
    collect_weights,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import assert_same_state
from temper_engine_api.conformance.inputs.failing_probe import (
    FailingProbe,
    InjectedError,
    Kind,
    describe,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.distributed import rank_failures
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import EngineStateError, RankFailedError
from temper_engine_api.weights import NamedWeight

EXCEPTIONS = (InjectedError, KeyboardInterrupt, torch.OutOfMemoryError, RankFailedError)
"""Exceptions that a call with a FailingProbe may raise."""
Item = TypeVar("Item")
TrainingCall = Literal["forward_backward_batch", "forward_backward_step"]
CALLS: tuple[TrainingCall, ...] = get_args(TrainingCall)
LAST_METHODS: Mapping[TrainingCall, str] = {
    "forward_backward_batch": "_collect_metrics",
    "forward_backward_step": "_sum_over_data_parallel",
}
"""The last engine method that each training call runs."""
REPORT_LIMIT_S = 10.0
"""Time limit for the other ranks to report a failure."""
SHORT_AGREEMENT_S = 1.0
"""AGREEMENT_S in tests where the other ranks do not raise, to make them faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A failed call on one rank."""

    error: str
    """Type and message."""
    time_s: float
    """Time of the exception, in seconds since 1970."""
    injected_s: tuple[float, ...] = ()
    """Times at which the probe failed on this rank."""
    later_errors: tuple[str, ...] = ()
    """Messages of the RankFailedErrors that later calls raised."""


@dataclass(slots=True, kw_only=True)
class Recovery:
    """Updates of an engine after failed calls, or the failure that broke its group."""

    num_stages: int
    updates: list[Update] = field(default_factory=list)
    broken: FailedCall | None = None


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("call", "kinds"),
    [
        # In passes with little data, some parameters have their gradient when a layer raises, and
        # others not yet.
        ("forward_backward_batch", ("loss", "memory_in_layer")),
        ("forward_backward_step", ("interrupt", "memory_in_backward")),
    ],
    ids=CALLS,
)
def test_updates_after_a_failed_call_equal_those_of_a_fresh_run(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    call: TrainingCall,
    kinds: tuple[Kind, ...],
) -> None:
    """An exception at the first, second or third micro-batch changes no bit of later updates."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    batches = [oracle.get_batch(seed=seed) for seed in range(3)]
    expected: list[list[Update]] = []
    for kind in kinds:
        recoveries = engine_under_test.run(
            update_after_failures, setup=setup, batches=batches, kind=kind, call=call
        )
        if any(recovery.broken for recovery in recoveries):
            engine_under_test.rank_pool.replace_group()
            assert_has_stages(recoveries)
            continue
        expected = expected or engine_under_test.run(
            update_without_failures, setup=setup, batches=batches
        )
        for recovery, expected_updates in zip(recoveries, expected, strict=True):
            assert_same_updates(recovery.updates, expected_updates, kind=kind)


def assert_same_updates(updates: list[Update], expected: list[Update], *, kind: Kind) -> None:
    """Compare updates after failed calls with those of a run without failures, bit for bit."""
    for update, expected_update in zip(updates, expected, strict=True):
        norm, expected_norm = update.grad_norm, expected_update.grad_norm
        assert norm == expected_norm, (
            f"the gradient norm is {norm} after a failed call ({kind}), but {expected_norm} "
            "without one: drop in _discard_update() what the failed call left behind, such as the "
            "gradients of its earlier micro-batches"
        )
        assert update.next_lr == expected_update.next_lr
        assert_same_state(update.state, expected_update.state)


def update_after_failures(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], kind: Kind, call: TrainingCall
) -> Recovery:
    """Run updates, each after a call that fails at a different micro-batch of other data."""
    engine = rank.temporary_engine(setup)
    recovery = Recovery(num_stages=engine.topology.pp.size)
    for position, batch in enumerate(batches):
        if call == "forward_backward_batch":
            others = [rank_slice(engine, batches[position - 1], split=THREE_MICRO_BATCHES)]
        else:  # one micro-batch in each call
            others = [rank_slice(engine, other, split=ONE_MICRO_BATCH) for other in batches]
        failed = fail(engine, *others, probe=FailingProbe(fails_at=position, kind=kind), call=call)
        later = collect_later_errors(engine, batches[0])
        if later:
            recovery.broken = replace(failed, later_errors=later)
            return recovery
        engine.set_loss_fn(ClippedPpoProbe())
        # Don't zero gradients again: once must be enough.
        recovery.updates.append(
            run_update(
                engine,
                [rank_slice(engine, batch, split=THREE_MICRO_BATCHES)],
                zeroes_gradients=False,
            )
        )
    return recovery


def update_without_failures(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]
) -> list[Update]:
    """Run the same updates in a new engine."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    return [
        run_update(engine, [rank_slice(engine, batch, split=THREE_MICRO_BATCHES)])
        for batch in batches
    ]


def assert_has_stages(recoveries: list[Recovery]) -> None:
    """Check for pipeline stages. Without them every rank raises, and the group must not break."""
    assert all(recovery.num_stages > 1 for recovery in recoveries), (
        "every rank raised, so the engine must be usable afterwards, but its group is broken: "
        f"{[recovery.broken for recovery in recoveries]}"
    )


def fail(
    engine: BaseEngine,
    *local_batches: PackedBatch,
    probe: FailingProbe,
    call: TrainingCall = "forward_backward_batch",
    steps: bool = False,
) -> FailedCall:
    """Start an update and run training calls until one raises; return the exception.

    Args:
        engine: The engine.
        local_batches: Batches of this rank, one for each call.
        probe: Loss that raises.
        call: Method of the engine to call.
        steps: Also run the optimizer step, which may raise instead. GPU collectives run while the
            host continues, so a rank can end its training call before another one fails.
    """
    engine.set_loss_fn(probe)
    engine.optimizer_zero_grad()
    try:
        with engine.train_mode():
            for local_batch in local_batches:
                getattr(engine, call)(local_batch, forward_only=False)
            if steps:
                engine.optimizer_step()
    except EXCEPTIONS as error:
        return FailedCall(
            error=f"{type(error).__name__}: {error}",
            time_s=time.time(),
            injected_s=tuple(probe.injected_s),
        )
    ended = "the update ended without" if steps else "the training call swallowed"
    raise AssertionError(f"{ended} an exception of a loss or backward pass")


def collect_later_errors(engine: BaseEngine, batch: SequenceBatch) -> tuple[str, ...]:
    """Call `optimizer_zero_grad`; if the group is broken, return the errors of all later calls."""
    try:
        engine.optimizer_zero_grad()
    except RankFailedError as error:
        messages = [str(error)]
    else:
        return ()

    def evaluate() -> None:
        with engine.eval_mode():
            pass

    with tempfile.TemporaryDirectory() as folder:
        later: tuple[Callable[[], object], ...] = (
            evaluate,
            engine.optimizer_step,
            engine.lr_scheduler_step,
            lambda: engine.gather_objects(0),
            lambda: list(engine.export_state()),
            lambda: engine.unshard_data(batch),
            lambda: engine.unshard_outputs(None, sample_ids=batch.sample_ids),
            lambda: engine.save_checkpoint(folder, global_step=0),
            lambda: engine.load_checkpoint(folder),
        )
        for call in later:
            with pytest.raises(RankFailedError) as caught:
                call()
            messages.append(str(caught.value))
    return tuple(messages)


def test_failed_update_cannot_be_continued(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """After an exception, steps and training calls raise until gradients are zeroed."""
    changed = engine_under_test.run(
        continue_failed_update,
        setup=oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW),
        batch=oracle.get_batch(),
    )
    if any(recovery.broken for recovery in changed):
        engine_under_test.rank_pool.replace_group()
        assert_has_stages(changed)


def continue_failed_update(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> Recovery:
    """Try to continue after an exception at the second micro-batch."""
    engine = rank.temporary_engine(setup)
    recovery = Recovery(num_stages=engine.topology.pp.size)
    before = collect_state(engine)
    local_batch = rank_slice(engine, batch, split=THREE_MICRO_BATCHES)
    failed = fail(engine, local_batch, probe=FailingProbe(fails_at=1))
    with pytest.raises((EngineStateError, RankFailedError)) as caught:
        engine.optimizer_step()
    if isinstance(caught.value, RankFailedError):
        return replace(recovery, broken=replace(failed, later_errors=(str(caught.value),)))
    engine.set_loss_fn(ClippedPpoProbe())
    assert "optimizer_zero_grad" in str(caught.value), f"does not say what to do: {caught.value}"
    for call in CALLS:
        with pytest.raises(EngineStateError, match="optimizer_zero_grad"):
            train(engine, batch, call=call)
    with pytest.raises(EngineStateError, match="optimizer_zero_grad"):
        engine.lr_scheduler_step()
    assert engine.num_updates == 0
    assert_same_state(collect_state(engine), before)
    return recovery


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("forward_backward_batch", torch.OutOfMemoryError),
        ("forward_backward_step", KeyboardInterrupt),
    ],
)
def test_exception_after_the_passes_fails_the_update(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    call: TrainingCall,
    error: type[BaseException],
) -> None:
    """An exception after the passes also fails the update.

    It is raised while metrics are collected or, in `forward_backward_step`, the loss is summed.
    """
    recoveries = engine_under_test.run(
        fail_after_the_passes,
        setup=oracle.make_setup(QWEN2_GROUPED),
        batch=oracle.get_batch(),
        call=call,
        error=error,
    )
    if any(recovery.broken for recovery in recoveries):
        engine_under_test.rank_pool.replace_group()
        assert_has_stages(recoveries)


def fail_after_the_passes(
    rank: Rank,
    *,
    setup: EngineSetup,
    batch: SequenceBatch,
    call: TrainingCall,
    error: type[BaseException],
) -> Recovery:
    """Raise after the passes of a call, then try to repeat the call and to step."""
    engine = rank.cached_engine(setup)
    recovery = Recovery(num_stages=engine.topology.pp.size)
    engine.set_loss_fn(ClippedPpoProbe())
    engine.optimizer_zero_grad()

    def raise_error(*_: object) -> NoReturn:
        raise error("injected after the passes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, LAST_METHODS[call], raise_error)
        # With stages another rank may have raised, and broken the group, before this one.
        with pytest.raises((error, RankFailedError), match="injected") as failed:
            train(engine, batch, call=call)
    for later in (engine.optimizer_step, lambda: train(engine, batch, call=call)):
        with pytest.raises((EngineStateError, RankFailedError)) as caught:
            later()
        assert "injected after the passes" in str(caught.value)
    if isinstance(caught.value, RankFailedError):
        return replace(recovery, broken=FailedCall(error=str(failed.value), time_s=time.time()))
    engine.optimizer_zero_grad()
    return recovery


def train(engine: BaseEngine, batch: SequenceBatch, *, call: TrainingCall) -> None:
    """Run a training call that leaves its gradients local."""
    # The counts of a packed batch are known, so `forward_backward_step` only sums the loss.
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    options = {"final": False} if call == "forward_backward_batch" else {}
    with engine.train_mode():
        getattr(engine, call)(local_batch, forward_only=False, **options)


@pytest.mark.bitwise
def test_failed_zeroing_fails_the_update(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """After an exception in `optimizer_zero_grad` no step applies what is left of the gradients."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    old, batch = (oracle.get_batch(seed=seed) for seed in range(2))
    updates = engine_under_test.run(update_after_failed_zeroing, setup=setup, old=old, batch=batch)
    expected = engine_under_test.run(update_without_failures, setup=setup, batches=[batch])
    for update, (expected_update,) in zip(updates, expected, strict=True):
        assert update.grad_norm == expected_update.grad_norm, (
            f"the gradient norm is {update.grad_norm} after an exception in optimizer_zero_grad(), "
            f"but {expected_update.grad_norm} without one"
        )
        assert_same_state(update.state, expected_update.state)


def update_after_failed_zeroing(
    rank: Rank, *, setup: EngineSetup, old: SequenceBatch, batch: SequenceBatch
) -> Update:
    """Raise while the gradients of old data are zeroed, try to step, and run an update."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    engine.optimizer_zero_grad()
    train(engine, old, call="forward_backward_batch")

    def raise_error() -> NoReturn:
        raise InjectedError("injected while gradients are zeroed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_zero_gradients", raise_error)
        with pytest.raises(InjectedError):
            engine.optimizer_zero_grad()
    for later in (engine.optimizer_step, lambda: train(engine, old, call=CALLS[0])):
        with pytest.raises(EngineStateError, match="injected while gradients are zeroed"):
            later()
    return run_update(engine, [rank_slice(engine, batch, split=THREE_MICRO_BATCHES)])


@pytest.mark.bitwise
def test_failed_evaluation_keeps_the_gradients_of_the_update(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A forward-only call that raises between a training call and the step changes no gradient."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    results = engine_under_test.run(gradients_after_a_failed_evaluation, setup=setup, batch=batch)
    if any(gradients is None for gradients, _, _ in results):
        engine_under_test.rank_pool.replace_group()
    for gradients, expected, num_stages in results:
        if gradients is None:
            assert num_stages > 1, "every rank raised, so the group must survive"
            continue
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), f"the gradient of {name} changed"


def gradients_after_a_failed_evaluation(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor], int]:
    """Return gradients with and without a failed evaluation, and the number of stages.

    The first are None if the group broke.
    """
    engine = rank.cached_engine(setup)
    num_stages = engine.topology.pp.size
    local_batch = rank_slice(engine, batch, split=THREE_MICRO_BATCHES)

    def start_update() -> None:
        engine.set_loss_fn(ClippedPpoProbe())
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_batch(local_batch, forward_only=False, final=False)

    def step() -> dict[str, Tensor]:
        engine.optimizer_step()
        return {name: state.first_moment for name, state in collect_state(engine).items()}

    start_update()
    expected = step()
    start_update()
    engine.set_loss_fn(FailingProbe(fails_at=1))
    # A rank that computes no loss and waits for none does not raise.
    with suppress(InjectedError, RankFailedError), engine.eval_mode():
        engine.forward_backward_batch(local_batch, forward_only=True)
    try:
        return step(), expected, num_stages
    except RankFailedError:
        return None, expected, num_stages


@pytest.mark.parametrize("kind", ["loss", "memory_in_backward", "waits_in_collective"])
def test_other_ranks_report_the_rank_that_failed(
    engine_under_test: EngineUnderTest, oracle: OracleCache, kind: Kind
) -> None:
    """If one rank raises, every other one names it and its message within 10 s.

    The others raise in the training call, or at the latest in the optimizer step. Every later call
    of each rank raises the same error. With one rank there are no others.
    """
    if engine_under_test.world_size == 1:
        return
    # The last rank computes losses in every layout, because the last pipeline stage does.
    culprit = engine_under_test.world_size - 1
    failures = engine_under_test.run(
        fail_on_one_rank,
        setup=oracle.make_setup(QWEN2_GROUPED),
        batch=oracle.get_batch(),
        probe=FailingProbe(fails_at=1, kind=kind, fails_on=(culprit,)),
        agreement_s=rank_failures.AGREEMENT_S if kind == "loss" else SHORT_AGREEMENT_S,
    )
    engine_under_test.rank_pool.replace_group()
    message = "injected in the backward pass" if kind == "memory_in_backward" else describe(1)
    assert message in failures[culprit].error
    for failure in failures:
        # Ranks that share the loss of the failed one raise by themselves.
        assert message in failure.error
        assert_later_calls_name(culprit, message, failure)
        assert_reported_in_time(failure, failures[culprit])


def assert_later_calls_name(culprit: int, message: str, failure: FailedCall) -> None:
    """Check that every later call of a rank names the failed rank and its message."""
    assert failure.later_errors, "a rank still accepts calls although the group is broken"
    for text in failure.later_errors:
        assert message in text, f"does not contain the message of the failed rank: {text}"
        assert f"rank {culprit}" in text, f"does not name the failed rank: {text}"
        assert "build a new engine" in text, f"does not say what to do: {text}"


def assert_reported_in_time(failure: FailedCall, culprit: FailedCall) -> None:
    """Check the time from the injection on one rank to the exception of another."""
    (injected_s,) = culprit.injected_s
    waited_s = failure.time_s - injected_s
    assert waited_s < REPORT_LIMIT_S, f"a rank raised {waited_s:.1f} s after the failure"


def fail_on_one_rank(
    rank: Rank,
    *,
    setup: EngineSetup,
    batch: SequenceBatch,
    probe: FailingProbe,
    agreement_s: float,
) -> FailedCall:
    """Fail, try later calls, and close the engine."""
    engine = rank.temporary_engine(setup)
    # Once without a failure: the first pass of an engine may take seconds.
    engine.set_loss_fn(ClippedPpoProbe())
    run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])
    local_batch = rank_slice(engine, batch, split=THREE_MICRO_BATCHES)
    # A copy, which has counted no micro-batch and not failed yet.
    probe = replace(probe, seen=[], injected_s=[])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_failures, "AGREEMENT_S", agreement_s)
        failed = fail(
            engine, local_batch, probe=probe, steps=rank.index not in (probe.fails_on or ())
        )
    return replace(failed, later_errors=collect_later_errors(engine, batch))


@pytest.mark.parametrize("call", ["export_weights", "export_state", "load_weights"])
def test_other_ranks_report_a_rank_that_stops_a_stream(
    engine_under_test: EngineUnderTest, oracle: OracleCache, call: str
) -> None:
    """If one rank raises halfway through a stream, every other one names it within 10 s.

    A rank that gathers or sends weights would wait for the rest of the stream. One that does not
    may end the call, and raises in the next one.
    """
    if engine_under_test.world_size == 1:
        return
    culprit = engine_under_test.world_size - 1
    failures = engine_under_test.run(
        stop_stream,
        setup=oracle.make_setup(QWEN2_GROUPED),
        batch=oracle.get_batch(),
        call=call,
        culprit=culprit,
    )
    engine_under_test.rank_pool.replace_group()
    for failure in failures:
        assert_later_calls_name(culprit, "injected in the stream", failure)
        assert_reported_in_time(failure, failures[culprit])


def stop_stream(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, call: str, culprit: int
) -> FailedCall:
    """Raise on one rank at the second tensor of a stream, then try later calls."""
    engine = rank.temporary_engine(setup)
    weights = collect_weights(engine)
    injected_s: list[float] = []

    def stop(stream: Iterable[Item]) -> Iterator[Item]:
        for index, weight in enumerate(stream):
            if index == 1 and rank.index == culprit:
                injected_s.append(time.time())
                raise InjectedError("injected in the stream")
            yield weight

    error = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_failures, "AGREEMENT_S", SHORT_AGREEMENT_S)
        try:
            if call == "load_weights":
                engine.load_weights(stop(NamedWeight(*each) for each in weights.items()))
            elif call == "export_state":
                with engine.export_state() as states:
                    list(stop(states))
            else:
                with engine.export_weights() as exported:
                    list(stop(exported))
            # At the latest this call waits for the failed rank.
            engine.gather_objects(rank.index)
        except (InjectedError, RankFailedError) as caught:
            error = str(caught)
    return FailedCall(
        error=error,
        time_s=time.time(),
        injected_s=tuple(injected_s),
        later_errors=collect_later_errors(engine, batch),
    )


def test_lost_connection_ends_the_call_on_every_rank(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """If a rank loses its connections inside a collective, all ranks raise within 10 s."""
    if engine_under_test.world_size == 1:
        return
    culprit = engine_under_test.world_size - 1
    failures = engine_under_test.run(
        lose_connection,
        setup=oracle.make_setup(QWEN2_GROUPED),
        batch=oracle.get_batch(),
        probe=FailingProbe(fails_at=1, kind="lost_network", fails_on=(culprit,)),
    )
    engine_under_test.rank_pool.replace_group()
    for failure in failures:
        assert failure.later_errors, "a rank still accepts calls although its connection is lost"
        assert_reported_in_time(failure, failures[culprit])


def lose_connection(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, probe: FailingProbe
) -> FailedCall:
    """Lose the connections in the second micro-batch, then try later calls."""
    engine = rank.temporary_engine(setup)
    # A copy, which has counted no micro-batch and not failed yet.
    probe = replace(probe, seen=[], injected_s=[])
    engine.set_loss_fn(probe)
    local_batch = rank_slice(engine, batch, split=THREE_MICRO_BATCHES)
    with pytest.raises(RuntimeError) as caught, engine.train_mode():
        engine.forward_backward_batch(local_batch, forward_only=False)
    failed = FailedCall(
        error=str(caught.value), time_s=time.time(), injected_s=tuple(probe.injected_s)
    )
    return replace(failed, later_errors=collect_later_errors(engine, batch))
