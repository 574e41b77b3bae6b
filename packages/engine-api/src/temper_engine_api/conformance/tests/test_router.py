"""Conformance tests of the routers of MoE models: their losses, and the loads of experts."""

import pytest

from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    FIVE_MICRO_BATCHES,
    ONE_MICRO_BATCH,
    measure_update,
    merge_update_metrics,
)
from temper_engine_api.conformance.harness.rank import EngineSetup
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOSS,
    assert_all_close,
    assert_close,
)
from temper_engine_api.conformance.inputs.probes import ZeroProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache

pytestmark = [pytest.mark.moe, pytest.mark.if_configurable("router_aux_loss", "router_z_loss")]

LOSSES = {"router_aux_loss": "router/load_balancing_loss", "router_z_loss": "router/z_loss"}
"""Metric of each loss by the name of its coefficient."""
LOADS = ("router/max_load", "router/max_load_of_worst_layer", "router/idle_experts")


def make_setup(oracle: OracleCache, **coefficients: float) -> EngineSetup:
    """Return a setup in float32: bf16 would send some tokens to other experts."""
    return oracle.make_setup(
        QWEN2_GROUPED, engine_fields=tuple(coefficients.items()), compute="fp32"
    )


@pytest.mark.parametrize("coefficient", LOSSES)
def test_router_loss_matches_transformers(
    engine_under_test: EngineUnderTest, oracle: OracleCache, coefficient: str
) -> None:
    """Compare the gradient of a router loss with that of transformers, one sequence at a time.

    It must not depend on how sequences of odd lengths are packed, split and divided over ranks.
    """
    setup, batch = make_setup(oracle, **{coefficient: 0.1}), oracle.get_batch()
    expected = oracle.get_update(setup, ZeroProbe(), batch)
    for split in (ONE_MICRO_BATCH, FIVE_MICRO_BATCHES):
        updates = engine_under_test.run(
            measure_update, setup=setup, objective=ZeroProbe(), batch=batch, split=split
        )
        assert_all_close(
            updates[0].gradients,
            expected.gradients,
            GRADIENT,
            quantity=f"gradient of {coefficient}",
        )
        name = LOSSES[coefficient]
        assert_close(
            merge_update_metrics(updates)[name],
            merge_update_metrics([expected])[name],
            LOSS,
            quantity=name,
        )


def test_expert_loads_are_those_of_all_ranks(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare the metrics of the loads of experts with counts of transformers' choices."""
    setup, batch = make_setup(oracle), oracle.get_batch()
    expected = merge_update_metrics([oracle.get_update(setup, ZeroProbe(), batch)])
    # With more micro-batches than pairs of samples there are dummies, which are no load.
    for split in (ONE_MICRO_BATCH, FIVE_MICRO_BATCHES):
        actual = merge_update_metrics(
            engine_under_test.run(
                measure_update, setup=setup, objective=ZeroProbe(), batch=batch, split=split
            )
        )
        for name in LOADS:
            assert_close(actual[name], expected[name], LOSS, quantity=name)
