"""Test what the engine takes and refuses for Nemotron-H, whose layers have one part each."""

from dataclasses import replace

import pytest

from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.errors import CapabilityError
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_megatron.engine import MegatronEngine

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
