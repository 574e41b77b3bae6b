"""Conformance tests for MoE routers: losses, expert load and routing replay."""

import gc

import pytest
import torch
from torch import nn

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    FIVE_MICRO_BATCHES,
    ONE_MICRO_BATCH,
    measure_outputs,
    measure_update,
    merge_update_metrics,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    LOSS,
    assert_all_close,
    assert_close,
    get_family_gradient,
)
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe, ZeroProbe
from temper_engine_api.conformance.inputs.tiny_models import EXPERTS, QWEN2_GROUPED, TinyModel
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.oracle.oracle_comparison import check_replayed_mismatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError
from temper_engine_api.objective import ROUTED_EXPERTS, HeadOutput

pytestmark = pytest.mark.moe

LOSSES = {"router_aux_loss": "router/load_balancing_loss", "router_z_loss": "router/z_loss"}
"""Metric name for each loss, by its coefficient's name."""
LOADS = ("router/max_load", "router/max_load_of_worst_layer", "router/idle_experts")


def make_setup(oracle: OracleCache, **coefficients: float) -> EngineSetup:
    """Return a setup in float32: bf16 would send some tokens to other experts."""
    return oracle.make_setup(
        QWEN2_GROUPED, engine_fields=tuple(coefficients.items()), compute="fp32"
    )


@pytest.mark.if_configurable("router_aux_loss", "router_z_loss")
@pytest.mark.parametrize("coefficient", LOSSES)
def test_router_loss_matches_transformers(
    engine_under_test: EngineUnderTest, oracle: OracleCache, coefficient: str
) -> None:
    """Compare a router loss's gradient with transformers, one sequence at a time.

    It must not depend on how odd-length sequences are packed, split and divided across ranks.
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


@pytest.mark.if_configurable("router_aux_loss", "router_z_loss")
def test_expert_loads_are_those_of_all_ranks(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare the metrics for expert load with counts of transformers' choices."""
    setup, batch = make_setup(oracle), oracle.get_batch()
    expected = merge_update_metrics([oracle.get_update(setup, ZeroProbe(), batch)])
    # Five micro-batches need dummies, which must not count as load.
    for split in (ONE_MICRO_BATCH, FIVE_MICRO_BATCHES):
        actual = merge_update_metrics(
            engine_under_test.run(
                measure_update, setup=setup, objective=ZeroProbe(), batch=batch, split=split
            )
        )
        for name in LOADS:
            assert_close(actual[name], expected[name], LOSS, quantity=name)


def prescribe_experts(
    oracle: OracleCache, *, model: TinyModel = QWEN2_GROUPED, num_layers: int = 4
) -> SequenceBatch:
    """Return a batch that prescribes random experts for each token but a sequence's last one."""
    batch = oracle.get_batch(model=model)
    draw = torch.Generator().manual_seed(3)
    num_experts, num_chosen = EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]
    noise = torch.rand(batch.num_tokens, num_layers, int(str(num_experts)), generator=draw)
    experts = noise.topk(int(str(num_chosen))).indices.to(torch.int16)
    experts[batch.sequence_starts[1:].long() - 1] = -1
    return batch.with_columns({ROUTED_EXPERTS: experts})


