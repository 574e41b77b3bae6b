"""Conformance tests for batches: engines execute plans unchanged and keep the order of samples."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    SPLITS,
    Split,
    measure_outputs,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    assert_all_close,
    assert_close,
)
from temper_engine_api.conformance.inputs.probes import (
    MICRO_BATCH_METRIC,
    ClipCovProbe,
    ClippedPpoProbe,
    MicroBatchRecorder,
    name_micro_batch_metric,
)
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import HeadOutput


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_plan_is_executed_unchanged(
    engine_under_test: EngineUnderTest, oracle: OracleCache, split: Split
) -> None:
    """The objective sees exactly the micro-batches of the plan, in number and content.

    Engines that merge or split micro-batches change memory use and per-batch metrics.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    pairs = [
        pair
        for pair in engine_under_test.run(
            recorded_and_planned, setup=setup, batch=batch, split=split
        )
        if pair is not None
    ]
    # Without this check the loop below would pass if no rank returned metrics.
    assert pairs
    for seen, planned in pairs:
        assert seen == planned


def recorded_and_planned(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, split: Split
) -> tuple[dict[str, float], dict[str, float]] | None:
    """Count the micro-batches that the objective saw and those in the plan.

    Returns None on ranks whose metrics do not count.
    """
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(MicroBatchRecorder())
    local_batch = rank_slice(engine, batch, split=split)
    seen = run_update(engine, [local_batch]).metrics
    if not engine.topology.returns_outputs:
        return None
    planned = Counter(
        name_micro_batch_metric(micro.sample_ids) for micro in local_batch.iterate_micro_batches()
    )
    # An engine may add its own metrics.
    recorded = {
        name: read_value(metric)
        for name, metric in seen.items()
        if name.startswith(MICRO_BATCH_METRIC)
    }
    return recorded, {name: float(count) for name, count in planned.items()}


def read_value(metric: Metric) -> float:
    """Return the metric's value as a float."""
    return float(metric.value)


