"""Laws: the mini-batch has one loss and one gradient, however it is split over micro-batches, calls and ranks."""

from dataclasses import replace

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    SPLITS,
    TWO_MICRO_BATCHES,
    Split,
    Update,
    measure_update,
    merge_update_metrics,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOSS,
    LOSS_TERM_SCALE,
    assert_all_close,
    assert_close,
)
from temper_engine_api.conformance.inputs.batches import UNTRAINED_SEQUENCE
from temper_engine_api.conformance.inputs.probes import (
    PROBES,
    ClipCovProbe,
    ClippedPpoProbe,
    DpoProbe,
    GspoProbe,
    SftProbe,
)
from temper_engine_api.conformance.inputs.tiny_models import (
    LANGUAGE_MODELS,
    QWEN2_GROUPED,
    TinyModel,
)
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache, model_with_head_for
from temper_engine_api.objective import Aggregation, AggregationMode, HeadOutput, Objective

_CLAIMS = {HeadOutput.VALUE: Capability.VALUE_MODEL, HeadOutput.LOGPROB_AT: Capability.LOGPROB_AT}


def _parameter(probe: Objective) -> object:
    needed = [
        _CLAIMS[head_output]
        for head_output in sorted(probe.required_outputs)
        if head_output in _CLAIMS
    ]
    return pytest.param(probe, id=probe.name, marks=pytest.mark.if_claimed(*needed))


every_probe = pytest.mark.parametrize("probe", [_parameter(probe) for probe in PROBES])
"""Decorator: the law runs once for each of the six."""

AGGREGATIONS = tuple(
    Aggregation(
        mode=mode, horizon=20 if mode is AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM else None
    )
    for mode in AggregationMode
    if mode is not AggregationMode.GROUP_MEAN
)


def check_against_oracle(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    *,
    objective: Objective,
    batch: SequenceBatch,
    split: Split,
    model: TinyModel,
) -> list[Update]:
    setup = oracle.make_setup(model)
    expected = oracle.get_update(setup, objective, batch)
    updates = engine_under_test.run(
        measure_update, setup=setup, objective=objective, batch=batch, split=split
    )
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, what="gradient")
    assert_close(
        merge_update_metrics(updates)["loss"],
        merge_update_metrics([expected])["loss"],
        LOSS,
        what="loss",
        min_scale=LOSS_TERM_SCALE,
    )
    return updates


@every_probe
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_gradient_is_independent_of_micro_batch_split(
    engine_under_test: EngineUnderTest, oracle: OracleCache, probe: Objective, split: Split
) -> None:
    check_against_oracle(
        engine_under_test,
        oracle,
        objective=probe,
        batch=oracle.get_batch(),
        split=split,
        model=model_with_head_for(probe),
    )


@every_probe
def test_gradient_is_independent_of_data_parallel_size(
    engine_under_test: EngineUnderTest, oracle: OracleCache, probe: Objective
) -> None:
    # Three pairs over two or four ranks: unequal numbers of sequences, and of tokens all the more.
    batch = oracle.get_batch(num_sequences=6, seed=3)
    check_against_oracle(
        engine_under_test,
        oracle,
        objective=probe,
        batch=batch,
        split=ONE_MICRO_BATCH,
        model=model_with_head_for(probe),
    )


@every_probe
def test_two_calls_then_step_equal_one_call(
    engine_under_test: EngineUnderTest, oracle: OracleCache, probe: Objective
) -> None:
    setup, batch = oracle.make_setup(model_with_head_for(probe)), oracle.get_batch()
    expected = oracle.get_update(setup, probe, batch)
    for mark_final in (True, False):
        updates = engine_under_test.run(
            update_in_two_calls,
            setup=setup,
            objective=probe,
            batch=batch,
            mark_final=mark_final,
        )
        assert_all_close(
            updates[0].gradients, expected.gradients, GRADIENT, what="gradient of two calls"
        )


