"""Test that an exception in a call costs one update and changes no later one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.conformance.inputs.failing_probe import FailingProbe, InjectedError
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.errors import EngineStateError
from temper_engine_api.specs import LoraSpec, OptimizerSpec, PrecisionSpec
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.sharding import fsdp2

Start = Callable[..., FSDPEngine]
STRATEGIES = pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])


def three_micro_batches(engine: FSDPEngine, batch: SequenceBatch) -> PackedBatch:
    packed = engine.shard_data(batch, max_tokens=21)
    assert packed.num_micro_batches == 3
    return packed


def update_norm(engine: FSDPEngine, packed: PackedBatch) -> float:
    engine.set_loss_fn(SftProbe())
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(packed, forward_only=False)
    return engine.optimizer_step()


def fail(engine: FSDPEngine, packed: PackedBatch, probe: FailingProbe) -> None:
    engine.set_loss_fn(probe)
    engine.optimizer_zero_grad()
    error = torch.OutOfMemoryError if "memory" in probe.kind else InjectedError
    with pytest.raises(error), engine.train_mode():
        engine.forward_backward_batch(packed, forward_only=False)


@STRATEGIES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_zeroing_drops_the_gradients_of_a_failed_call(
    start: Start, batch: SequenceBatch, strategy: str, position: int, precision: str
) -> None:
    engine = start(
        strategy=strategy,
        optimizer=OptimizerSpec(lr=0.0, clip_grad_norm=None),
        precision=PrecisionSpec(compute=precision),  # type: ignore[arg-type]
    )
    packed = three_micro_batches(engine, batch)
    expected = update_norm(engine, packed)
    fail(engine, packed, FailingProbe(fails_at=position))
    assert update_norm(engine, packed) == expected


@STRATEGIES
def test_update_after_a_failure_halfway_through_the_backward_pass_is_the_same(
    start: Start, batch: SequenceBatch, strategy: str
) -> None:
    """The backward pass of the head has ended by then, that of the other layers has not."""
    engine = start(strategy=strategy, optimizer=OptimizerSpec(lr=0.0, clip_grad_norm=None))
    packed = three_micro_batches(engine, batch)
    expected = update_norm(engine, packed)
    for position in range(2):
        fail(engine, packed, FailingProbe(fails_at=position, kind="memory_in_layer"))
        assert update_norm(engine, packed) == expected


@STRATEGIES
def test_step_after_a_failed_call_is_refused(
    start: Start, batch: SequenceBatch, strategy: str
) -> None:
    engine = start(strategy=strategy)
    packed = three_micro_batches(engine, batch)
    fail(engine, packed, FailingProbe(fails_at=1))
    with pytest.raises(EngineStateError, match=r"optimizer_zero_grad\(\) to discard the update"):
        engine.optimizer_step()
    assert engine.num_updates == 0


def test_older_torch_refuses_the_next_update_but_saves_the_last_one(
    start: Start, batch: SequenceBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = start()
    packed = three_micro_batches(engine, batch)
    update_norm(engine, packed)
    # Older versions have no `reset_iter_state`.
    monkeypatch.setattr(fsdp2, "_HAS_RESET_ITER_STATE", False)
    fail(engine, packed, FailingProbe(fails_at=1))
    for _ in range(2):
        with pytest.raises(EngineStateError, match=r"save_checkpoint\(\), close\(\) this engine"):
            engine.optimizer_zero_grad()
    checkpoint = engine.save_checkpoint(str(tmp_path), global_step=1)
    next_engine = start()
    next_engine.load_checkpoint(checkpoint)
    assert next_engine.num_updates == 1
    expected = start()
    update_norm(expected, packed)
    assert update_norm(next_engine, packed) == update_norm(expected, packed)


@STRATEGIES
def test_failed_evaluation_keeps_the_gradients_of_the_update(
    start: Start, batch: SequenceBatch, strategy: str
) -> None:
    engine = start(strategy=strategy, optimizer=OptimizerSpec(lr=0.0, clip_grad_norm=None))
    packed = three_micro_batches(engine, batch)
    expected = update_norm(engine, packed)
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(packed, forward_only=False, final=False)
    engine.set_loss_fn(FailingProbe(fails_at=1))
    with pytest.raises(InjectedError), engine.eval_mode():
        engine.forward_backward_batch(packed, forward_only=True)
    assert engine.optimizer_step() == pytest.approx(expected, rel=1e-6)


def test_engine_with_frozen_parameters_drops_the_gradients_of_a_failed_call(
    start: Start, batch: SequenceBatch
) -> None:
    engine = start(
        optimizer=OptimizerSpec(lr=0.0, clip_grad_norm=None),
        lora=LoraSpec(rank=2, alpha=4.0, target_modules=("q_proj", "v_proj")),
    )
    packed = three_micro_batches(engine, batch)
    expected = update_norm(engine, packed)
    fail(engine, packed, FailingProbe(fails_at=2, kind="memory_in_backward"))
    assert update_norm(engine, packed) == expected
