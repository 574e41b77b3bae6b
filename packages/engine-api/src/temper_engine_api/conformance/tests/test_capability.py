"""Laws: an engine is where it says it is, does what it claims, and refuses with a sentence what it does not claim."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.measurements import WHOLE, share_of
from temper_engine_api.conformance.harness.rank import Rank, Recipe
from temper_engine_api.conformance.inputs.probes import TokenProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED, REWARD, VALUE
from temper_engine_api.conformance.oracle.oracle_cache import Reference
from temper_engine_api.errors import CapabilityError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import OptimizerSpec, ResidencySpec
from temper_engine_api.topology import Topology

CONFIGURED: dict[Capability, Callable[[Reference], Recipe]] = {
    Capability.VALUE_MODEL: lambda reference: reference.recipe(VALUE),
    Capability.REWARD_MODEL: lambda reference: reference.recipe(REWARD),
    Capability.ADAPTER: lambda reference: reference.recipe(
        QWEN2_GROUPED, lora=reference.fresh_adapter(rank=2)
    ),
    Capability.OFFLOAD: lambda reference: reference.recipe(
        QWEN2_GROUPED, residency=ResidencySpec(offload_parameters=True, offload_optimizer=True)
    ),
    Capability.ANY_OPTIMIZER: lambda reference: reference.recipe(
        QWEN2_GROUPED, optimizer=OptimizerSpec(name="torch.optim.SGD", arguments={"momentum": 0.9})
    ),
    Capability.FP16: lambda reference: reference.recipe(QWEN2_GROUPED, compute="fp16"),
    Capability.OTHER_DTYPES: lambda reference: reference.recipe(
        QWEN2_GROUPED, compute="bf16", parameters="bf16"
    ),
}
"""What a configuration can ask for."""


def test_an_engine_claims_what_the_kit_stands_on(subject: Subject) -> None:
    assert {Capability.LANGUAGE_MODEL, Capability.PORTABLE_STATE} <= subject.claims


@pytest.mark.parametrize("capability", CONFIGURED, ids=lambda capability: capability.value)
def test_what_is_configured_works_or_is_refused_by_name(
    subject: Subject, reference: Reference, capability: Capability
) -> None:
    sentences = subject.run(refusal_of_init, recipe=CONFIGURED[capability](reference))
    if capability in subject.claims:
        # A layout may rule out what the engine can do elsewhere, if it says by the name of its own setting which of the two to leave.
        assert len(set(sentences)) == 1, "ranks disagree"
        assert not sentences[0] or any(name in sentences[0] for name in subject.layout.fields), (
            sentences[0]
        )
    else:
        assert all(repr(capability.value) in sentence for sentence in sentences)


def refusal_of_init(rank: Rank, *, recipe: Recipe) -> str:
    """The sentence, or nothing where the engine was built."""
    try:
        rank.engine(recipe)
    except CapabilityError as error:
        return str(error)
    return ""


@pytest.mark.disclaims(Capability.ADAPTER)
def test_adapter_calls_are_refused(subject: Subject, reference: Reference) -> None:
    subject.run(call_adapter, recipe=reference.recipe(QWEN2_GROUPED))


def call_adapter(rank: Rank, *, recipe: Recipe) -> None:
    """Each of the three."""
    engine = rank.kept_engine(recipe)
    with pytest.raises(CapabilityError, match="adapter"), engine.adapter_disabled():
        pass
    with pytest.raises(CapabilityError, match="adapter"):
        engine.export_adapter()
    with pytest.raises(CapabilityError, match="adapter"):
        engine.load_adapter({}, {})


@pytest.mark.claims(Capability.ADAPTER)
@pytest.mark.disclaims(Capability.ADAPTER_ON_EXPERTS)
def test_adapters_on_experts_are_refused(subject: Subject, reference: Reference) -> None:
    inside = replace(reference.fresh_adapter(rank=2), target_parameters=("mlp.experts.down_proj",))
    for told in subject.run(refusal_of_init, recipe=reference.recipe(QWEN2_GROUPED, lora=inside)):
        assert repr(Capability.ADAPTER_ON_EXPERTS.value) in told


@pytest.mark.disclaims(Capability.LOGPROB_AT)
def test_given_ids_are_refused_by_name(subject: Subject, reference: Reference) -> None:
    subject.run(ask_given_ids, recipe=reference.recipe(QWEN2_GROUPED), batch=reference.batch())


def ask_given_ids(rank: Rank, *, recipe: Recipe, batch: SequenceBatch) -> None:
    """Of an engine that does not claim to answer."""
    engine = rank.kept_engine(recipe)
    with engine.eval_mode(), pytest.raises(CapabilityError, match="logprob_at"):
        engine.forward_backward_batch(
            share_of(engine, batch, split=WHOLE), forward_only=True, outputs=[HeadOutput.LOGPROB_AT]
        )


def test_topologies_fit_together(subject: Subject, reference: Reference) -> None:
    topologies = subject.run(topology_of, recipe=reference.recipe(QWEN2_GROUPED))
    assert [topology.global_rank for topology in topologies] == list(range(subject.world_size))
    for topology in topologies:
        sizes = (
            topology.dp.size
            * topology.tp.size
            * topology.pp.size
            * topology.cp.size
            * topology.sp.size
        )
        assert topology.world_size == subject.world_size == sizes
    replicas = [topology.dp.rank for topology in topologies if topology.returns_outputs]
    assert sorted(replicas) == list(range(topologies[0].dp.size)), (
        "not one rank of each replica returns outputs"
    )


def topology_of(rank: Rank, *, recipe: Recipe) -> Topology:
    """After ``init_model``."""
    return rank.kept_engine(recipe).topology


def test_only_ranks_that_return_outputs_do(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    for returns_outputs, has_outputs in subject.run(
        outputs_claimed_and_given, recipe=recipe, batch=batch
    ):
        assert returns_outputs == has_outputs


def outputs_claimed_and_given(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch
) -> tuple[bool, bool]:
    """By the topology, and by a forward pass."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            share_of(engine, batch, split=WHOLE), forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    return engine.topology.returns_outputs, result.outputs is not None


def test_a_missing_model_is_found_out_by_init_model(subject: Subject, reference: Reference) -> None:
    recipe = reference.recipe(QWEN2_GROUPED)
    path = recipe.model_path + "-that-does-not-exist"
    for sentence in subject.run(failure_of_init, recipe=replace(recipe, model_path=path)):
        assert path in sentence


def failure_of_init(rank: Rank, *, recipe: Recipe) -> str:
    """What ``init_model`` says; the error is the backend's own."""
    with pytest.raises(Exception) as caught:
        rank.engine(recipe)
    return str(caught.value)
