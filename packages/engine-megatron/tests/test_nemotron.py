"""Test what the engine takes and refuses for Nemotron-H, whose layers have one part each."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_megatron.bridge_compat import BridgeTranslation
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.model.transformer_settings import check_divisible_sizes

FAMILY = FAMILIES["nemotron_h"]
ARCHITECTURE = {**FAMILY.settings, **FAMILY.architecture}
DENSE = {**ARCHITECTURE, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}
LORA = LoraSpec(rank=4, alpha=8.0)


@pytest.mark.parametrize("model_type", ["value_model", "reward_model"])
def test_model_without_a_head_for_tokens_is_refused(config, model_type):
    model = ModelSpec(architecture=ARCHITECTURE, model_type=model_type)
    refused = "transformers has no nemotron_h model with a head for tokens"
    with pytest.raises(CapabilityError, match=refused):
        MegatronEngine.check_model(replace(config, model=model))
    with pytest.raises(CapabilityError, match=refused):
        MegatronEngine(replace(config, model=model)).init_model()


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
