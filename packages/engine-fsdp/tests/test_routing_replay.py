"""Test replayed choices of experts with every family of routers, and batches that do not fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.measurements import measure_outputs, measure_update
from temper_engine_api.conformance.harness.rank import Rank
from temper_engine_api.conformance.harness.tolerances import assert_all_close, get_family_gradient
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe, ZeroProbe
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.errors import BatchError, CapabilityError, ConfigError, EngineStateError
from temper_engine_api.objective import ROUTED_EXPERTS, HeadOutput
from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.model.expert_routers import find_routers
from temper_engine_fsdp.model.huggingface_model import build_model

NUM_EXPERTS, NUM_CHOSEN = 4, 2
MIXTURES = [name for name, model in FAMILIES.items() if "num_experts_per_tok" in model.architecture]


@pytest.mark.parametrize("family", MIXTURES)
def test_gradient_with_replayed_experts_is_that_of_transformers(
    tmp_path: Path, family: str
) -> None:
    oracle, rank = OracleCache(folder=tmp_path), Rank(FSDPEngine)
    setup = oracle.make_setup(FAMILIES[family], compute="fp32")
    hf = build_model(ModelSpec(path=setup.model_path), attention="eager")
    batch = oracle.get_batch(num_sequences=4, model=FAMILIES[family])
    noise = torch.rand(
        batch.num_tokens,
        len(find_routers(hf)),
        NUM_EXPERTS,
        generator=torch.Generator().manual_seed(0),
    )
    batch = batch.with_columns({ROUTED_EXPERTS: noise.topk(NUM_CHOSEN).indices.to(torch.int16)})
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    try:
        update = measure_update(rank, setup=setup, objective=ClippedPpoProbe(), batch=batch)
    finally:
        rank.close_all()
    assert_all_close(
        update.gradients, expected.gradients, get_family_gradient(family), quantity="gradient"
    )


@pytest.mark.parametrize("family", MIXTURES)
def test_returned_experts_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    oracle, rank = OracleCache(folder=tmp_path), Rank(FSDPEngine)
    setup = oracle.make_setup(FAMILIES[family], compute="fp32")
    batch = oracle.get_batch(num_sequences=4, model=FAMILIES[family])
    expected = oracle.get_outputs(setup, batch, HeadOutput.ROUTED_EXPERTS)
    requested = [HeadOutput.LOGPROB, HeadOutput.ROUTED_EXPERTS]
    try:
        outputs = measure_outputs(rank, setup=setup, batch=batch, requested_outputs=requested)
    finally:
        rank.close_all()
    # In any order.
    actual = outputs.columns[HeadOutput.ROUTED_EXPERTS]
    assert actual.sort().values.equal(expected.sort().values)


MOE = {
    "model_type": "qwen3_moe",
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOSEN,
    "moe_intermediate_size": 24,
    "head_dim": 8,
}


def test_experts_of_a_dense_model_or_a_training_call_cannot_be_requested(
    start: Callable[..., FSDPEngine], config: FSDPConfig, batch: SequenceBatch
) -> None:
    dense = start()
    packed = dense.shard_data(batch, max_tokens=64)
    with dense.eval_mode(), pytest.raises(CapabilityError, match="the model has no routers whose"):
        dense.forward_backward_batch(packed, forward_only=True, outputs=["routed_experts"])
    dense.set_loss_fn(ZeroProbe())
    with dense.train_mode(), pytest.raises(EngineStateError, match="only forward-only calls"):
        dense.forward_backward_batch(packed, forward_only=False, outputs=["routed_experts"])


@pytest.mark.parametrize(
    ("architecture", "shape", "message"),
    [
        (MOE, (1, NUM_CHOSEN), r"must be \[tokens, layers, experts per token\] with the 2 layers"),
        (MOE, (2, 3), "has 3 experts for each token and layer, but the model chooses 2"),
        ({}, (2, NUM_CHOSEN), "the model has no routers that can replay it"),
    ],
)
def test_experts_that_do_not_fit_the_model_are_refused(
    start: Callable[..., FSDPEngine],
    config: FSDPConfig,
    batch: SequenceBatch,
    architecture: dict[str, object],
    shape: tuple[int, int],
    message: str,
) -> None:
    fields = {**config.model.architecture, **architecture}
    engine = start(model=ModelSpec(architecture=fields))  # type: ignore[arg-type]
    experts = torch.arange(shape[1], dtype=torch.int16).expand(batch.num_tokens, *shape)
    packed = engine.shard_data(batch.with_columns({ROUTED_EXPERTS: experts}), max_tokens=64)
    with engine.eval_mode(), pytest.raises(BatchError, match=message):
        engine.forward_backward_batch(packed, forward_only=True, outputs=["logprob"])


def test_router_loss_of_routers_that_cannot_be_observed_is_refused_with_that_reason(
    config: FSDPConfig,
) -> None:
    # Its router has a linear layer `gate` in place of a weight.
    fields = {**config.model.architecture, **MOE, "model_type": "afmoe", "num_dense_layers": 1}
    refused = replace(config, model=ModelSpec(architecture=fields), router_aux_loss=0.01)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="AfmoeForCausalLM has no routers that can be observed"):
        FSDPEngine.check_model(refused)
