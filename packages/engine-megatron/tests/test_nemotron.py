"""Test what the engine takes and refuses for Nemotron-H, whose layers have one part each."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import TWO_MICRO_BATCHES
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.oracle.oracle_comparison import check_outputs, check_update
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_megatron.bridge_compat import BridgeTranslation
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.huggingface.model_comparison import (
    accept_untested_models,
    check_computes_alike,
    list_untested_fields,
)
from temper_engine_megatron.layouts import LAYOUTS
from temper_engine_megatron.model.transformer_settings import check_divisible_sizes

FAMILY = FAMILIES["nemotron_h"]
ARCHITECTURE = {**FAMILY.settings, **FAMILY.architecture}
DENSE = {**ARCHITECTURE, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}
VARIANTS = {
    # Megatron refuses settings of experts in such a model.
    "dense": {
        "layers_block_type": [*("linear_attention", "mlp", "full_attention", "mlp")] * 2,
    },
    "narrow-experts": {"moe_latent_size": 16},
}
"""Models that the kit's family does not cover."""
LORA = LoraSpec(rank=4, alpha=8.0)


def test_default_adapter_leaves_out_what_peft_refuses_in_mamba_layers(start):
    with accept_untested_models():
        engine = start(model=ModelSpec(architecture=DENSE), lora=LORA)
    peft_config, tensors = engine.export_adapter()
    expected = ["down_proj", "in_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert sorted(peft_config["target_modules"]) == expected
    assert not any("out_proj" in name for name in tensors)


def test_head_is_not_tied_because_transformers_ignores_that_setting(start):
    tied = {**DENSE, "tie_word_embeddings": True}
    with accept_untested_models():
        engine = start(model=ModelSpec(architecture=tied))
    with engine.export_weights() as stream:
        weights = dict(stream)
    head, embedding = weights["lm_head.weight"], weights["backbone.embeddings.weight"]
    assert not torch.equal(head, embedding)


def test_adapter_on_out_proj_of_mamba_layers_is_refused(config):
    lora = replace(LORA, target_modules=("in_proj", "out_proj"))
    model = ModelSpec(architecture=ARCHITECTURE)
    refused = r"matches .*\.0\.mixer\.out_proj, which cannot be adapted: .* adapts \['down_proj', "
    with pytest.raises(ConfigError, match=refused):
        MegatronEngine(replace(config, model=model, lora=lora)).init_model()
    assert not torch.distributed.is_initialized()


def test_adapter_on_projections_of_narrow_experts_is_refused(config):
    model = ModelSpec(architecture={**ARCHITECTURE, **VARIANTS["narrow-experts"]})
    names = ("fc1_latent_proj", "fc2_latent_proj")
    refused = r"includes model\.layers\.1\.mixer\.fc1_latent_proj, .* name fc1_latent_proj, fc2_"
    with accept_untested_models():
        for lora in (LORA, replace(LORA, target_modules=("q_proj", *names))):
            with pytest.raises(ConfigError, match=refused):
                MegatronEngine.check_model(replace(config, model=model, lora=lora))
        MegatronEngine.check_model(
            replace(config, model=model, lora=replace(LORA, exclude_modules=names))
        )


@pytest.mark.parametrize("model_type", ["value_model", "reward_model"])
def test_model_without_a_head_for_tokens_is_refused(config, model_type):
    model = ModelSpec(architecture=ARCHITECTURE, model_type=model_type)
    refused = "transformers has no nemotron_h model with a head for tokens"
    with pytest.raises(CapabilityError, match=refused):
        MegatronEngine.check_model(replace(config, model=model))
    with pytest.raises(CapabilityError, match=refused):
        MegatronEngine(replace(config, model=model)).init_model()


def test_dense_models_and_other_mamba_layers_are_not_covered_by_tests():
    def list_untested(**fields):
        return list_untested_fields(AutoConfig.for_model("nemotron_h", **fields))

    dense = ["linear_attention", "mlp", "full_attention", "mlp"]
    assert list_untested(hybrid_override_pattern="M-*-") == [f"layers_block_type={dense}"]
    # Nemotron 3 Nano and Super have no layer with an MLP alone.
    assert list_untested(hybrid_override_pattern="MEMEM*E") == []
    assert list_untested(use_bias=True, use_conv_bias=False, mamba_hidden_act="gelu") == [
        "mamba_hidden_act='gelu'",
        "use_conv_bias=False",
        "use_bias=True",
    ]


# Nightly: compares each model in a process of its own. The kit compares the family every day.
@pytest.mark.nightly
@pytest.mark.parametrize("fields", [{}, {"use_bias": True, "mamba_hidden_act": "gelu"}])
def test_dense_model_computes_as_in_transformers(fields):
    check_computes_alike(
        AutoConfig.for_model("nemotron_h", hybrid_override_pattern="M-M-M-MM-M*-", **fields),
        collective_timeout_s=600.0,
    )


def test_kinds_of_layers_of_older_transformers_are_refused():
    config = AutoConfig.for_model("nemotron_h", hybrid_override_pattern="ME*")
    config.layer_types = ["mamba", "moe", "attention"]
    with pytest.raises(ConfigError, match=r"layers of kinds 'attention', 'mamba'"):
        BridgeTranslation(config)


def translate(pattern, **fields):
    config = AutoConfig.for_model("nemotron_h", hybrid_override_pattern=pattern, **fields)
    return BridgeTranslation(config).transformer_config


def test_sizes_of_absent_mlps_do_not_limit_tensor_parallelism(config):
    split = replace(config, tensor_parallel=2, sequence_parallel=True)
    check_divisible_sizes(translate("ME*", intermediate_size=33), split)
    with pytest.raises(ConfigError, match="33 rows of an MLP's matrices"):
        check_divisible_sizes(translate("ME*-", intermediate_size=33), split)


def test_shared_experts_that_do_not_split_are_refused(config):
    split = replace(config, tensor_parallel=2, sequence_parallel=True)
    settings = translate("ME*", moe_shared_expert_intermediate_size=25)
    with pytest.raises(ConfigError, match="25 rows of the shared experts' matrices"):
        check_divisible_sizes(settings, split)


# Nightly: builds nine engines on two ranks. The kit compares the family every day.
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("dense", name) for name in ("tp2", "tp2-sp", "pp2-vpp2", "cp2")),
        *(("narrow-experts", name) for name in ("tp2-sp", "tp2-sp-ep2", "pp2-vpp2", "cp2", "ep2")),
    ],
)
def test_variant_computes_as_in_transformers_on_two_ranks(rank_pool, oracle, variant, name):
    model = replace(
        FAMILY,
        name=f"nemotron-{variant}",
        architecture={**FAMILY.architecture, **VARIANTS[variant]},
    )
    (layout,) = (layout for layout in LAYOUTS if layout.name == name)
    ranks = EngineUnderTest(
        engine="megatron",
        capabilities=MegatronEngine.capabilities,
        layout=layout,
        all_layouts=(layout,),
        rank_pool=rank_pool,
    )
    setup = oracle.make_setup(model)
    # Here, where it may take long; the ranks then find its result.
    check_computes_alike(AutoConfig.from_pretrained(setup.model_path), collective_timeout_s=600.0)
    arguments = {"setup": setup, "batch": oracle.get_batch(model=model)}
    requested = [HeadOutput.LOGPROB, HeadOutput.ENTROPY]
    check_outputs(ranks, oracle, head_outputs=requested, **arguments)
    check_update(ranks, oracle, objective=ClippedPpoProbe(), split=TWO_MICRO_BATCHES, **arguments)
