"""Conformance tests of capabilities: what is claimed works, what is not claimed is rejected."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import ONE_MICRO_BATCH, rank_slice
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED, REWARD, VALUE
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.errors import CapabilityError
from temper_engine_api.objective import ROUTED_EXPERTS, HeadOutput
from temper_engine_api.specs import OffloadSpec, OptimizerSpec
from temper_engine_api.topology import Topology

SETUPS: dict[Capability, Callable[[OracleCache], EngineSetup]] = {
    Capability.VALUE_MODEL: lambda oracle: oracle.make_setup(VALUE),
    Capability.REWARD_MODEL: lambda oracle: oracle.make_setup(REWARD),
    Capability.ADAPTER: lambda oracle: oracle.make_setup(
        QWEN2_GROUPED, lora=oracle.make_lora_spec(rank=2)
    ),
    Capability.OFFLOAD: lambda oracle: oracle.make_setup(
        QWEN2_GROUPED, offload=OffloadSpec(parameters=True, optimizer=True)
    ),
    Capability.ANY_OPTIMIZER: lambda oracle: oracle.make_setup(
        QWEN2_GROUPED, optimizer=OptimizerSpec(name="torch.optim.SGD", arguments={"momentum": 0.9})
    ),
    Capability.FP16: lambda oracle: oracle.make_setup(QWEN2_GROUPED, compute="fp16"),
    Capability.OTHER_DTYPES: lambda oracle: oracle.make_setup(
        QWEN2_GROUPED, compute="bf16", parameters="bf16"
    ),
}
"""Engine setups that need a capability."""


def test_engine_claims_what_the_kit_needs(engine_under_test: EngineUnderTest) -> None:
    """An engine claims LANGUAGE_MODEL, and PORTABLE_STATE, which the kit uses to read gradients."""
    assert {Capability.LANGUAGE_MODEL, Capability.PORTABLE_STATE} <= engine_under_test.capabilities


@pytest.mark.parametrize("capability", SETUPS, ids=lambda capability: capability.value)
def test_configured_capability_works_or_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache, capability: Capability
) -> None:
    """A claimed capability can be configured; one that is not claimed is rejected by name.

    A layout may reject a claimed capability if the message names the conflicting layout setting.
    All ranks must raise the same error, otherwise some would wait for the others.
    """
    messages = engine_under_test.run(read_init_error, setup=SETUPS[capability](oracle))
    if capability in engine_under_test.capabilities:
        assert len(set(messages)) == 1, f"ranks raise different errors: {set(messages)}"
        assert not messages[0] or any(
            name in messages[0] for name in engine_under_test.layout.fields
        ), messages[0]
    else:
        assert all(repr(capability.value) in message for message in messages)


def read_init_error(rank: Rank, *, setup: EngineSetup) -> str:
    """Return the message of the CapabilityError; empty if the engine was built."""
    try:
        rank.temporary_engine(setup)
    except CapabilityError as error:
        return str(error)
    return ""


@pytest.mark.if_not_claimed(Capability.ADAPTER)
def test_unclaimed_adapter_calls_are_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """All adapter methods raise CapabilityError if the engine does not claim ADAPTER."""
    engine_under_test.run(call_adapter, setup=oracle.make_setup(QWEN2_GROUPED))


def call_adapter(rank: Rank, *, setup: EngineSetup) -> None:
    """Call each of the three adapter methods."""
    engine = rank.cached_engine(setup)
    with pytest.raises(CapabilityError, match="adapter"), engine.disable_adapter():
        pass
    with pytest.raises(CapabilityError, match="adapter"):
        engine.export_adapter()
    with pytest.raises(CapabilityError, match="adapter"):
        engine.load_adapter({}, {})


def make_expert_adapter_setup(oracle: OracleCache) -> EngineSetup:
    """Return a setup that needs ADAPTER_ON_EXPERTS."""
    inside = replace(oracle.make_lora_spec(rank=2), target_parameters=("mlp.experts.down_proj",))
    return oracle.make_setup(QWEN2_GROUPED, lora=inside)


@pytest.mark.if_claimed(Capability.ADAPTER)
@pytest.mark.if_not_claimed(Capability.ADAPTER_ON_EXPERTS)
def test_unclaimed_expert_adapters_are_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A LoRA on experts raises CapabilityError by name if the engine does not claim it."""
    for message in engine_under_test.run(read_init_error, setup=make_expert_adapter_setup(oracle)):
        assert repr(Capability.ADAPTER_ON_EXPERTS.value) in message


