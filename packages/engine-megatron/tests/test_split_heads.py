"""Test heads and matrices split over ranks: shared key heads, and sizes that do not divide."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from temper_engine_api.conformance.harness.measurements import collect_weights, measure_update
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOSS,
    assert_all_close,
    assert_close,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN3, TinyModel
from temper_engine_api.errors import ConfigError
from temper_engine_api.registry import load_conformance_layouts
from temper_engine_api.specs import LoraSpec
from temper_engine_megatron.bridge_compat import BridgeTranslation
from temper_engine_megatron.model.transformer_settings import check_divisible_sizes

LAYOUTS = {layout.name: layout for layout in load_conformance_layouts("megatron")}
ONE_KEY_HEAD = TinyModel(
    name="qwen3-one-key-head", architecture={**QWEN3.architecture, "num_key_value_heads": 1}
)


@pytest.fixture
def run_in(rank_pool):
    def run(layout, job, **arguments):
        return rank_pool.run(job, engine="megatron", layout=LAYOUTS[layout], arguments=arguments)

    return run


# Nightly: with sequence parallelism the gradients of norms are summed over the ranks too.
@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.nightly), "tp2-sp"])
def test_gradients_equal_transformers_with_one_key_head_on_two_ranks(run_in, oracle, layout):
    setup, batch = oracle.make_setup(ONE_KEY_HEAD), oracle.get_batch(model=ONE_KEY_HEAD)
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    updates = run_in(layout, measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch)
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, quantity="gradient")
    for update in updates:
        assert_close(update.grad_norm, expected.grad_norm, LOSS, quantity="gradient norm")


def test_adapter_of_a_key_head_on_several_ranks_is_refused(run_in, oracle):
    # Its rows do not split into equal shards: a new adapter would be empty there.
    setup = replace(oracle.make_setup(ONE_KEY_HEAD), lora=LoraSpec(rank=4, alpha=8.0))
    for message in run_in("tp2", build_and_return_error, setup=setup):
        assert (
            "lora.target_modules matches k_proj, q_proj, v_proj, and tensor_parallel is 2, more "
            "than the model's 1 key heads" in message
        )


def build_and_return_error(rank, *, setup):
    """Return the error of init_model."""
    with pytest.raises(ConfigError) as caught:
        rank.construct_engine(setup).init_model()
    return str(caught.value)


def test_adapter_of_other_layers_of_that_model_trains(run_in, oracle):
    lora = LoraSpec(rank=4, alpha=8.0, target_modules=("o_proj", "down_proj"))
    setup = replace(oracle.make_setup(ONE_KEY_HEAD), lora=lora)
    names = run_in("tp2", list_adapter_tensors, setup=setup)[0]
    assert {name.split(".")[-3] for name in names} == {"o_proj", "down_proj"}


def list_adapter_tensors(rank, *, setup):
    """Return the tensor names of the exported adapter; exporting the base must work as well."""
    engine = rank.temporary_engine(setup)
    assert collect_weights(engine)
    return list(engine.export_adapter()[1])


@pytest.mark.parametrize(
    ("tensor_parallel", "fields", "match"),
    [
        (3, {}, "tensor_parallel is 3, which must divide the model's 4 attention heads"),
        (
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "tensor_parallel is 2, which must divide the model's 3 key heads",
        ),
        (
            4,
            {"intermediate_size": 50},
            "tensor_parallel is 4, which must divide the 50 rows of an MLP's matrices",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(config, tensor_parallel, fields, match):
    fields_of_model = {
        key: value for key, value in config.model.architecture.items() if key != "model_type"
    }
    settings = BridgeTranslation(
        AutoConfig.for_model("qwen2", **{**fields_of_model, **fields})
    ).transformer_config
    with pytest.raises(ConfigError, match=match):
        check_divisible_sizes(settings, replace(config, tensor_parallel=tensor_parallel))


def test_expert_matrices_that_do_not_divide_are_refused(config):
    fields = {
        **config.model.architecture,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 25,
        "head_dim": 8,
    }
    fields.pop("model_type")
    settings = BridgeTranslation(AutoConfig.for_model("qwen3_moe", **fields)).transformer_config
    with pytest.raises(
        ConfigError,
        match="expert_tensor_parallel is 2, which must divide the 25 rows of an expert's matrices",
    ):
        check_divisible_sizes(settings, replace(config, tensor_parallel=2, sequence_parallel=True))
    check_divisible_sizes(
        settings,
        replace(
            config,
            tensor_parallel=2,
            sequence_parallel=True,
            expert_parallel=2,
            expert_tensor_parallel=1,
        ),
    )


def test_gated_attention_with_fewer_key_heads_than_ranks_is_refused(config):
    # Megatron's gate has the shape of all heads then.
    hf_config = AutoConfig.for_model("qwen3_next", num_attention_heads=16, num_key_value_heads=2)
    settings = BridgeTranslation(hf_config).transformer_config
    check_divisible_sizes(settings, replace(config, tensor_parallel=2, sequence_parallel=True))
    split = replace(config, tensor_parallel=4, sequence_parallel=True)
    with pytest.raises(ConfigError, match="tensor_parallel is 4, more than the model's 2 key"):
        check_divisible_sizes(settings, split)
