"""Conformance tests of loss and gradient: both are independent of the mini-batch's split."""

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
    ConstantProbe,
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
from temper_engine_api.conformance.oracle.oracle_comparison import check_update
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
"""Decorator that runs a test once with each probe objective that the engine can compute."""

# DpoProbe covers GROUP_MEAN.
AGGREGATIONS = tuple(
    Aggregation(
        mode=mode, horizon=20 if mode is AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM else None
    )
    for mode in AggregationMode
    if mode is not AggregationMode.GROUP_MEAN
)


@every_probe
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_gradient_is_independent_of_micro_batch_split(
    engine_under_test: EngineUnderTest, oracle: OracleCache, probe: Objective, split: Split
) -> None:
    """Every split into micro-batches gives the oracle's gradients and loss.

    A difference in one split only usually means that a loss or gradient is averaged over micro-
    batches.
    """
    check_update(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(model_with_head_for(probe)),
        objective=probe,
        batch=oracle.get_batch(),
        split=split,
    )


@every_probe
def test_gradient_is_independent_of_data_parallel_size(
    engine_under_test: EngineUnderTest, oracle: OracleCache, probe: Objective
) -> None:
    """Ranks with unequal sample and token counts give the oracle's gradients and loss.

    Three pairs are spread over the data-parallel ranks. An engine that averages each rank's mean
    gradient instead of dividing by the global token count fails here.
    """
    batch = oracle.get_batch(num_sequences=6, seed=3)
    check_update(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(model_with_head_for(probe)),
        objective=probe,
        batch=batch,
        split=ONE_MICRO_BATCH,
    )


@every_probe
def test_two_calls_then_step_equal_one_call(
    engine_under_test: EngineUnderTest, oracle: OracleCache, probe: Objective
) -> None:
    """Two backward calls before one step give the gradients of one call on all samples.

    Runs with and without `final=True` on the last call: without it, `optimizer_step` must reduce
    the pending gradients itself.
    """
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
            updates[0].gradients, expected.gradients, GRADIENT, quantity="gradient of two calls"
        )


def update_in_two_calls(
    rank: Rank, *, setup: EngineSetup, objective: Objective, batch: SequenceBatch, mark_final: bool
) -> Update:
    """Train on the first two pairs, then on the rest, with the denominators of the full batch."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(objective)
    # Prepare before the split, because ClipCovProbe computes its covariance over the full
    # mini-batch.
    prepared = batch.with_columns(objective.prepare(batch, seed=7))
    # If each half had its own denominators, both would have the same weight, whatever their token
    # counts.
    denominators = rank_slice(engine, prepared, split=ONE_MICRO_BATCH).denominators
    halves = [prepared.select(range(4)), prepared.select(range(4, batch.num_sequences))]
    local_batches = [
        replace(rank_slice(engine, half, split=ONE_MICRO_BATCH), denominators=denominators)
        for half in halves
    ]
    return run_update(engine, local_batches, mark_final=mark_final)


@pytest.mark.parametrize("model", LANGUAGE_MODELS, ids=lambda model: model.name)
def test_gradient_matches_oracle_for_every_model(
    engine_under_test: EngineUnderTest, oracle: OracleCache, model: TinyModel
) -> None:
    """Compare gradients and loss with the oracle's for tied and untied heads, GQA, Llama, Qwen3."""
    batch = oracle.get_batch(model=model)
    check_update(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(model),
        objective=ClippedPpoProbe(),
        batch=batch,
        split=ONE_MICRO_BATCH,
    )


@pytest.mark.parametrize(
    "aggregation", AGGREGATIONS, ids=lambda aggregation: aggregation.mode.value
)
def test_gradient_matches_oracle_for_every_aggregation(
    engine_under_test: EngineUnderTest, oracle: OracleCache, aggregation: Aggregation
) -> None:
    """Compare gradients and loss with the oracle's for every loss aggregation mode."""
    # In two micro-batches below: in one, a mean over the micro-batch is the mean over the
    # mini-batch.
    probe = ClippedPpoProbe(aggregation=aggregation)
    check_update(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(QWEN2_GROUPED),
        objective=probe,
        batch=oracle.get_batch(),
        split=TWO_MICRO_BATCHES,
    )


