"""Linear attention and Mamba layers: those of transformers, called once per sequence.

Each sequence starts with an empty state. The layer is not divided: ranks that share a sequence
gather it, compute all of the layer, and keep their tokens.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from temper_engine_megatron.model.packed_attention import PackLayout, RowLayout, gather_sequence

_MIXERS: Mapping[str, tuple[str, str]] = {
    "nemotron_h": ("nemotron_h", "NemotronHMamba2Mixer"),
    "qwen3_next": ("qwen3_next", "Qwen3NextGatedDeltaNet"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"),
}
"""Module of transformers and class of the layer, by model type."""


def _import_mixer_class(model_type: str) -> type[nn.Module]:
    # Imported here, because older versions of transformers lack some of these models.
    name, class_name = _MIXERS[model_type]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    mixer_class: type[nn.Module] = getattr(module, class_name)
    return mixer_class


class LinearAttention(MegatronModule):
    """A layer with a state, in the place of Megatron's attention."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self._group: dist.ProcessGroup = groups.cp
        mixer_class = _import_mixer_class(config.hf_config.model_type)
        # Megatron counts layers from 1.
        self.mixer = mixer_class(config.hf_config, layer_number - 1)
        self.mixer.to(config.params_dtype)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackLayout | RowLayout,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Mix the tokens of each sequence.

        Args:
            hidden_states: [S, R, H], or a slice of S under sequence parallelism.
            attention_mask: Unused; Megatron passes None.
            packed_seq_params: Sequence boundaries.

        Returns:
            Same shape as the hidden states, and no bias.
        """
        is_divided = self.config.sequence_parallel
        if is_divided:
            # All ranks have the full gradient of the output, so it must not be summed.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        num_local = len(hidden_states)
        tokens = gather_sequence(hidden_states, self._group)
        if isinstance(packed_seq_params, RowLayout):
            # No real token sees the padding after it.
            rows = tokens[: packed_seq_params.num_keys].transpose(0, 1)
            mixed = self.mixer(rows).transpose(0, 1)[-num_local:]
        else:
            mixed = self._mix_pack(tokens[:, 0], packed_seq_params)[:, None]
        if is_divided:
            mixed = scatter_to_sequence_parallel_region(mixed)
        return mixed, None

    def _mix_pack(self, tokens: Tensor, layout: PackLayout) -> Tensor:
        """Return [S, H] of this rank's tokens from those of the full pack."""
        parts = tokens[layout.keys].split(layout.num_keys)
        return torch.cat(
            [
                # A sequence may begin before this rank's slice.
                self.mixer(part[None])[0, -num_queries:]
                for part, num_queries in zip(parts, layout.num_queries, strict=True)
            ]
        )
