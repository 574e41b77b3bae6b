"""Conformance tests of value and reward models: positions of values and scores."""

from dataclasses import replace

import pytest
import torch

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
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
from temper_engine_api.conformance.inputs.probes import ClippedValueProbe
from temper_engine_api.conformance.inputs.tiny_models import REWARD, VALUE, VOCABULARY
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.oracle.oracle_comparison import check_outputs
from temper_engine_api.objective import HeadOutput


@pytest.mark.if_claimed(Capability.VALUE_MODEL)
def test_values_match_oracle(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    """Every split gives the oracle's values; V at t is the state's before tokens[t]."""
    setup, batch = oracle.make_setup(VALUE), oracle.get_batch()
    for split in SPLITS:
        check_outputs(
            engine_under_test,
            oracle,
            setup=setup,
            batch=batch,
            head_outputs=[HeadOutput.VALUE],
            split=split,
        )


@pytest.mark.if_claimed(Capability.VALUE_MODEL)
def test_value_does_not_depend_on_its_own_token(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Changing the last token does not change its value: V at t sees tokens[:t]."""
    setup, batch = oracle.make_setup(VALUE), oracle.get_batch(num_sequences=2).select([0])
    changed = batch.tokens.clone()
    changed[-1] = (changed[-1] + 1) % VOCABULARY
    before, after = (
        engine_under_test.run(
            measure_outputs, setup=setup, batch=each, requested_outputs=[HeadOutput.VALUE]
        )[0].columns[HeadOutput.VALUE]
        for each in (batch, replace(batch, tokens=changed))
    )
    assert_close(after, before, LOGPROB, quantity="values", batch=batch)


@pytest.mark.if_claimed(Capability.VALUE_MODEL)
def test_value_loss_ignores_prompts(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """NaN returns at untrained positions reach neither loss nor gradient."""
    setup, batch = oracle.make_setup(VALUE), oracle.get_batch()
    poisoned = torch.where(batch.loss_mask, batch.columns["returns"], float("nan"))
    expected = oracle.get_update(setup, ClippedValueProbe(), batch)
    updates = engine_under_test.run(
        measure_update,
        setup=setup,
        objective=ClippedValueProbe(),
        batch=batch.with_columns({"returns": poisoned}),
    )
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, quantity="gradient")


@pytest.mark.if_claimed(Capability.REWARD_MODEL)
def test_scores_are_read_at_the_last_token(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Every split gives the oracle's scores, which a reward model reads at the last token."""
    setup, batch = oracle.make_setup(REWARD), oracle.get_batch()
    for split in SPLITS:
        check_outputs(
            engine_under_test,
            oracle,
            setup=setup,
            batch=batch,
            head_outputs=[HeadOutput.SCORE],
            split=split,
        )
