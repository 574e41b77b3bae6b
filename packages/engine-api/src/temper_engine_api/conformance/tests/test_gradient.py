"""Laws: the mini-batch has one loss and one gradient, however it is split over micro-batches, calls and ranks."""

from dataclasses import replace

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.measurements import (
    SPLITS,
    WHOLE,
    Split,
    Update,
    measure_update,
    merged,
    share_of,
    update_once,
)
from temper_engine_api.conformance.harness.rank import Rank, Recipe
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOSS,
    LOSS_TERMS,
    assert_all_close,
    assert_close,
)
from temper_engine_api.conformance.inputs.batches import MASKED_SEQUENCE
from temper_engine_api.conformance.inputs.probes import (
    PROBES,
    BatchStatisticProbe,
    LikelihoodProbe,
    PairProbe,
    SequenceProbe,
    TokenProbe,
)
from temper_engine_api.conformance.inputs.tiny_models import (
    LANGUAGE_MODELS,
    QWEN2_GROUPED,
    TinyModel,
)
from temper_engine_api.conformance.oracle.oracle_cache import Reference, model_for
from temper_engine_api.objective import Aggregation, AggregationMode, HeadOutput, Objective

_CLAIMS = {HeadOutput.VALUE: Capability.VALUE_MODEL, HeadOutput.LOGPROB_AT: Capability.LOGPROB_AT}


def _parameter(probe: Objective) -> object:
    needed = [
        _CLAIMS[head_output]
        for head_output in sorted(probe.required_outputs)
        if head_output in _CLAIMS
    ]
    return pytest.param(probe, id=probe.name, marks=pytest.mark.claims(*needed))


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
    subject: Subject,
    reference: Reference,
    *,
    objective: Objective,
    batch: SequenceBatch,
    split: Split,
    model: TinyModel,
) -> list[Update]:
    recipe = reference.recipe(model)
    expected = reference.update(recipe, objective, batch)
    updates = subject.run(
        measure_update, recipe=recipe, objective=objective, batch=batch, split=split
    )
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, what="gradient")
    assert_close(
        merged(updates)["loss"], merged([expected])["loss"], LOSS, what="loss", at_least=LOSS_TERMS
    )
    return updates


@every_probe
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_gradient_is_independent_of_micro_batch_split(
    subject: Subject, reference: Reference, probe: Objective, split: Split
) -> None:
    check_against_oracle(
        subject,
        reference,
        objective=probe,
        batch=reference.batch(),
        split=split,
        model=model_for(probe),
    )


@every_probe
def test_gradient_is_independent_of_data_parallel_size(
    subject: Subject, reference: Reference, probe: Objective
) -> None:
    # Three pairs over two or four ranks: unequal numbers of sequences, and of tokens all the more.
    batch = reference.batch(num_sequences=6, seed=3)
    check_against_oracle(
        subject, reference, objective=probe, batch=batch, split=WHOLE, model=model_for(probe)
    )


@every_probe
def test_two_calls_then_step_equal_one_call(
    subject: Subject, reference: Reference, probe: Objective
) -> None:
    recipe, batch = reference.recipe(model_for(probe)), reference.batch()
    expected = reference.update(recipe, probe, batch)
    for is_final_sent in (True, False):
        updates = subject.run(
            update_in_two_calls,
            recipe=recipe,
            objective=probe,
            batch=batch,
            is_final_sent=is_final_sent,
        )
        assert_all_close(
            updates[0].gradients, expected.gradients, GRADIENT, what="gradient of two calls"
        )


