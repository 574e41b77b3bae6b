"""A bridge for Gemma 3 that does not read a vision-language config from the Hub."""

import math
from functools import partial
from typing import Any

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.gemma.gemma3_bridge import Gemma3ModelBridge
from torch.nn.functional import gelu


class Gemma3TextBridge(Gemma3ModelBridge):
    """Megatron-Bridge's names, and a config from the text model's alone."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return Megatron's config; windows and rotary embeddings are the engine's own."""
        provider = MegatronModelBridge.provider_bridge(self, hf_pretrained)
        provider.softmax_scale = 1.0 / math.sqrt(hf_pretrained.config.query_pre_attn_scalar)
        provider.qk_layernorm = True
        # The same function as Megatron's, which is compiled.
        provider.activation_func = partial(gelu, approximate="tanh")
        # Megatron's own rotary embedding, which is not used, takes a single number.
        provider.rotary_base = 10000
        return provider
