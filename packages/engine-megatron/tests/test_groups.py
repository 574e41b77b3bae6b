"""Test several Megatron engines in a process: same sizes share groups, others are refused."""

import pytest

from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.errors import ConfigError
from temper_engine_api.layout import Layout
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.runtime.process_groups import ParallelSizes

TP2 = Layout(name="tp2", world_size=2, fields={"tensor_parallel": 2})


def test_engines_of_another_layout_are_told_of_both_layouts_and_of_the_ray_runtime(
    rank_pool, oracle
):
    engine_under_test = EngineUnderTest(
        engine="megatron",
        capabilities=MegatronEngine.capabilities,
        layout=TP2,
        all_layouts=(TP2,),
        rank_pool=rank_pool,
    )
    for shares, told in engine_under_test.run(start_beside, setup=oracle.make_setup(QWEN2_GROUPED)):
        assert shares
        assert "already has an engine with tensor_parallel 2, expert_tensor_parallel 2" in told
        assert "an engine with pipeline_parallel 2 cannot be created" in told
        assert "the trainer's Ray runtime" in told


def start_beside(rank, *, setup):
    """Return whether two engines share groups, and the error of a third with other sizes."""
    first, second = rank.temporary_engine(setup), rank.temporary_engine(setup)
    shares = first._components.membership.tp is second._components.membership.tp
    other = MegatronEngine(
        setup.build_config(MegatronEngine, device="cpu", layout_fields={"pipeline_parallel": 2})
    )
    with pytest.raises(ConfigError) as caught:
        other.init_model()
    return shares, str(caught.value)


def test_a_layout_is_said_in_the_words_of_its_configuration(config):
    assert str(ParallelSizes.from_config(config)) == "no model parallelism"