def test_entropy_bonus_has_a_gradient(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The entropy that an objective requests takes part in the backward pass."""
    check_update(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(QWEN2_GROUPED),
        objective=ClippedPpoProbe(entropy_coefficient=0.1),
        batch=oracle.get_batch(),
        split=TWO_MICRO_BATCHES,
    )


def test_z_loss_has_a_gradient(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    """The logsumexp that an objective requests takes part in the backward pass."""
    check_update(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(QWEN2_GROUPED),
        objective=ClippedPpoProbe(z_loss_coefficient=0.1),
        batch=oracle.get_batch(),
        split=TWO_MICRO_BATCHES,
    )


@pytest.mark.parametrize("head_output", [HeadOutput.LOGPROB, HeadOutput.ENTROPY])
def test_loss_that_uses_no_output_has_no_gradient(
    engine_under_test: EngineUnderTest, oracle: OracleCache, head_output: HeadOutput
) -> None:
    """An objective may ignore the outputs that it requests; the gradient is 0 then."""
    probe = ConstantProbe(required_outputs=frozenset({head_output}))
    updates = engine_under_test.run(
        measure_update,
        setup=oracle.make_setup(QWEN2_GROUPED),
        objective=probe,
        batch=oracle.get_batch(),
        split=TWO_MICRO_BATCHES,
    )
    for update in updates:
        assert update.grad_norm == 0.0
    for name, gradient in updates[0].gradients.items():
        assert not gradient.any(), f"the gradient of {name} is not 0"


def test_sft_loss_is_the_mean_over_all_trained_tokens(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The merged loss metric is the mean negative log-prob over all trained tokens.

    Checked against the oracle's log-probs for every split.
    """
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
            quantity="loss",
            min_scale=LOSS_TERM_SCALE,
        )


def test_first_response_token_contributes(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The first token after the prompt is trained; its label is the token itself.

    One sequence has a prompt of 2 tokens and trains index 2 only, so the loss is -log p(tokens[2]

     tokens[:2]). A mask that is shifted by one gives 0 or another token's loss.
    """
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
        quantity="loss",
        min_scale=LOSS_TERM_SCALE,
    )


def test_masked_positions_do_not_contribute(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """NaN in the columns of untrained positions reaches neither loss nor gradient."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    assert not bool(batch.loss_mask[batch.sequence_index == UNTRAINED_SEQUENCE].any())
    poisoned = {
        # NaN shows masking by a product, since 0 * NaN is NaN; a finite value would be hidden by
        # it.
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
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, quantity="gradient")


@pytest.mark.parametrize(
    "probe",
    [ClippedPpoProbe(), GspoProbe(), DpoProbe(), ClipCovProbe()],
    ids=lambda probe: probe.name,
)
def test_ranks_without_samples_contribute_nothing(
    engine_under_test: EngineUnderTest, oracle: OracleCache, probe: Objective
) -> None:
    """Ranks that hold only dummy samples add nothing to gradients and loss.

    The batch has one indivisible pair, so with two or more data-parallel ranks all others get
    dummies.
    """
    batch = oracle.get_batch(num_sequences=2, seed=1)
    check_update(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(QWEN2_GROUPED),
        objective=probe,
        batch=batch,
        split=ONE_MICRO_BATCH,
    )


def test_gradient_norm_covers_all_ranks(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """`optimizer_step` returns the norm of the full gradient on every rank.

    The expected norm is computed from the oracle's gradients.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    # In float64: a float32 sum over all parameters has a rounding error near the tolerance.
    norm = torch.cat([g.flatten().double() for g in expected.gradients.values()]).norm()
    for split in SPLITS:
        updates = engine_under_test.run(
            measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch, split=split
        )
        for update in updates:
            # Squares do not cancel, so the norm can be compared more tightly than single gradients.
            assert_close(update.grad_norm, norm, LOSS, quantity="gradient norm")


def test_metrics_do_not_scale_with_ranks_or_micro_batches(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A merged mean metric equals the mean over all trained tokens, for every split."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    logprobs = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    ratio = (logprobs - batch.columns["old_logprobs"]).exp()[batch.loss_mask].double().mean()
    for split in SPLITS:
        updates = engine_under_test.run(
            measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch, split=split
        )
        assert_close(merge_update_metrics(updates)["ratio"], ratio, LOSS, quantity="mean ratio")


@pytest.mark.bitwise
def test_repeated_update_is_bitwise_equal(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The same update from the same weights gives bitwise equal gradients."""
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
