"""Laws: an engine is where it says it is, does what it claims, and refuses with a sentence what it does not claim."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import ONE_MICRO_BATCH, rank_slice
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED, REWARD, VALUE
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.errors import CapabilityError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import OptimizerSpec, ResidencySpec
from temper_engine_api.topology import Topology

CONFIGURED: dict[Capability, Callable[[OracleCache], EngineSetup]] = {
    Capability.VALUE_MODEL: lambda oracle: oracle.make_setup(VALUE),
    Capability.REWARD_MODEL: lambda oracle: oracle.make_setup(REWARD),
    Capability.ADAPTER: lambda oracle: oracle.make_setup(
        QWEN2_GROUPED, lora=oracle.make_lora_spec(rank=2)
    ),
    Capability.OFFLOAD: lambda oracle: oracle.make_setup(
        QWEN2_GROUPED, residency=ResidencySpec(offload_parameters=True, offload_optimizer=True)
    ),
    Capability.ANY_OPTIMIZER: lambda oracle: oracle.make_setup(
        QWEN2_GROUPED, optimizer=OptimizerSpec(name="torch.optim.SGD", arguments={"momentum": 0.9})
    ),
    Capability.FP16: lambda oracle: oracle.make_setup(QWEN2_GROUPED, compute="fp16"),
    Capability.OTHER_DTYPES: lambda oracle: oracle.make_setup(
        QWEN2_GROUPED, compute="bf16", parameters="bf16"
    ),
}
"""What a configuration can ask for."""


def test_engine_claims_what_the_kit_needs(engine_under_test: EngineUnderTest) -> None:
    assert {Capability.LANGUAGE_MODEL, Capability.PORTABLE_STATE} <= engine_under_test.capabilities


@pytest.mark.parametrize("capability", CONFIGURED, ids=lambda capability: capability.value)
def test_configured_capability_works_or_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache, capability: Capability
) -> None:
    sentences = engine_under_test.run(refusal_of_init, setup=CONFIGURED[capability](oracle))
    if capability in engine_under_test.capabilities:
        # A layout may rule out what the engine can do elsewhere, if it says by the name of its own setting which of the two to leave.
        assert len(set(sentences)) == 1, "ranks disagree"
        assert not sentences[0] or any(
            name in sentences[0] for name in engine_under_test.layout.fields
        ), sentences[0]
    else:
        assert all(repr(capability.value) in sentence for sentence in sentences)


def refusal_of_init(rank: Rank, *, setup: EngineSetup) -> str:
    """The sentence, or nothing where the engine was built."""
    try:
        rank.temporary_engine(setup)
    except CapabilityError as error:
        return str(error)
    return ""


@pytest.mark.if_not_claimed(Capability.ADAPTER)
def test_unclaimed_adapter_calls_are_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    engine_under_test.run(call_adapter, setup=oracle.make_setup(QWEN2_GROUPED))


def call_adapter(rank: Rank, *, setup: EngineSetup) -> None:
    """Each of the three."""
    engine = rank.cached_engine(setup)
    with pytest.raises(CapabilityError, match="adapter"), engine.disable_adapter():
        pass
    with pytest.raises(CapabilityError, match="adapter"):
        engine.export_adapter()
    with pytest.raises(CapabilityError, match="adapter"):
        engine.load_adapter({}, {})


@pytest.mark.if_claimed(Capability.ADAPTER)
@pytest.mark.if_not_claimed(Capability.ADAPTER_ON_EXPERTS)
def test_unclaimed_expert_adapters_are_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    inside = replace(oracle.make_lora_spec(rank=2), target_parameters=("mlp.experts.down_proj",))
    for told in engine_under_test.run(
        refusal_of_init, setup=oracle.make_setup(QWEN2_GROUPED, lora=inside)
    ):
        assert repr(Capability.ADAPTER_ON_EXPERTS.value) in told


@pytest.mark.if_not_claimed(Capability.LOGPROB_AT)
def test_unclaimed_logprob_at_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    engine_under_test.run(
        ask_given_ids, setup=oracle.make_setup(QWEN2_GROUPED), batch=oracle.get_batch()
    )


def ask_given_ids(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> None:
    """Of an engine that does not claim to answer."""
    engine = rank.cached_engine(setup)
    with engine.eval_mode(), pytest.raises(CapabilityError, match="logprob_at"):
        engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH),
            forward_only=True,
            outputs=[HeadOutput.LOGPROB_AT],
        )


def test_topologies_are_consistent(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    topologies = engine_under_test.run(topology_of, setup=oracle.make_setup(QWEN2_GROUPED))
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
    replicas = [topology.dp.rank for topology in topologies if topology.returns_outputs]
    assert sorted(replicas) == list(range(topologies[0].dp.size)), (
        "not one rank of each replica returns outputs"
    )


def topology_of(rank: Rank, *, setup: EngineSetup) -> Topology:
    """After ``init_model``."""
    return rank.cached_engine(setup).topology


def test_outputs_come_from_the_declared_ranks(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    for returns_outputs, has_outputs in engine_under_test.run(
        outputs_claimed_and_given, setup=setup, batch=batch
    ):
        assert returns_outputs == has_outputs


def outputs_claimed_and_given(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[bool, bool]:
    """By the topology, and by a forward pass."""
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
    setup = oracle.make_setup(QWEN2_GROUPED)
    path = setup.model_path + "-that-does-not-exist"
    for sentence in engine_under_test.run(failure_of_init, setup=replace(setup, model_path=path)):
        assert path in sentence


def failure_of_init(rank: Rank, *, setup: EngineSetup) -> str:
    """What ``init_model`` says; the error is the backend's own."""
    with pytest.raises(Exception) as caught:
        rank.temporary_engine(setup)
    return str(caught.value)
