"""Test several Megatron engines in a process: same sizes share groups, others are refused."""

import pytest

from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.errors import ConfigError
from temper_engine_api.layout import Layout
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.runtime.process_groups import ParallelSizes

TP2 = Layout(name="tp2", world_size=2, fields={"tensor_parallel": 2})


def test_second_engine_with_other_sizes_is_refused_with_both_sizes(rank_pool, oracle):
    engine_under_test = EngineUnderTest(
        engine="megatron",
        capabilities=MegatronEngine.capabilities,
        layout=TP2,
        all_layouts=(TP2,),
        rank_pool=rank_pool,
    )
    for has_same_groups, message in engine_under_test.run(
        start_third_engine, setup=oracle.make_setup(QWEN2_GROUPED)
    ):
        assert has_same_groups
        assert "has an engine with tensor_parallel 2, expert_tensor_parallel 2, so" in message
        assert "another one with pipeline_parallel 2 cannot be created" in message
        assert "the trainer's Ray runtime" in message


def start_third_engine(rank, *, setup):
    """Return whether two engines use the same groups, and the error of a third of other sizes."""
    first, second = rank.temporary_engine(setup), rank.temporary_engine(setup)
    has_same_groups = first._components.membership.tp is second._components.membership.tp
    third = MegatronEngine(
        setup.build_config(MegatronEngine, device="cpu", layout_fields={"pipeline_parallel": 2})
    )
    with pytest.raises(ConfigError) as caught:
        third.init_model()
    return has_same_groups, str(caught.value)


def test_sizes_of_one_rank_are_described_as_no_model_parallelism(config):
    assert str(ParallelSizes.from_config(config)) == "no model parallelism"
