"""Experts that read and write vectors narrower than the hidden state, as in Nemotron 3 Super.

Megatron's own projections around such experts need TransformerEngine. Here they are plain linear
layers that every tensor-parallel rank has in full, before tokens are sent to their experts and
after they come back.
"""

import copy
from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from temper_engine_megatron.model.grouped_experts import GroupedExperts


def _narrow_experts(transformer_config: Any) -> Any:
    narrow = copy.copy(transformer_config)
    # The rest of the layer must not see this field, because Megatron would want its own layers.
    narrow.moe_latent_size = transformer_config.expert_width
    return narrow


class NarrowSequentialExperts(SequentialMLP):
    """Megatron's sequential experts, with inputs and outputs of `expert_width`."""

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_local_experts, _narrow_experts(config), *args, **kwargs)


class NarrowGroupedExperts(GroupedExperts):
    """The engine's grouped experts, with inputs and outputs of `expert_width`."""

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_local_experts, _narrow_experts(config), *args, **kwargs)


def add_projections(moe_layer: Any, transformer_config: Any) -> None:
    """Project tokens to `expert_width` before a Megatron MoE layer sends them, and back after."""
    hidden, width = transformer_config.hidden_size, transformer_config.expert_width
    dtype = transformer_config.params_dtype
    moe_layer.fc1_latent_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
    moe_layer.fc2_latent_proj = nn.Linear(width, hidden, bias=False, dtype=dtype)
    for layer in (moe_layer.fc1_latent_proj, moe_layer.fc2_latent_proj):
        # Each rank sees a part of the sequence; Megatron sums gradients of weights with this mark.
        layer.weight.sequence_parallel = transformer_config.sequence_parallel
    dispatcher = moe_layer.token_dispatcher
    send, receive = dispatcher.dispatch_preprocess, dispatcher.combine_postprocess

    def narrow_and_send(hidden_states: Tensor, *args: Any) -> Any:
        return send(moe_layer.fc1_latent_proj(hidden_states), *args)

    def receive_and_widen(hidden_states: Tensor) -> Tensor:
        widened: Tensor = moe_layer.fc2_latent_proj(receive(hidden_states))
        return widened

    dispatcher.dispatch_preprocess = narrow_and_send
    dispatcher.combine_postprocess = receive_and_widen