def update_in_two_calls(
    rank: Rank, *, setup: EngineSetup, objective: Objective, batch: SequenceBatch, mark_final: bool
) -> Update:
    """The first two pairs, then the others, both with the denominators of the whole; the last call final or not."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(objective)
    whole = batch.with_columns(objective.prepare(batch, seed=7))
    denominators = rank_slice(engine, whole, split=ONE_MICRO_BATCH).denominators
    halves = [whole.select(range(4)), whole.select(range(4, batch.num_sequences))]
    local_batches = [
        replace(rank_slice(engine, half, split=ONE_MICRO_BATCH), denominators=denominators)
        for half in halves
    ]
    return run_update(engine, local_batches, mark_final=mark_final)


@pytest.mark.parametrize("model", LANGUAGE_MODELS, ids=lambda model: model.name)
def test_gradient_matches_oracle_for_every_model(
    engine_under_test: EngineUnderTest, oracle: OracleCache, model: TinyModel
) -> None:
    batch = oracle.get_batch(model=model)
    check_against_oracle(
        engine_under_test,
        oracle,
        objective=ClippedPpoProbe(),
        batch=batch,
        split=ONE_MICRO_BATCH,
        model=model,
    )


@pytest.mark.parametrize(
    "aggregation", AGGREGATIONS, ids=lambda aggregation: aggregation.mode.value
)
def test_gradient_matches_oracle_for_every_aggregation(
    engine_under_test: EngineUnderTest, oracle: OracleCache, aggregation: Aggregation
) -> None:
    probe = ClippedPpoProbe(aggregation=aggregation)
    check_against_oracle(
        engine_under_test,
        oracle,
        objective=probe,
        batch=oracle.get_batch(),
        split=TWO_MICRO_BATCHES,
        model=QWEN2_GROUPED,
    )


def test_entropy_bonus_has_a_gradient(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    check_against_oracle(
        engine_under_test,
        oracle,
        objective=ClippedPpoProbe(entropy_coefficient=0.1),
        batch=oracle.get_batch(),
        split=TWO_MICRO_BATCHES,
        model=QWEN2_GROUPED,
    )


def test_sft_loss_is_the_mean_over_all_trained_tokens(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    logprobs = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    expected = -logprobs[batch.loss_mask].double().mean()
    for split in SPLITS:
        updates = engine_under_test.run(
            measure_update, setup=setup, objective=SftProbe(), batch=batch, split=split
        )
        assert_close(
            merge_update_metrics(updates)["loss"],
            expected,
            LOSS,
            what="loss",
            min_scale=LOSS_TERM_SCALE,
        )


def test_first_response_token_contributes(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    # One sequence of 2 prompt tokens; of its response only the first token, at index 2, is trained. Its label is itself, so the loss is
    # -log p(tokens[2] | tokens[:2]).
    batch = oracle.get_batch(num_sequences=2).select([0])
    only_first = torch.zeros_like(batch.loss_mask)
    only_first[2] = True
    batch = replace(batch, loss_mask=only_first)
    setup = oracle.make_setup(QWEN2_GROUPED)
    expected = -oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)[only_first].sum()
    updates = engine_under_test.run(measure_update, setup=setup, objective=SftProbe(), batch=batch)
    assert_close(
        merge_update_metrics(updates)["loss"],
        expected,
        LOSS,
        what="loss",
        min_scale=LOSS_TERM_SCALE,
    )


def test_masked_positions_do_not_contribute(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    assert not bool(batch.loss_mask[batch.sequence_index == UNTRAINED_SEQUENCE].any())
    poisoned = {
        name: torch.where(batch.loss_mask, batch.columns[name], float("nan"))
        for name in ("old_logprobs", "advantages")
    }
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    updates = engine_under_test.run(
        measure_update,
        setup=setup,
        objective=ClippedPpoProbe(),
        batch=batch.with_columns(poisoned),
        split=TWO_MICRO_BATCHES,
    )
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, what="gradient")


@pytest.mark.parametrize(
    "probe",
    [ClippedPpoProbe(), GspoProbe(), DpoProbe(), ClipCovProbe()],
    ids=lambda probe: probe.name,
)
def test_ranks_without_samples_contribute_nothing(
    engine_under_test: EngineUnderTest, oracle: OracleCache, probe: Objective
) -> None:
    # One atom: at two ranks or more all but one hold only dummies.
    batch = oracle.get_batch(num_sequences=2, seed=1)
    check_against_oracle(
        engine_under_test,
        oracle,
        objective=probe,
        batch=batch,
        split=ONE_MICRO_BATCH,
        model=QWEN2_GROUPED,
    )


def test_gradient_norm_covers_all_ranks(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    norm = torch.cat([g.flatten().double() for g in expected.gradients.values()]).norm()
    for split in SPLITS:
        updates = engine_under_test.run(
            measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch, split=split
        )
        for update in updates:
            assert_close(update.grad_norm, norm, LOSS, what="gradient norm")


def test_metrics_do_not_scale_with_ranks_or_micro_batches(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    logprobs = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    ratio = (logprobs - batch.columns["old_logprobs"]).exp()[batch.loss_mask].double().mean()
    for split in SPLITS:
        updates = engine_under_test.run(
            measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch, split=split
        )
        assert_close(merge_update_metrics(updates)["ratio"], ratio, LOSS, what="mean ratio")


@pytest.mark.bitwise
def test_repeated_update_is_bitwise_equal(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    first, second = (
        engine_under_test.run(
            measure_update,
            setup=setup,
            objective=ClippedPpoProbe(),
            batch=batch,
            split=TWO_MICRO_BATCHES,
        )[0]
        for _ in range(2)
    )
    assert all(
        torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients
    )