def test_each_sample_is_on_one_rank(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """`shard_data` puts each sample on one rank, keeps pairs together and obeys `max_tokens`.

    All ranks get the same number of micro-batches, otherwise their collectives would not match.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    local_batches = [
        local_batch
        for local_batch in engine_under_test.run(
            shard_batch, setup=setup, batch=batch, max_tokens=24
        )
        if local_batch is not None
    ]
    # A rank that runs fewer would leave the others waiting in a collective.
    assert len({local_batch.num_micro_batches for local_batch in local_batches}) == 1
    ids = torch.cat(
        [local_batch.sample_ids[~local_batch.is_dummy] for local_batch in local_batches]
    )
    assert sorted(ids.tolist()) == batch.sample_ids.tolist()
    for local_batch in local_batches:
        assert all(micro.num_tokens <= 24 for micro in local_batch.iterate_micro_batches())
        assert all(
            len(set(micro.pack_group_ids.tolist())) * 2 == micro.num_sequences
            for micro in _real(local_batch)
        )


def _real(local_batch: PackedBatch) -> list[SequenceBatch]:
    return [
        micro for micro in local_batch.iterate_micro_batches() if not bool(micro.is_dummy.any())
    ]


def shard_batch(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, max_tokens: int
) -> PackedBatch | None:
    """Return the rank's local batch from `shard_data`; None on ranks that return no outputs."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = engine.shard_data(batch, max_tokens=max_tokens)
    return local_batch if engine.topology.returns_outputs else None


def test_unshard_restores_the_sharded_batch(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """`unshard_data` restores the batch bit for bit, in ascending and in a given order."""
    setup, plain_batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    batch = replace(
        plain_batch,
        # Use other positions than the default, which an engine could compute again.
        position_ids=plain_batch.get_position_ids().flip(0),
        media=tuple(f"image {i}" for i in range(plain_batch.num_sequences)),
    )
    # Use a random order, because engines return ascending ids by default.
    ids = batch.sample_ids[
        torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(1))
    ]
    for ascending, in_given_order in engine_under_test.run(
        shard_and_unshard, setup=setup, batch=batch, order=ids
    ):
        assert_same_batch(ascending, batch)
        positions = [batch.sample_ids.tolist().index(sample) for sample in ids.tolist()]
        assert_same_batch(in_given_order, batch.select(positions))


def shard_and_unshard(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, order: Tensor
) -> tuple[SequenceBatch, SequenceBatch]:
    """Shard the batch; return it unsharded in ascending order and in the given order."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = engine.shard_data(batch, max_tokens=40)
    return engine.unshard_data(local_batch), engine.unshard_data(local_batch, sample_ids=order)


def assert_same_batch(actual: SequenceBatch, expected: SequenceBatch) -> None:
    """Compare every field of two batches, tensors bit for bit."""
    for field in fields(SequenceBatch):
        value, expected_value = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(expected_value, Mapping):
            assert value.keys() == expected_value.keys(), f"{field.name} has other columns"
            for name, column in expected_value.items():
                assert torch.equal(value[name], column), f"{field.name}[{name!r}] differs"
        elif isinstance(expected_value, Tensor):
            assert value is not None, f"{field.name} is lost"
            assert torch.equal(value, expected_value), f"{field.name} differs"
        else:
            assert value == expected_value, f"{field.name} differs"


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_outputs_are_in_input_order(
    engine_under_test: EngineUnderTest, oracle: OracleCache, split: Split
) -> None:
    """`unshard_outputs` returns outputs in the order of the input, on every rank and split."""
    setup = oracle.make_setup(QWEN2_GROUPED)
    # Ids out of order: outputs sorted by sample id would pass on the original batch.
    batch = oracle.get_batch().select([6, 0, 3, 7, 1, 5, 2, 4])
    expected = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    for outputs in engine_under_test.run(
        measure_outputs,
        setup=setup,
        batch=batch,
        requested_outputs=[HeadOutput.LOGPROB],
        split=split,
    ):
        received_ids, ids = outputs.sample_ids.tolist(), batch.sample_ids.tolist()
        assert received_ids == ids, "the outputs are not in the order of the input"
        assert_close(
            outputs.columns[HeadOutput.LOGPROB],
            expected,
            LOGPROB,
            quantity="log-probs",
            batch=batch,
            num_ranks=engine_under_test.num_data_ranks,
        )


def test_rank_outputs_are_in_input_order(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A rank's outputs are in the order of its local batch, without the dummies."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    for order in engine_under_test.run(outputs_of_rank, setup=setup, batch=batch):
        if order.actual is not None:
            assert order.actual == order.expected


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """One rank's sample ids."""

    expected: list[int]
    """Ids in the rank's local batch, without dummies."""
    actual: list[int] | None
    """Ids in the rank's outputs; None on ranks that return no outputs."""


def outputs_of_rank(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> SampleOrder:
    """Run a forward pass over six micro-batches, including dummies."""
    engine = rank.cached_engine(setup)
    local_batch = rank_slice(engine, batch, split=Split(name="many", min_micro_batches=6))
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            local_batch, forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    actual = None if result.outputs is None else result.outputs.sample_ids.tolist()
    return SampleOrder(
        expected=local_batch.sample_ids[~local_batch.is_dummy].tolist(), actual=actual
    )


def test_gradient_does_not_depend_on_sample_order(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A shuffled batch gives the same gradient, also with random choices in the objective.

    `ClipCovProbe.prepare` draws from (seed, sample id, position), never from the order of samples.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    shuffled = batch.select([6, 0, 3, 7, 1, 5, 2, 4])
    expected = oracle.get_update(setup, ClipCovProbe(), batch)
    gradients = engine_under_test.run(gradients_by_shard_data, setup=setup, batch=shuffled)[0]
    assert_all_close(gradients, expected.gradients, GRADIENT, quantity="gradient")


def gradients_by_shard_data(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> dict[str, Tensor]:
    """Return the gradients of an update planned by the engine's own `shard_data`."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClipCovProbe())
    # The seed of the oracle's update, which decides the tokens that ClipCovProbe drops.
    return run_update(engine, [engine.shard_data(batch, max_tokens=40, seed=7)]).gradients


def test_dummy_samples_do_not_count(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Dummy samples change neither weights nor metrics.

    Four pairs are run in one and in six micro-batches; the latter need dummies.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    plain, padded = (
        engine_under_test.run(mean_ratio_and_weight, setup=setup, batch=batch, split=split)
        for split in (ONE_MICRO_BATCH, Split(name="many", min_micro_batches=6))
    )
    weights = [sum(weight for _, weight in rank_values) for rank_values in (plain, padded)]
    assert weights == [float(batch.loss_mask.sum())] * 2
    totals = [sum(value for value, _ in rank_values) for rank_values in (plain, padded)]
    assert_close(totals[1], totals[0], GRADIENT, quantity="sum of ratios")


def mean_ratio_and_weight(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, split: Split
) -> tuple[float, float]:
    """Return this rank's weighted sum and weight of the objective's ratio metric."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    metrics = run_update(engine, [rank_slice(engine, batch, split=split)]).metrics
    return (
        (float(metrics["ratio"].value), float(metrics["ratio"].weight))
        if engine.topology.returns_outputs
        else (0.0, 0.0)
    )


def test_eval_loss_equals_training_loss(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A forward-only pass in `eval_mode` reports the loss of training on the same local batch."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    pairs = [
        pair
        for pair in engine_under_test.run(trained_and_evaluated_loss, setup=setup, batch=batch)
        if pair is not None
    ]
    assert pairs
    for trained, evaluated in pairs:
        assert_close(evaluated, trained, LOGPROB, quantity="loss", min_scale=1.0)


def trained_and_evaluated_loss(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[float, float] | None:
    """Return this rank's loss in training and in eval; None where its metrics do not count."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    trained = run_update(engine, [local_batch]).metrics
    with engine.eval_mode():
        evaluated = engine.forward_backward_batch(local_batch, forward_only=True).metrics
    assert "loss" in evaluated or not engine.topology.returns_outputs, (
        "a forward-only call without requested outputs must evaluate the objective, but there is "
        "no metric 'loss'"
    )
    return (
        (read_value(trained["loss"]), read_value(evaluated["loss"]))
        if engine.topology.returns_outputs
        else None
    )
