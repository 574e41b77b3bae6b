"""Comparisons of the engine under test with the oracle that several groups of tests make."""

from collections.abc import Collection

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
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.objective import HeadOutput, Objective


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