@pytest.mark.if_refused_in_layout
def test_capability_that_a_layout_refuses_is_rejected_with_the_setting(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A capability that a layout is declared without raises CapabilityError naming its setting.

    All ranks must raise the same error, otherwise some would wait for the others.
    """
    setups = {**SETUPS, Capability.ADAPTER_ON_EXPERTS: make_expert_adapter_setup}
    layout = engine_under_test.layout
    for capability in layout.without:
        messages = set(engine_under_test.run(read_init_error, setup=setups[capability](oracle)))
        assert len(messages) == 1, f"ranks raise different errors: {messages}"
        message = messages.pop()
        assert any(name in message for name in layout.fields), (
            f"layout {layout.name} is declared without {capability}, but the engine "
            + (f"says: {message}" if message else "accepts it")
        )


@pytest.mark.if_not_claimed(Capability.LOGPROB_AT)
def test_unclaimed_logprob_at_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Requesting log-probs at given ids raises CapabilityError if it is not claimed."""
    engine_under_test.run(
        request_logprob_at, setup=oracle.make_setup(QWEN2_GROUPED), batch=oracle.get_batch()
    )


def request_logprob_at(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> None:
    """Request log-probs at given ids from an engine that does not claim them."""
    engine = rank.cached_engine(setup)
    with engine.eval_mode(), pytest.raises(CapabilityError, match="logprob_at"):
        engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH),
            forward_only=True,
            outputs=[HeadOutput.LOGPROB_AT],
        )


@pytest.mark.if_not_claimed(Capability.ROUTING_REPLAY)
def test_unclaimed_routing_replay_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A batch that prescribes experts raises CapabilityError if replay is not claimed."""
    batch = oracle.get_batch()
    experts = torch.zeros(batch.num_tokens, 4, 2, dtype=torch.int16)
    engine_under_test.run(
        send_to_experts,
        setup=oracle.make_setup(QWEN2_GROUPED),
        batch=batch.with_columns({ROUTED_EXPERTS: experts}),
    )


def send_to_experts(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> None:
    """Run a batch that prescribes experts on an engine that does not claim replay."""
    engine = rank.cached_engine(setup)
    with engine.eval_mode(), pytest.raises(CapabilityError, match="routing_replay"):
        engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH),
            forward_only=True,
            outputs=[HeadOutput.LOGPROB],
        )


def test_topologies_are_consistent(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    """Global ranks, axis sizes and output ranks of all topologies fit the world size.

    Exactly one rank of each data-parallel replica returns outputs.
    """
    topologies = engine_under_test.run(get_topology, setup=oracle.make_setup(QWEN2_GROUPED))
    assert [topology.global_rank for topology in topologies] == list(
        range(engine_under_test.world_size)
    )
    for topology in topologies:
        sizes = (
            topology.dp.size
            * topology.tp.size
            * topology.pp.size
            * topology.cp.size
            * topology.sp.size
        )
        assert topology.world_size == engine_under_test.world_size == sizes
    # With two such ranks in a replica its samples would count twice, and with none they would not
    # count.
    output_ranks = [topology.dp.rank for topology in topologies if topology.returns_outputs]
    assert sorted(output_ranks) == list(range(topologies[0].dp.size)), (
        "expected exactly one rank with returns_outputs per data-parallel replica"
    )


def get_topology(rank: Rank, *, setup: EngineSetup) -> Topology:
    """Return the topology after `init_model`."""
    return rank.cached_engine(setup).topology


def test_outputs_come_from_the_declared_ranks(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Exactly the ranks with `returns_outputs` return outputs."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    for returns_outputs, has_outputs in engine_under_test.run(
        list_claimed_and_returned_outputs, setup=setup, batch=batch
    ):
        assert returns_outputs == has_outputs


def list_claimed_and_returned_outputs(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[bool, bool]:
    """Return what the topology declares and whether a forward pass returned outputs."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH),
            forward_only=True,
            outputs=[HeadOutput.LOGPROB],
        )
    return engine.topology.returns_outputs, result.outputs is not None


def test_init_model_reports_a_missing_model(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """`init_model` raises an error that names a model path that does not exist."""
    setup = oracle.make_setup(QWEN2_GROUPED)
    path = setup.model_path + "-that-does-not-exist"
    for message in engine_under_test.run(
        read_missing_model_error, setup=replace(setup, model_path=path)
    ):
        assert path in message


def read_missing_model_error(rank: Rank, *, setup: EngineSetup) -> str:
    """Return the error message of `init_model`; its type is up to the backend."""
    with pytest.raises(Exception) as caught:
        rank.temporary_engine(setup)
    return str(caught.value)
