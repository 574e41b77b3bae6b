"""Conformance tests for the optimizer, beyond a few ordinary language model updates."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    TWO_MICRO_BATCHES,
    Update,
    measure_updates,
)
from temper_engine_api.conformance.harness.rank import ADAMW
from temper_engine_api.conformance.harness.tolerances import (
    LOSS,
    UPDATE,
    assert_all_close,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.probes import (
    ClippedPpoProbe,
    ClippedValueProbe,
    ScoreProbe,
    SftProbe,
)
from temper_engine_api.conformance.inputs.tiny_models import (
    QWEN2_GROUPED,
    REWARD,
    VALUE,
    TinyModel,
)
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.objective import Objective
from temper_engine_api.specs import OptimizerSpec, ScheduleSpec

NUM_UPDATES = 10
FLOAT32_ROOT = math.sqrt(torch.finfo(torch.float32).max)
"""Largest norm whose square is finite in float32: 1.8e19."""


def check_states(update: Update, expected: Update) -> None:
    """Compare weights, moments, counts and norm after an update."""
    assert_close(update.grad_norm, expected.grad_norm, UPDATE, quantity="gradient norm")
    assert_all_close(update.masters, expected.masters, UPDATE, quantity="weights")
    assert_all_close(update.gradients, expected.gradients, UPDATE, quantity="first moment")
    assert {name: state.update_count for name, state in update.state.items()} == {
        name: state.update_count for name, state in expected.state.items()
    }


def test_ten_updates_match_adamw(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    """Compare norms, weights and moments of ten AdamW updates with the oracle's.

    Bias correction changes most in the first updates, but has not ended after three.
    """
    # A loss without clipping: rounding may not decide which tokens are trained. fp32 also in a run
    # with bf16 compute, because rounding errors would grow over the updates.
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=replace(ADAMW, lr=2e-3), compute="fp32")
    batches = [oracle.get_batch(num_sequences=4, seed=number % 2) for number in range(NUM_UPDATES)]
    expected = oracle.run(measure_updates, setup=setup, objective=SftProbe(), batches=batches)
    updates = engine_under_test.run(
        measure_updates, setup=setup, objective=SftProbe(), batches=batches
    )[0]
    for update, expected_update in zip(updates, expected, strict=True):
        check_states(update, expected_update)


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        pytest.param(
            VALUE,
            ClippedValueProbe(),
            id="value",
            marks=pytest.mark.if_claimed(Capability.VALUE_MODEL),
        ),
        pytest.param(
            REWARD,
            ScoreProbe(),
            id="reward",
            marks=pytest.mark.if_claimed(Capability.REWARD_MODEL),
        ),
    ],
)
def test_training_changes_the_head(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    model: TinyModel,
    objective: Objective,
) -> None:
    """Compare two updates of a value or reward model with the oracle's; the head must move."""
    setup, batch = oracle.make_setup(model, optimizer=ADAMW), oracle.get_batch()
    expected = oracle.run(measure_updates, setup=setup, objective=objective, batches=[batch, batch])
    updates = engine_under_test.run(
        measure_updates,
        setup=setup,
        objective=objective,
        batches=[batch, batch],
        split=TWO_MICRO_BATCHES,
    )[0]
    heads = [update.masters["score.weight"] for update in updates]
    assert not torch.equal(heads[0], heads[1]), "training does not change the head"
    check_states(updates[-1], expected[-1])


