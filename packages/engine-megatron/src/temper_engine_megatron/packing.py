"""One micro-batch as a context-parallel rank computes it: its slice of the padded tokens, their positions, and who sees whom.

T tokens of the micro-batch, S of them and of the padding on this rank; a rank's slice is contiguous.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_megatron.attention import AttentionLayout, attention_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMicroBatch:
    """What goes into the model on this rank."""

    whole: SequenceBatch
    """The micro-batch itself, on the device."""
    tokens: Tensor
    """[S] int64."""
    positions: Tensor
    """[S] int64."""
    attention: AttentionLayout
    """See AttentionLayout."""
    first: int
    """Index of the first token of the slice; it may lie beyond T."""

    @property
    def size(self) -> int:
        """S."""
        return self.tokens.shape[0]


def local_micro_batch(micro: SequenceBatch, *, cp_size: int, cp_rank: int, token_multiple: int, device: torch.device) -> LocalMicroBatch:
    """This rank's slice of a micro-batch, padded to a multiple of ``token_multiple`` tokens over all ranks.

    A micro-batch on the CPU is split without waiting for the device.
    """
    length = micro.num_tokens
    padding = -length % token_multiple
    size = (length + padding) // cp_size
    mine = slice(cp_rank * size, (cp_rank + 1) * size)
    whole = micro.to(device)
    return LocalMicroBatch(
        whole=whole,
        tokens=torch.cat([whole.tokens, whole.tokens.new_zeros(padding)])[mine],
        positions=torch.cat([whole.positions(), whole.tokens.new_zeros(padding)])[mine],
        # Padding is a sequence of its own.
        attention=attention_layout([*micro.sequence_starts.tolist(), length + padding], mine=mine, device=device),
        first=mine.start,
    )