def update_in_two_calls(
    rank: Rank, *, recipe: Recipe, objective: Objective, batch: SequenceBatch, is_final_sent: bool
) -> Update:
    """The first two pairs, then the others, both with the denominators of the whole; the last call final or not."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(objective)
    whole = batch.with_columns(objective.prepare(batch, seed=7))
    denominators = share_of(engine, whole, split=WHOLE).denominators
    halves = [whole.select(range(4)), whole.select(range(4, batch.num_sequences))]
    shares = [
        replace(share_of(engine, half, split=WHOLE), denominators=denominators) for half in halves
    ]
    return update_once(engine, shares, is_final_sent=is_final_sent)


@pytest.mark.parametrize("model", LANGUAGE_MODELS, ids=lambda model: model.name)
def test_gradient_equals_the_oracle_for_every_model(
    subject: Subject, reference: Reference, model: TinyModel
) -> None:
    batch = reference.batch(model=model)
    check_against_oracle(
        subject, reference, objective=TokenProbe(), batch=batch, split=WHOLE, model=model
    )


@pytest.mark.parametrize(
    "aggregation", AGGREGATIONS, ids=lambda aggregation: aggregation.mode.value
)
def test_gradient_equals_the_oracle_for_every_aggregation(
    subject: Subject, reference: Reference, aggregation: Aggregation
) -> None:
    probe = TokenProbe(aggregation=aggregation)
    check_against_oracle(
        subject,
        reference,
        objective=probe,
        batch=reference.batch(),
        split=SPLITS[1],
        model=QWEN2_GROUPED,
    )


def test_an_entropy_bonus_has_a_gradient(subject: Subject, reference: Reference) -> None:
    check_against_oracle(
        subject,
        reference,
        objective=TokenProbe(entropy_coefficient=0.1),
        batch=reference.batch(),
        split=SPLITS[1],
        model=QWEN2_GROUPED,
    )


def test_sft_loss_is_the_mean_over_all_trained_tokens(
    subject: Subject, reference: Reference
) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    logprobs = reference.outputs(recipe, batch, HeadOutput.LOGPROB)
    expected = -logprobs[batch.loss_mask].double().mean()
    for split in SPLITS:
        updates = subject.run(
            measure_update, recipe=recipe, objective=LikelihoodProbe(), batch=batch, split=split
        )
        assert_close(merged(updates)["loss"], expected, LOSS, what="loss", at_least=LOSS_TERMS)


def test_first_response_token_contributes(subject: Subject, reference: Reference) -> None:
    # One sequence of 2 prompt tokens; of its response only the first token, at index 2, is trained. Its label is itself, so the loss is
    # -log p(tokens[2] | tokens[:2]).
    batch = reference.batch(num_sequences=2).select([0])
    only_first = torch.zeros_like(batch.loss_mask)
    only_first[2] = True
    batch = replace(batch, loss_mask=only_first)
    recipe = reference.recipe(QWEN2_GROUPED)
    expected = -reference.outputs(recipe, batch, HeadOutput.LOGPROB)[only_first].sum()
    updates = subject.run(measure_update, recipe=recipe, objective=LikelihoodProbe(), batch=batch)
    assert_close(merged(updates)["loss"], expected, LOSS, what="loss", at_least=LOSS_TERMS)


def test_nothing_leaks_from_masked_positions(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    assert not bool(batch.loss_mask[batch.sequence_index == MASKED_SEQUENCE].any())
    poisoned = {
        name: torch.where(batch.loss_mask, batch.columns[name], float("nan"))
        for name in ("old_logprobs", "advantages")
    }
    expected = reference.update(recipe, TokenProbe(), batch)
    updates = subject.run(
        measure_update,
        recipe=recipe,
        objective=TokenProbe(),
        batch=batch.with_columns(poisoned),
        split=SPLITS[1],
    )
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, what="gradient")


@pytest.mark.parametrize(
    "probe",
    [TokenProbe(), SequenceProbe(), PairProbe(), BatchStatisticProbe()],
    ids=lambda probe: probe.name,
)
def test_ranks_without_samples_add_nothing(
    subject: Subject, reference: Reference, probe: Objective
) -> None:
    # One atom: at two ranks or more all but one hold only dummies.
    batch = reference.batch(num_sequences=2, seed=1)
    check_against_oracle(
        subject, reference, objective=probe, batch=batch, split=WHOLE, model=QWEN2_GROUPED
    )


def test_gradient_norm_is_that_of_the_whole_gradient(
    subject: Subject, reference: Reference
) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    expected = reference.update(recipe, TokenProbe(), batch)
    norm = torch.cat([g.flatten().double() for g in expected.gradients.values()]).norm()
    for split in SPLITS:
        updates = subject.run(
            measure_update, recipe=recipe, objective=TokenProbe(), batch=batch, split=split
        )
        for update in updates:
            assert_close(update.grad_norm, norm, LOSS, what="gradient norm")


def test_metrics_do_not_scale_with_ranks_or_micro_batches(
    subject: Subject, reference: Reference
) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    logprobs = reference.outputs(recipe, batch, HeadOutput.LOGPROB)
    ratio = (logprobs - batch.columns["old_logprobs"]).exp()[batch.loss_mask].double().mean()
    for split in SPLITS:
        updates = subject.run(
            measure_update, recipe=recipe, objective=TokenProbe(), batch=batch, split=split
        )
        assert_close(merged(updates)["ratio"], ratio, LOSS, what="mean ratio")


@pytest.mark.bitwise
def test_the_same_update_twice_gives_the_same_bits(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    first, second = (
        subject.run(
            measure_update, recipe=recipe, objective=TokenProbe(), batch=batch, split=SPLITS[1]
        )[0]
        for _ in range(2)
    )
    assert all(
        torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients
    )
