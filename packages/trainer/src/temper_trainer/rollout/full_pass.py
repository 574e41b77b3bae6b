"""Forward passes over full sequences, without a KV cache."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from temper_engine_api.errors import ConfigError
from temper_trainer.rollout.kv_cache import CausalAttention, ScoreRule

_MAX_LOGITS = 1 << 25
"""Largest number of logits in a forward pass, which bounds its memory."""
_ATTENTION_TYPES = frozenset(("full_attention", "sliding_attention"))
"""`layer_types` values for layers where tokens only interact in attention that `kv_cache`
computes."""
_TOKENWISE_TYPES = frozenset(("mlp", "moe"))
"""`layer_types` values for layers that process each token by itself."""
_UNSUPPORTED_TYPES = frozenset(("chunked_attention",))
"""Values of `layer_types` with a mask that `kv_cache` does not compute."""


def split_passes(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> list[Sequence[Sequence[int]]]:
    """Split sequences into forward passes of bounded memory, in order."""
    longest = max(len(sequence) for sequence in sequences)
    rows = max(1, _MAX_LOGITS // (longest * model.config.get_text_config().vocab_size))
    return [sequences[first : first + rows] for first in range(0, len(sequences), rows)]


def compute_logits(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Return tokens [B, L], padded on the right, and their logits [B, L, V].

    Padding is exact, because all layers are causal: no token depends on the padding after it.
    """
    padded = nn.utils.rnn.pad_sequence(
        [torch.tensor(sequence) for sequence in sequences], batch_first=True
    ).to(model.device)
    positions = torch.arange(padded.shape[1], device=model.device).expand_as(padded)
    logits: Tensor = model(
        input_ids=padded, position_ids=positions, use_cache=False, slots=CausalAttention()
    ).logits
    return padded, logits


def compute_last_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits [B, V] after each sequence."""
    last = []
    for chosen in split_passes(model, sequences):
        _, logits = compute_logits(model, chosen)
        ends = torch.tensor([len(sequence) - 1 for sequence in chosen], device=model.device)
        last.append(logits[torch.arange(len(chosen), device=model.device), ends])
    return torch.cat(last)


@torch.inference_mode()
def check_layers(model: PreTrainedModel) -> bool:
    """Check that the sampler can run all layers of a model, with a pass over two tokens.

    Returns:
        True if keys and values are all that decoding needs from earlier tokens. Otherwise there are
        layers with a state, such as linear attention, Mamba or convolutions.

    Raises:
        ConfigError: If a layer needs another mask, or does not call the sampler's attention.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    has_convolution = any(isinstance(module, nn.Conv1d) for module in model.modules())
    if kinds is None:
        num_attention_layers = 0 if has_convolution else config.num_hidden_layers
    else:
        num_attention_layers = sum(kind in _ATTENTION_TYPES for kind in kinds)
    attention = _CountedAttention()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    model(input_ids=tokens, position_ids=tokens, use_cache=False, slots=attention)
    unsupported = sorted(_UNSUPPORTED_TYPES.intersection(kinds or ()))
    if unsupported or attention.num_calls < num_attention_layers:
        reason = (
            f"layers with {unsupported[0]}"
            if unsupported
            else "attention that is not called through transformers' attention interface"
        )
        raise ConfigError(
            f"the hf sampler does not support {type(model).__name__}, which has {reason}: use "
            "rollout=vllm."
        )
    return not has_convolution and all(
        kind in _ATTENTION_TYPES | _TOKENWISE_TYPES for kind in kinds or ()
    )


class _CountedAttention(CausalAttention):
    """Counts the layers that call it."""

    def __init__(self) -> None:
        self.num_calls = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, rule: ScoreRule
    ) -> Tensor:
        """Count the call; see Attention."""
        self.num_calls += 1
        return super().attend(layer, query, key, value, rule=rule)