@pytest.mark.if_claimed(Capability.ROUTING_REPLAY)
def test_log_probs_with_replayed_experts_match_transformers(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare log-probs with transformers for the same expert choices."""
    setup, batch = make_setup(oracle), prescribe_experts(oracle)
    for split in (ONE_MICRO_BATCH, FIVE_MICRO_BATCHES):
        outputs = engine_under_test.run(
            measure_outputs,
            setup=setup,
            batch=batch,
            requested_outputs=[HeadOutput.LOGPROB],
            split=split,
        )[0]
        assert_close(
            outputs.columns[HeadOutput.LOGPROB],
            oracle.get_outputs(setup, batch, HeadOutput.LOGPROB),
            LOGPROB,
            quantity="log-probs with replayed experts",
            batch=batch,
            num_ranks=engine_under_test.num_data_ranks,
        )


@pytest.mark.if_claimed(Capability.ROUTING_REPLAY)
@pytest.mark.parametrize(
    "experts",
    [(-2, -2), (0, int(str(EXPERTS["num_experts"]))), (1, 1), (-1, 1), (1, -1)],
    ids=["negative", "unknown", "repeated", "only_second", "only_first"],
)
def test_experts_that_no_router_chooses_are_refused(
    engine_under_test: EngineUnderTest, oracle: OracleCache, experts: tuple[int, int]
) -> None:
    """A token needs different experts that exist, or -1 for all of them."""
    batch = prescribe_experts(oracle)
    batch.columns[ROUTED_EXPERTS][:, 1] = torch.tensor(experts, dtype=torch.int16)
    engine_under_test.run(replay_refused_experts, setup=make_setup(oracle), batch=batch)


def replay_refused_experts(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> None:
    """Run a batch whose experts the engine must refuse."""
    engine = rank.cached_engine(setup)
    with engine.eval_mode(), pytest.raises(BatchError, match=ROUTED_EXPERTS):
        engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH),
            forward_only=True,
            outputs=[HeadOutput.LOGPROB],
        )


@pytest.mark.if_claimed(Capability.ROUTING_REPLAY)
def test_returned_experts_are_those_of_transformers_or_the_prescribed_ones(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare the selected experts per token and layer with transformers, as sets."""
    setup = make_setup(oracle)
    for batch in (oracle.get_batch(), prescribe_experts(oracle)):
        expected = oracle.get_outputs(setup, batch, HeadOutput.ROUTED_EXPERTS)
        for split in (ONE_MICRO_BATCH, FIVE_MICRO_BATCHES):
            outputs = engine_under_test.run(
                measure_outputs,
                setup=setup,
                batch=batch,
                requested_outputs=[HeadOutput.LOGPROB, HeadOutput.ROUTED_EXPERTS],
                split=split,
            )[0]
            actual = outputs.columns[HeadOutput.ROUTED_EXPERTS]
            assert actual.shape == expected.shape
            is_equal = actual.sort().values == expected.sort().values
            assert is_equal.all(), f"{(~is_equal).sum()} of {is_equal.numel()} experts differ"


@pytest.mark.if_claimed(Capability.ROUTING_REPLAY)
def test_gradient_with_replayed_experts_matches_transformers(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare gradients, including the routers', with transformers for the same expert choices."""
    setup, batch = make_setup(oracle), prescribe_experts(oracle)
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    for split in (ONE_MICRO_BATCH, FIVE_MICRO_BATCHES):
        updates = engine_under_test.run(
            measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch, split=split
        )
        assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, quantity="gradient")


@pytest.mark.if_claimed(Capability.ROUTING_REPLAY)
def test_gradient_with_replayed_experts_of_sigmoid_routers_matches_transformers(
    engine_under_test: EngineUnderTest, dense_oracle: OracleCache
) -> None:
    """Gates of prescribed experts are normalized sigmoids in DeepSeek-V3, without the biases.

    Its router chooses groups of experts first, which prescribed experts need not follow.
    """
    model = FAMILIES["deepseek_v3"]
    setup = dense_oracle.make_setup(model, compute="fp32")
    # The first of four layers is dense.
    batch = prescribe_experts(dense_oracle, model=model, num_layers=3)
    expected = dense_oracle.get_update(setup, ClippedPpoProbe(), batch)
    updates = engine_under_test.run(
        measure_update,
        setup=setup,
        objective=ClippedPpoProbe(),
        batch=batch,
        split=FIVE_MICRO_BATCHES,
    )
    assert_all_close(
        updates[0].gradients,
        expected.gradients,
        get_family_gradient("deepseek_v3"),
        quantity="gradient",
    )


@pytest.mark.if_claimed(Capability.ROUTING_REPLAY)
def test_replay_leaves_the_mismatch_of_a_dense_model(
    engine_under_test: EngineUnderTest, dense_oracle: OracleCache
) -> None:
    """Sampler and engine differ with replay as little in MoE models as in dense ones.

    The sampler computes in bf16. Without replay, rounding sends some tokens to other experts.
    """
    check_replayed_mismatch(engine_under_test, dense_oracle)


def test_close_frees_a_model_with_experts(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """After an update and `close`, no parameter of the model remains in memory."""
    for num_before, num_after in engine_under_test.run(
        count_parameters, setup=make_setup(oracle), batch=oracle.get_batch()
    ):
        assert num_after <= num_before, (
            f"{num_after - num_before} parameters remain in memory after close(): something still "
            "refers to the model, such as a hook on its gradients, or an output that a layer keeps"
        )


def count_parameters(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> tuple[int, int]:
    """Return the number of parameters in this process before an engine and after it."""
    rank.close_all()
    gc.collect()
    num_before = count_objects(nn.Parameter)
    engine: BaseEngine = rank.construct_engine(setup)
    engine.init_model()
    engine.set_loss_fn(ClippedPpoProbe())
    run_update(engine, [rank_slice(engine, batch, split=FIVE_MICRO_BATCHES)])
    engine.close()
    del engine
    gc.collect()
    return num_before, count_objects(nn.Parameter)


def count_objects(kind: type) -> int:
    return sum(isinstance(each, kind) for each in gc.get_objects())
