"""Conformance tests of the RFC's training loop, with a callable and with an objective."""

import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.rfc_loop import (
    LoopResult,
    MeanOfRankMeans,
    mean_cost,
    postprocess_fn,
    preprocess_fn,
    rfc_loop,
)
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    LOSS,
    LOSS_TERM_SCALE,
    UPDATE,
    assert_all_close,
    assert_close,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import ScheduleSpec

LINEAR_DECAY = ScheduleSpec(kind="linear", total_steps=8)


def test_rfc_loop_with_a_callable(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    """The RFC's loop with a callable loss and both hooks gives the oracle's numbers.

    The loss is each rank's own mean, so the oracle computes the mean of the ranks' means.
    """
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=LINEAR_DECAY)
    batches = [oracle.get_batch(seed=seed) for seed in range(3)]
    results = engine_under_test.run(
        rfc_loop,
        setup=setup,
        batches=batches,
        loss_fn=mean_cost,
        preprocess_fn=preprocess_fn,
        postprocess_fn=postprocess_fn,
    )
    expected = oracle.run(
        rfc_loop,
        setup=setup,
        batches=batches,
        # The oracle has one rank, so its loss needs to know how many ranks share the rows.
        loss_fn=MeanOfRankMeans(results[0].dp.size),
        preprocess_fn=preprocess_fn,
        postprocess_fn=postprocess_fn,
    )
    assert_same_loop(results, expected)
    # Two hooks in three training calls and one evaluation; postprocess_fn needs predictions.
    assert {result.num_hook_calls for result in results if result.evaluated is not None} == {8}


def test_rfc_loop_with_an_objective(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The RFC's loop with an objective gives the oracle's numbers.

    Rows are on other ranks than a plan would put them; the denominators are still the mini-batch's.
    """
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=LINEAR_DECAY)
    batches = [oracle.get_batch(seed=seed) for seed in range(3)]
    results = engine_under_test.run(
        rfc_loop, setup=setup, batches=batches, loss_fn=ClippedPpoProbe()
    )
    assert_same_loop(
        results, oracle.run(rfc_loop, setup=setup, batches=batches, loss_fn=ClippedPpoProbe())
    )


def assert_same_loop(results: list[LoopResult], expected: LoopResult) -> None:
    """Compare losses, norms and rates on every rank, and the final weights."""
    for result in results:
        for loss, expected_value in zip(result.losses, expected.losses, strict=True):
            assert_close(loss, expected_value, LOSS, quantity="loss", min_scale=LOSS_TERM_SCALE)
        for norm, expected_value in zip(result.grad_norms, expected.grad_norms, strict=True):
            assert_close(norm, expected_value, UPDATE, quantity="gradient norm")
        assert result.next_lrs == expected.next_lrs
    masters = [
        {name: entry.master for name, entry in each.state.items()}
        for each in (results[0], expected)
    ]
    assert_all_close(masters[0], masters[1], UPDATE, quantity="weights")


def test_rfc_predictions_are_detached(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Predictions are detached, cover the rank's own rows, and are 0 at untrained positions."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    logprobs = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    results = engine_under_test.run(
        rfc_loop, setup=setup, batches=[batch], loss_fn=ClippedPpoProbe()
    )
    for result in results:
        rows = range(result.dp.rank, batch.num_sequences, result.dp.size)
        own_rows = batch.with_columns({"expected": logprobs}).select(rows)
        # A rank that returns no predictions; another rank of its replica does.
        if result.first_predictions is None or result.evaluated is None:
            continue
        assert not result.first_predictions.requires_grad
        assert_close(
            result.evaluated,
            own_rows.columns["expected"],
            LOGPROB,
            quantity="predictions, forward only",
            batch=own_rows,
        )
        trained = torch.where(own_rows.loss_mask, own_rows.columns["expected"], 0.0)
        assert_close(
            result.first_predictions,
            trained,
            LOGPROB,
            quantity="predictions in training",
            batch=own_rows,
        )


def test_rfc_calls_accumulate_gradients(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Two equal calls before a step give twice one call's gradient."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    once, twice = (
        engine_under_test.run(
            compute_gradients_by_rfc_calls, setup=setup, batch=batch, num_calls=n
        )[0]
        for n in (1, 2)
    )
    assert_all_close(
        twice,
        {name: 2 * gradient for name, gradient in once.items()},
        GRADIENT,
        quantity="gradient",
    )


def compute_gradients_by_rfc_calls(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, num_calls: int
) -> dict[str, torch.Tensor]:
    """Call a callable loss `num_calls` times before the step; return the gradients."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(mean_cost)
    dp = engine.topology.dp
    rows = batch.select(range(dp.rank, batch.num_sequences, dp.size))
    with engine.train_mode():
        for _ in range(num_calls):
            engine.forward_backward_step(rows, {"calls": 0}, postprocess_fn=postprocess_fn)
    engine.optimizer_step()
    return {entry.name: entry.first_moment.cpu() for entry in engine.export_state()}
