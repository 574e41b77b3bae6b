"""Laws: values belong to the state before a token, scores to the last token of a sequence."""

from dataclasses import replace

import pytest
import torch

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.measurements import (
    SPLITS,
    measure_outputs,
    measure_update,
)
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    assert_all_close,
    assert_close,
)
from temper_engine_api.conformance.inputs.probes import ValueProbe
from temper_engine_api.conformance.inputs.tiny_models import REWARD, VALUE
from temper_engine_api.conformance.oracle.oracle_cache import Reference
from temper_engine_api.objective import HeadOutput


@pytest.mark.claims(Capability.VALUE_MODEL)
def test_values_equal_the_oracle(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(VALUE), reference.batch()
    expected = reference.outputs(recipe, batch, HeadOutput.VALUE)
    for split in SPLITS:
        outputs = subject.run(
            measure_outputs,
            recipe=recipe,
            batch=batch,
            requested_outputs=[HeadOutput.VALUE],
            split=split,
        )[0]
        assert_close(
            outputs.columns[HeadOutput.VALUE], expected, LOGPROB, what=f"values, split {split.name}"
        )


@pytest.mark.claims(Capability.VALUE_MODEL)
def test_a_value_does_not_see_its_own_token(subject: Subject, reference: Reference) -> None:
    # Another last token changes nothing: the value at t is that of the state before tokens[t].
    recipe, batch = reference.recipe(VALUE), reference.batch(num_sequences=2).select([0])
    changed = batch.tokens.clone()
    changed[-1] = (changed[-1] + 1) % 211
    before, after = (
        subject.run(
            measure_outputs, recipe=recipe, batch=each, requested_outputs=[HeadOutput.VALUE]
        )[0].columns[HeadOutput.VALUE]
        for each in (batch, replace(batch, tokens=changed))
    )
    assert_close(after, before, LOGPROB, what="values")


@pytest.mark.claims(Capability.VALUE_MODEL)
def test_value_loss_ignores_prompts(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(VALUE), reference.batch()
    poisoned = torch.where(batch.loss_mask, batch.columns["returns"], float("nan"))
    expected = reference.update(recipe, ValueProbe(), batch)
    updates = subject.run(
        measure_update,
        recipe=recipe,
        objective=ValueProbe(),
        batch=batch.with_columns({"returns": poisoned}),
    )
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, what="gradient")


@pytest.mark.claims(Capability.REWARD_MODEL)
def test_scores_are_read_at_the_last_token(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(REWARD), reference.batch()
    expected = reference.outputs(recipe, batch, HeadOutput.SCORE)
    for split in SPLITS:
        outputs = subject.run(
            measure_outputs,
            recipe=recipe,
            batch=batch,
            requested_outputs=[HeadOutput.SCORE],
            split=split,
        )[0]
        assert_close(
            outputs.columns[HeadOutput.SCORE], expected, LOGPROB, what=f"scores, split {split.name}"
        )