def test_nonfinite_gradient_skips_the_step_without_clipping(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that a gradient that is not finite changes nothing with `clip_grad_norm` None."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=replace(ADAMW, clip_grad_norm=None))
    good = oracle.get_batch()
    advantages = good.columns["advantages"].clone()
    # A single trained token is infinite, so only one data-parallel rank sees it locally.
    advantages[int(good.loss_mask.nonzero()[0])] = math.inf
    for first, skipped in engine_under_test.run(
        measure_updates,
        setup=setup,
        objective=ClippedPpoProbe(),
        batches=[good, good.with_columns({"advantages": advantages})],
    ):
        assert skipped.report.outcome == "nonfinite"
        assert not math.isfinite(skipped.grad_norm)
        assert_same_state(skipped.state, first.state)


@pytest.mark.parametrize(
    "norm",
    [
        # No tensor's own norm exceeds FLOAT32_ROOT, so squares have to be summed in float64.
        pytest.param(2.5e19, id="sum"),
        # Norms of tensors exceed it too, so these have to be computed with care.
        pytest.param(1e24, id="tensors"),
    ],
)
def test_norm_whose_square_overflows_is_clipped(
    engine_under_test: EngineUnderTest, oracle: OracleCache, norm: float
) -> None:
    """Check that a finite gradient whose squared norm exceeds float32 is clipped and applied."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    huge = _scale_gradient(oracle, norm=norm)
    expected = oracle.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=[huge]
    )[0]
    update = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=[huge]
    )[0][0]
    assert update.report.outcome == "stepped", f"a finite norm of {norm} was not clipped"
    check_states(update, expected)


def test_update_without_clipping_leaves_finite_moments(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that a gradient of norm 1e24 is skipped if it is not clipped.

    Its squares exceed float32. Second moments would become infinite, and stay so: the weights
    would never change again.
    """
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=replace(ADAMW, clip_grad_norm=None))
    good, huge = oracle.get_batch(), _scale_gradient(oracle, norm=1e24)
    for first, skipped in engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=[good, huge]
    ):
        assert skipped.report.outcome == "nonfinite"
        assert_same_state(skipped.state, first.state)


def _scale_gradient(oracle: OracleCache, *, norm: float) -> SequenceBatch:
    """Return the default batch with advantages such that its gradient has this norm."""
    batch = oracle.get_batch()
    gradients = oracle.get_update(
        oracle.make_setup(QWEN2_GROUPED), ClippedPpoProbe(), batch
    ).gradients
    norms = torch.stack([gradient.double().norm() for gradient in gradients.values()])
    factor = norm / float(norms.norm())
    assert (float(norms.max()) * factor > FLOAT32_ROOT) == (norm > 2.5e19)
    return batch.with_columns({"advantages": batch.columns["advantages"] * factor})


def test_zero_gradient_decays_weights_and_moments(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare an update whose gradient is zero with the oracle's: weights and moments decay.

    The same holds for one parameter, such as an expert that got no token.
    """
    setup, good = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW), oracle.get_batch()
    zero = good.with_columns({"advantages": torch.zeros_like(good.columns["advantages"])})
    expected = oracle.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=[good, zero]
    )
    updates = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=[good, zero]
    )[0]
    assert updates[1].report.outcome == "stepped"
    assert updates[1].grad_norm == 0.0
    check_states(updates[1], expected[1])


def test_weight_decay_follows_the_schedule(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that weights decay by the scheduled learning rate, not by the highest one.

    With betas 0 and a huge eps only the decay is left: a factor 1 - lr decay for matrices.
    """
    decays = OptimizerSpec(
        lr=0.4, betas=(0.0, 0.0), eps=1e30, weight_decay=0.5, clip_grad_norm=None
    )
    setup = oracle.make_setup(
        QWEN2_GROUPED, optimizer=decays, schedule=ScheduleSpec(warmup_steps=4)
    )
    updates = engine_under_test.run(
        measure_updates,
        setup=setup,
        objective=ClippedPpoProbe(),
        batches=[oracle.get_batch()] * 3,
    )[0]
    for step, (before, after) in enumerate(pairwise(updates), start=1):
        factor = 1 - 0.4 * (step + 1) / 4 * 0.5
        for name, weight in after.masters.items():
            if weight.ndim >= 2:
                assert_close(weight, factor * before.masters[name], LOSS, quantity=name)
