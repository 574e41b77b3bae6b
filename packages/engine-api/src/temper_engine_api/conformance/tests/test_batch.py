"""Laws: plans are executed as they are, and every sample comes back where it was."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.measurements import (
    SPLITS,
    WHOLE,
    Split,
    measure_outputs,
    share_of,
    update_once,
)
from temper_engine_api.conformance.harness.rank import Rank, Recipe
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    assert_all_close,
    assert_close,
)
from temper_engine_api.conformance.inputs.probes import (
    WITNESS_PREFIX,
    BatchStatisticProbe,
    PlanWitness,
    TokenProbe,
    witness_of,
)
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import Reference
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import HeadOutput


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_plan_is_executed_unchanged(subject: Subject, reference: Reference, split: Split) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    pairs = [
        pair
        for pair in subject.run(witnessed_and_planned, recipe=recipe, batch=batch, split=split)
        if pair is not None
    ]
    assert pairs
    for seen, planned in pairs:
        assert seen == planned


def witnessed_and_planned(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch, split: Split
) -> tuple[dict[str, float], dict[str, float]] | None:
    """How often the objective saw which micro-batch, and how often the plan has it; None where the rank's metrics don't count."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(PlanWitness())
    share = share_of(engine, batch, split=split)
    seen = update_once(engine, [share]).metrics
    if not engine.topology.returns_outputs:
        return None
    planned = Counter(witness_of(micro.sample_ids) for micro in share.micro_batches())
    # An engine may add metrics of its own.
    witnessed = {
        name: value_of(metric) for name, metric in seen.items() if name.startswith(WITNESS_PREFIX)
    }
    return witnessed, {name: float(count) for name, count in planned.items()}


def value_of(metric: Metric) -> float:
    return float(metric.value)


def test_every_sample_is_on_one_rank_and_counts_are_equal(
    subject: Subject, reference: Reference
) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    shares = [
        share
        for share in subject.run(shares_of, recipe=recipe, batch=batch, max_tokens=24)
        if share is not None
    ]
    assert len({share.num_micro_batches for share in shares}) == 1
    ids = torch.cat([share.sample_ids[~share.is_dummy] for share in shares])
    assert sorted(ids.tolist()) == batch.sample_ids.tolist()
    for share in shares:
        assert all(micro.num_tokens <= 24 for micro in share.micro_batches())
        assert all(
            len(set(micro.atom_ids.tolist())) * 2 == micro.num_sequences for micro in _real(share)
        )


def _real(share: PackedBatch) -> list[SequenceBatch]:
    return [micro for micro in share.micro_batches() if not bool(micro.is_dummy.any())]


def shares_of(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch, max_tokens: int
) -> PackedBatch | None:
    """By the engine's own ``shard_data``; of one rank of each replica."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    share = engine.shard_data(batch, max_tokens=max_tokens)
    return share if engine.topology.returns_outputs else None


def test_unshard_of_shard_is_the_batch(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    ids = batch.sample_ids[
        torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(1))
    ]
    for whole, in_given_order in subject.run(
        sharded_and_back, recipe=recipe, batch=batch, order=ids
    ):
        assert_same_batch(whole, batch)
        places = [batch.sample_ids.tolist().index(sample) for sample in ids.tolist()]
        assert_same_batch(in_given_order, batch.select(places))


def sharded_and_back(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch, order: Tensor
) -> tuple[SequenceBatch, SequenceBatch]:
    """In ascending and in a given order."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    share = engine.shard_data(batch, max_tokens=40)
    return engine.unshard_data(share), engine.unshard_data(share, sample_ids=order)


def assert_same_batch(actual: SequenceBatch, expected: SequenceBatch) -> None:
    """Every tensor, bit for bit."""
    for name in (
        "tokens",
        "sequence_starts",
        "loss_mask",
        "sample_ids",
        "group_ids",
        "atom_ids",
        "temperature",
    ):
        assert torch.equal(vars_of(actual)[name], vars_of(expected)[name]), f"{name} differs"
    assert actual.columns.keys() == expected.columns.keys()
    assert all(
        torch.equal(actual.columns[name], column) for name, column in expected.columns.items()
    )
    assert all(
        torch.equal(actual.sequence_columns[name], c)
        for name, c in expected.sequence_columns.items()
    )


