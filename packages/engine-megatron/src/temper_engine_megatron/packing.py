"""One micro-batch as a context-parallel rank computes it: its slice of the padded tokens, their positions, and who sees whom.

T tokens of the micro-batch, S of them and of the padding on this rank, C ranks; a rank's slice is contiguous.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """Who sees whom: a token sees those of its own sequence up to itself."""

    mask: Tensor
    """[S, S C] bool, True where this rank's token (row) sees the token (column); padding is a sequence of its own."""


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


def local_micro_batch(micro: SequenceBatch, *, cp_size: int, cp_rank: int, token_multiple: int) -> LocalMicroBatch:
    """This rank's slice of a micro-batch on the device, padded to a multiple of ``token_multiple`` tokens over all ranks."""
    length = micro.num_tokens
    padding = -length % token_multiple
    sequence = torch.cat([micro.sequence_index, micro.sequence_index.new_full((padding,), micro.num_sequences)])
    place = torch.arange(length + padding, device=micro.tokens.device)
    size = (length + padding) // cp_size
    mine = slice(cp_rank * size, (cp_rank + 1) * size)
    mask = (sequence[mine, None] == sequence[None]) & (place[mine, None] >= place[None])
    return LocalMicroBatch(
        whole=micro,
        tokens=torch.cat([micro.tokens, micro.tokens.new_zeros(padding)])[mine],
        positions=torch.cat([micro.positions(), micro.tokens.new_zeros(padding)])[mine],
        attention=AttentionLayout(mask=mask),
        first=cp_rank * size,
    )
