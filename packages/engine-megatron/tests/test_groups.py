"""Several Megatron engines in one process: those of one layout share its groups, another layout is refused with the way out."""

import pytest

from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.errors import ConfigError
from temper_engine_api.layout import Layout
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.runtime.process_groups import ParallelSizes

TP2 = Layout(name="tp2", world_size=2, fields={"tensor_parallel": 2})


def test_engines_of_another_layout_are_told_of_both_layouts_and_of_the_ray_runtime(
    fleet, reference
):
    subject = Subject(
        engine="megatron",
        claims=MegatronEngine.capabilities,
        layout=TP2,
        all_layouts=(TP2,),
        fleet=fleet,
    )
    for shares, told in subject.run(start_beside, recipe=reference.recipe(QWEN2_GROUPED)):
        assert shares
        assert (
            "an engine with tensor_parallel 2, expert_tensor_parallel 2 lives in this process"
            in told
        )
        assert "one with pipeline_parallel 2 can't be made beside it" in told
        assert "the trainer's Ray runtime" in told


def start_beside(rank, *, recipe):
    """Whether two engines of one layout have the same groups, and what a third of another layout is told."""
    first, second = rank.engine(recipe), rank.engine(recipe)
    shares = first._components.membership.tp is second._components.membership.tp
    other = MegatronEngine(
        recipe.config_for(MegatronEngine, device="cpu", layout_fields={"pipeline_parallel": 2})
    )
    with pytest.raises(ConfigError) as caught:
        other.init_model()
    return shares, str(caught.value)


def test_a_layout_is_said_in_the_words_of_its_configuration(config):
    assert str(ParallelSizes.of(config)) == "no model parallelism"