def vars_of(batch: SequenceBatch) -> dict[str, Tensor]:
    return {
        "tokens": batch.tokens,
        "sequence_starts": batch.sequence_starts,
        "loss_mask": batch.loss_mask,
        "sample_ids": batch.sample_ids,
        "group_ids": batch.group_ids,
        "atom_ids": batch.atom_ids,
        "temperature": batch.temperature,
    }


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_output_order_is_restored(subject: Subject, reference: Reference, split: Split) -> None:
    recipe = reference.recipe(QWEN2_GROUPED)
    batch = reference.batch().select([6, 0, 3, 7, 1, 5, 2, 4])
    expected = reference.outputs(recipe, batch, HeadOutput.LOGPROB)
    for outputs in subject.run(
        measure_outputs,
        recipe=recipe,
        batch=batch,
        requested_outputs=[HeadOutput.LOGPROB],
        split=split,
    ):
        assert outputs.sample_ids.tolist() == batch.sample_ids.tolist()
        assert_close(outputs.columns[HeadOutput.LOGPROB], expected, LOGPROB, what="log-probs")


def test_outputs_of_a_rank_are_in_input_order(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    for of_rank in subject.run(outputs_of_rank, recipe=recipe, batch=batch):
        if of_rank.given is not None:
            assert of_rank.given == of_rank.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Sample ids of one rank."""

    wanted: list[int]
    """Of its share, dummies dropped."""
    given: list[int] | None
    """Of its outputs."""


def outputs_of_rank(rank: Rank, *, recipe: Recipe, batch: SequenceBatch) -> Order:
    """With dummies among the micro-batches."""
    engine = rank.kept_engine(recipe)
    share = share_of(engine, batch, split=Split(name="many", min_micro_batches=6))
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            share, forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    given = None if result.outputs is None else result.outputs.sample_ids.tolist()
    return Order(wanted=share.sample_ids[~share.is_dummy].tolist(), given=given)


def test_the_order_of_samples_does_not_matter(subject: Subject, reference: Reference) -> None:
    # Batch statistics with random choices too: they depend on the seed, the sample and the position only.
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    shuffled = batch.select([6, 0, 3, 7, 1, 5, 2, 4])
    expected = reference.update(recipe, BatchStatisticProbe(), batch)
    gradients = subject.run(gradients_by_shard_data, recipe=recipe, batch=shuffled)[0]
    assert_all_close(gradients, expected.gradients, GRADIENT, what="gradient")


def gradients_by_shard_data(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch
) -> dict[str, Tensor]:
    """With the engine's own plan, and its own call of ``prepare``."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(BatchStatisticProbe())
    return update_once(engine, [engine.shard_data(batch, max_tokens=40, seed=7)]).gradients


def test_dummies_do_not_count(subject: Subject, reference: Reference) -> None:
    # Six micro-batches for four atoms: the metrics weigh real tokens only, and the loss is the same number.
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    plain, padded = (
        subject.run(mean_ratio_and_weight, recipe=recipe, batch=batch, split=split)
        for split in (WHOLE, Split(name="many", min_micro_batches=6))
    )
    weights = [sum(weight for _, weight in of_ranks) for of_ranks in (plain, padded)]
    assert weights == [float(batch.loss_mask.sum())] * 2
    totals = [sum(value for value, _ in of_ranks) for of_ranks in (plain, padded)]
    assert_close(totals[1], totals[0], GRADIENT, what="sum of ratios")


def mean_ratio_and_weight(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch, split: Split
) -> tuple[float, float]:
    """The weighted sum and the weight of a metric of the objective, of this rank."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    metrics = update_once(engine, [share_of(engine, batch, split=split)]).metrics
    return (
        (float(metrics["ratio"].value), float(metrics["ratio"].weight))
        if engine.topology.returns_outputs
        else (0.0, 0.0)
    )


def test_evaluating_an_objective_gives_the_training_loss(
    subject: Subject, reference: Reference
) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    pairs = [
        pair
        for pair in subject.run(trained_and_evaluated_loss, recipe=recipe, batch=batch)
        if pair is not None
    ]
    assert pairs
    for trained, evaluated in pairs:
        assert_close(evaluated, trained, LOGPROB, what="loss", at_least=1.0)


def trained_and_evaluated_loss(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch
) -> tuple[float, float] | None:
    """Of this rank's share; None where its metrics don't count."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    share = share_of(engine, batch, split=WHOLE)
    trained = update_once(engine, [share]).metrics
    with engine.eval_mode():
        evaluated = engine.forward_backward_batch(share, forward_only=True).metrics
    return (
        (value_of(trained["loss"]), value_of(evaluated["loss"]))
        if engine.topology.returns_outputs
        else None
    )
