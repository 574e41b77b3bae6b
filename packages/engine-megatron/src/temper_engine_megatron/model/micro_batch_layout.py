"""One micro-batch as a context-parallel rank computes it: a slice of its padded tokens.

T is the micro-batch's token count. Packed sequences form one row; otherwise each of the R
sequences is a row, padded to the longest. This rank has S consecutive positions of every row.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import ROUTED_EXPERTS
from temper_engine_megatron.model.packed_attention import (
    PackLayout,
    RouterTokens,
    RowLayout,
    build_pack_layout,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMicroBatch:
    """Model inputs of one micro-batch on this rank."""

    micro_batch: SequenceBatch
    """The full micro-batch, on the device."""
    tokens: Tensor
    """[R, S] int64 token ids; 0 at padding."""
    positions: Tensor
    """[R, S] int64 positions within each sequence; 0 at padding."""
    attention: PackLayout | RowLayout
    """Sequence boundaries for attention."""
    local_index: Tensor
    """[T] int64 index per token into the flattened [S, R]; -1 for tokens on other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLayout:
    """Layout of micro-batches on this rank."""

    cp_size: int
    """Number of context-parallel ranks, which split a micro-batch."""
    cp_rank: int
    token_multiple: int
    """Rows are padded to a multiple of this number, counted over all ranks."""
    is_packed: bool
    """Concatenate the sequences; otherwise each is a row."""
    device: torch.device
    """Device of the model inputs."""


def build_local_micro_batch(
    micro: SequenceBatch,
    layout: MicroBatchLayout,
    *,
    trained_tokens: int,
    records_choices: bool = False,
) -> LocalMicroBatch:
    """Build this rank's inputs; does not wait for the device if the micro-batch is on the CPU.

    Args:
        micro: Full micro-batch.
        layout: How micro-batches are laid out.
        trained_tokens: Trained tokens of the mini-batch over all ranks.
        records_choices: Let routers keep the experts that they choose.
    """
    starts = micro.sequence_starts.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    longest = sum(lengths) if layout.is_packed else max(lengths)
    padded_length = longest + -longest % layout.token_multiple
    size = padded_length // layout.cp_size
    local = slice(layout.cp_rank * size, (layout.cp_rank + 1) * size)
    on_device = micro.to(layout.device)
    row, column = _grid_positions(on_device, is_packed=layout.is_packed)
    num_rows = 1 if layout.is_packed else len(lengths)
    # Consecutive positions, so that at most one sequence of a slice begins before it.
    is_local = (column >= local.start) & (column < local.stop)

    def to_local_rows(values: Tensor, fill: float) -> Tensor:
        grid = values.new_full((num_rows, padded_length, *values.shape[1:]), fill)
        grid[row, column] = values
        return grid[:, local]

    index = on_device.sequence_index
    trained = torch.zeros(len(lengths), device=layout.device)
    trained = trained.index_add(0, index, on_device.loss_mask.float())
    prescribed = on_device.columns.get(ROUTED_EXPERTS)
    if prescribed is not None:
        # Dummies choose for themselves, so that they are spread over experts.
        is_dummy = on_device.is_dummy[index][:, None, None]
        prescribed = torch.where(is_dummy, -1, prescribed.long())
    router_tokens = RouterTokens(
        sequence_index=to_local_rows(index, len(lengths)),
        # max() makes the weights 0 in a mini-batch without any trained token.
        weights=to_local_rows((trained / max(trained_tokens, 1) / on_device.lengths)[index], 0),
        lengths=torch.cat([on_device.lengths.float(), trained.new_ones(1)]),
        is_real=to_local_rows(~on_device.is_dummy[index], False),
        choices=None if prescribed is None else to_local_rows(prescribed, -1),
        records_choices=records_choices,
    )
    attention: PackLayout | RowLayout
    if layout.is_packed:
        # Padding is a separate sequence, so that no real token attends to it.
        attention = build_pack_layout(
            [*starts, padded_length],
            local=local,
            router_tokens=router_tokens,
            device=layout.device,
        )
    else:
        attention = RowLayout(num_keys=local.stop, router_tokens=router_tokens)

    return LocalMicroBatch(
        micro_batch=on_device,
        tokens=to_local_rows(on_device.tokens, 0),
        positions=to_local_rows(on_device.get_position_ids(), 0),
        attention=attention,
        local_index=torch.where(is_local, (column - local.start) * num_rows + row, -1),
    )


def _grid_positions(batch: SequenceBatch, *, is_packed: bool) -> tuple[Tensor, Tensor]:
    """Return the row and the column per token, each [T]."""
    token_index = torch.arange(batch.num_tokens, device=batch.tokens.device)
    if is_packed:
        return torch.zeros_like(token_index), token_index
    row = batch.sequence_index.long()
    return row, token_index - batch.sequence_starts.long()[row]
