"""One micro-batch as a context-parallel rank computes it: its slice of the padded tokens, their positions, and who sees whom.

T tokens of the micro-batch. Laid end to end they are one row, otherwise each of the R sequences is a row, padded to the longest; this rank
has S places of every row, side by side.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_megatron.model.packed_attention import PackLayout, RowLayout, build_pack_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMicroBatch:
    """What goes into the model on this rank."""

    whole: SequenceBatch
    """The micro-batch itself, on the device."""
    tokens: Tensor
    """[R, S] int64."""
    positions: Tensor
    """[R, S] int64."""
    is_padding: Tensor
    """[R, S] bool."""
    attention: PackLayout | RowLayout
    """Who sees whom."""
    place: Tensor
    """[T] int64, where each token of the micro-batch lies in [S R], place after place of all rows; -1 on other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLayout:
    """How micro-batches are laid out on this rank."""

    cp_size: int
    """Ranks that share a micro-batch."""
    cp_rank: int
    """This one among them."""
    token_multiple: int
    """A row is padded to a multiple of so many places over all ranks."""
    is_packed: bool
    """Sequences lie end to end, or in a row each."""
    device: torch.device
    """Where they go."""


def build_local_micro_batch(
    micro: SequenceBatch, slicing: MicroBatchLayout, *, trained_tokens: int
) -> LocalMicroBatch:
    """This rank's slice of a micro-batch; one that lies on the CPU is split without waiting for the device.

    Args:
        micro: the micro-batch.
        slicing: see MicroBatchLayout.
        trained_tokens: of the whole mini-batch over all ranks.
    """
    starts = micro.sequence_starts.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    longest = sum(lengths) if slicing.is_packed else max(lengths)
    length = longest + -longest % slicing.token_multiple
    size = length // slicing.cp_size
    mine = slice(slicing.cp_rank * size, (slicing.cp_rank + 1) * size)
    share = int(micro.loss_mask.sum()) / max(trained_tokens, 1)
    whole = micro.to(slicing.device)
    row, column = _places(whole, is_packed=slicing.is_packed)
    num_rows = 1 if slicing.is_packed else len(lengths)
    is_here = (column >= mine.start) & (column < mine.stop)
    attention: PackLayout | RowLayout
    if slicing.is_packed:
        # Padding is a sequence of its own.
        attention = build_pack_layout(
            [*starts, length], mine=mine, share=share, device=slicing.device
        )
    else:
        attention = RowLayout(last=mine.stop, share=share)

    def spread(values: Tensor, empty: float) -> Tensor:
        grid = values.new_full((num_rows, length), empty)
        grid[row, column] = values
        return grid[:, mine]

    return LocalMicroBatch(
        whole=whole,
        tokens=spread(whole.tokens, 0),
        positions=spread(whole.get_position_ids(), 0),
        is_padding=spread(torch.zeros_like(whole.loss_mask), True),
        attention=attention,
        place=torch.where(is_here, (column - mine.start) * num_rows + row, -1),
    )


def _places(batch: SequenceBatch, *, is_packed: bool) -> tuple[Tensor, Tensor]:
    """[T] row and column of each token."""
    every = torch.arange(batch.num_tokens, device=batch.tokens.device)
    if is_packed:
        return torch.zeros_like(every), every
    row = batch.sequence_index.long()
    return row, every - batch.sequence_starts.long()[row]
