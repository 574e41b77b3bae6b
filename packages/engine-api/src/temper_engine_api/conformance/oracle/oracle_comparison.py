"""Comparisons of the engine under test with the oracle that several groups of tests make."""

from collections.abc import Collection
from dataclasses import replace

import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    Split,
    Update,
    measure_outputs,
    measure_update,
    merge_update_metrics,
)
from temper_engine_api.conformance.harness.rank import EngineSetup
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    LOSS,
    LOSS_TERM_SCALE,
    Tolerance,
    assert_all_close,
    assert_close,
)
from temper_engine_api.conformance.inputs.batches import make_ragged_batch
from temper_engine_api.conformance.inputs.tiny_models import QWEN3, ROUTED, UNROUTED, TinyModel
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.objective import ROUTED_EXPERTS, HeadOutput, Objective

MAX_REPLAYED_MISMATCH = 1.5
"""Largest mismatch of a MoE model with routing replay, relative to that of a dense model."""


def check_outputs(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    *,
    setup: EngineSetup,
    batch: SequenceBatch,
    head_outputs: Collection[HeadOutput],
    split: Split = ONE_MICRO_BATCH,
    tolerance: Tolerance = LOGPROB,
) -> None:
    """Request head outputs in one forward pass, and compare them with the oracle's.

    `split` divides the batch into micro-batches.
    """
    outputs = engine_under_test.run(
        measure_outputs, setup=setup, batch=batch, requested_outputs=head_outputs, split=split
    )[0]
    for head_output in head_outputs:
        assert_close(
            outputs.columns[head_output],
            oracle.get_outputs(setup, batch, head_output),
            tolerance,
            quantity=f"{head_output.value}, split {split.name}",
            batch=batch,
            num_ranks=engine_under_test.num_data_ranks,
        )


def check_update(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    *,
    setup: EngineSetup,
    objective: Objective,
    batch: SequenceBatch,
    split: Split = ONE_MICRO_BATCH,
    tolerance: Tolerance = GRADIENT,
) -> list[Update]:
    """Compare gradients and merged loss with the oracle's, and return each rank's update.

    `split` divides the batch into micro-batches.
    """
    expected = oracle.get_update(setup, objective, batch)
    updates = engine_under_test.run(
        measure_update, setup=setup, objective=objective, batch=batch, split=split
    )
    assert_all_close(updates[0].gradients, expected.gradients, tolerance, quantity="gradient")
    assert_close(
        merge_update_metrics(updates)["loss"],
        merge_update_metrics([expected])["loss"],
        LOSS,
        quantity="loss",
        min_scale=LOSS_TERM_SCALE,
    )
    return updates


def check_replayed_mismatch(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    """Check that routing replay leaves a mismatch that a dense model has, too.

    A layout with expert parallelism has no dense models. There the baseline is a model that uses
    all its experts.
    """
    baseline_model = UNROUTED if engine_under_test.layout.has_experts else QWEN3
    baseline = measure_mismatch(engine_under_test, oracle, model=baseline_model)
    replayed = measure_mismatch(engine_under_test, oracle, model=ROUTED, replays=True)
    assert replayed <= MAX_REPLAYED_MISMATCH * baseline, (
        f"with replayed experts, log-probs of sampler and engine differ by {replayed:.2g} (root "
        f"mean square), but those of {baseline_model.name} by {baseline:.2g}: at most "
        f"{MAX_REPLAYED_MISMATCH} times as much is allowed"
    )


def measure_mismatch(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    *,
    model: TinyModel,
    replays: bool = False,
) -> float:
    """Return the root mean square difference of log-probs between a sampler and the engine.

    The sampler is the oracle in bf16, and the engine computes in float32.

    Args:
        engine_under_test: The engine.
        oracle: A cache for dense models, which leaves the model as it is.
        model: Model of both.
        replays: True if the engine uses the experts that the sampler chose.
    """
    sampler, batch = oracle.make_setup(model, compute="bf16"), make_ragged_batch(num_sequences=48)
    expected = oracle.get_outputs(sampler, batch, HeadOutput.LOGPROB)
    if replays:
        experts = oracle.get_outputs(sampler, batch, HeadOutput.ROUTED_EXPERTS)
        batch = batch.with_columns({ROUTED_EXPERTS: experts.to(torch.int16)})
    outputs = engine_under_test.run(
        measure_outputs,
        setup=replace(sampler, compute="fp32"),
        batch=batch,
        requested_outputs=[HeadOutput.LOGPROB],
    )[0]
    return float((outputs.columns[HeadOutput.LOGPROB] - expected).square().mean().sqrt())
