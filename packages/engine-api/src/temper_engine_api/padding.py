"""Lossless conversion between packed batches and padded mappings of [B, L] tensors.

Engines compute on packed batches only. Convert batches here if your code pads them.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, list_columns
from temper_engine_api.errors import BatchError

_RESERVED_NAMES = frozenset(
    {
        *("input_ids", "attention_mask"),
        *(field.name for field in fields(SequenceBatch) if field.type in (Tensor, Tensor | None)),
    }
) - {"tokens", "sequence_starts"}
"""Entries of a padded mapping that are not columns. They have the names of SequenceBatch's tensors,
except for `input_ids` (the tokens) and `attention_mask` (in place of `sequence_starts`)."""


def from_padded(padded: Mapping[str, Tensor]) -> SequenceBatch:
    """Convert a padded mapping to a packed batch with one sequence per row.

    Args:
        padded: `input_ids` [B, L] integers and `attention_mask` [B, L] of 0 and 1, padded left,
            right or on both sides. Optional entries: `loss_mask` [B, L] (default: all tokens but
            the first of each row), `position_ids` [B, L] or [3, B, L], `temperature` [] or [B]
            (default 1), `sample_ids` [B] (default: row number), `group_ids` and `pack_group_ids`
            [B] (default: the sample's id). Any other entry is a per-token column if it is [B, L] or
            [B, L, K], else a per-sequence column [B] or [B, K].

    Raises:
        BatchError: If an entry is missing or has a wrong shape, `loss_mask` is True on padding, or
            a row is empty or has gaps.
    """
    tokens, mask = _read_tokens_and_mask(padded)
    lengths = mask.sum(1)
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    if "loss_mask" in padded:
        loss_mask = _read_loss_mask(padded["loss_mask"], mask)
    else:
        loss_mask = torch.ones(int(starts[-1]), dtype=torch.bool, device=mask.device)
        # The first token of a sequence has no predecessor that could predict it.
        loss_mask[starts[:-1]] = False
    sample_ids = _read_ids(
        padded, "sample_ids", default=torch.arange(len(mask), device=mask.device)
    )
    token_columns, sequence_columns = _read_columns(padded, mask)
    return SequenceBatch(
        tokens=tokens[mask].long(),
        sequence_starts=starts.int(),
        loss_mask=loss_mask,
        sample_ids=sample_ids,
        group_ids=_read_ids(padded, "group_ids", default=sample_ids),
        pack_group_ids=_read_ids(padded, "pack_group_ids", default=sample_ids),
        temperature=_read_temperature(padded, mask),
        columns=token_columns,
        sequence_columns=sequence_columns,
        position_ids=_read_position_ids(padded["position_ids"], mask)
        if "position_ids" in padded
        else None,
    )


def to_padded(
    batch: SequenceBatch,
    *,
    length: int | None = None,
    pad_token_id: int = 0,
    side: Literal["left", "right"] = "right",
) -> dict[str, Tensor]:
    """Convert a packed batch to a padded mapping; `from_padded` converts it back exactly.

    Args:
        batch: Batch without media.
        length: Padded length L; the longest sequence by default.
        pad_token_id: Padding value of `input_ids`; all other entries are padded with 0 or False.
        side: Side on which rows are padded.

    Raises:
        BatchError: If `length` is shorter than the longest sequence, the batch has media, or
            `from_padded` could not recover a column from its name and shape.
    """
    width = _check_width(batch, length)
    position, lengths = torch.arange(width, device=batch.tokens.device), batch.lengths[:, None]
    mask = position < lengths if side == "right" else position >= width - lengths

    def pad(column: Tensor, fill: int = 0) -> Tensor:
        out = column.new_full((*mask.shape, *column.shape[1:]), fill)
        out[mask] = column
        return out

    padded = {"input_ids": pad(batch.tokens, pad_token_id), "attention_mask": mask.long()}
    for field, name, axis, dim, tensor in list_columns(batch):
        if field == "tokens":
            continue
        if axis == "sequence":
            padded[name] = tensor
        elif dim == 0 or tensor.ndim == 1:
            padded[name] = pad(tensor)
        else:
            # Position ids may be [3, T] with tokens in the last dimension, so each of the 3 rows is
            # padded.
            padded[name] = torch.stack([pad(row) for row in tensor])
    return padded


def _check_width(batch: SequenceBatch, length: int | None) -> int:
    longest = int(batch.lengths.max())
    width = longest if length is None else length
    if width < longest:
        raise BatchError(
            f"length is {width}, but the longest sequence has {longest} tokens: raise length."
        )
    if batch.media is not None:
        raise BatchError(
            "a batch with media can't be padded: drop the media, or keep the batch packed."
        )
    for name, column in batch.sequence_columns.items():
        if column.shape[1:] == (width,):
            raise BatchError(
                f"per-sequence column {name!r} has shape {tuple(column.shape)}, which at length "
                f"{width} could not be told from a per-token column: choose another length."
            )
    # Names must be unique, because from_padded has only the name and the shape.
    taken = _RESERVED_NAMES | (batch.columns.keys() & batch.sequence_columns.keys())
    for name in sorted(taken & (batch.columns.keys() | batch.sequence_columns.keys())):
        raise BatchError(
            f"column {name!r} has the name of a field of the padded mapping, or exists both per "
            "token and per sequence: rename it."
        )
    return width


def _read_tokens_and_mask(padded: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    missing = {"input_ids", "attention_mask"} - padded.keys()
    if missing:
        raise BatchError(
            f"the padded mapping has no {' and no '.join(sorted(missing))}, but only "
            f"{sorted(padded)}: add input_ids and attention_mask."
        )
    tokens = padded["input_ids"]
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.numel() == 0:
        raise BatchError(
            f"input_ids is {tuple(tokens.shape)} {tokens.dtype}, but must be [B, L] integers with "
            "B and L above 0."
        )
    mask = _as_bool(padded["attention_mask"], name="attention_mask", shape=tokens.shape)
    position = torch.arange(mask.shape[1], device=mask.device)
    # argmax returns the first of equal maxima, here the position of the first 1.
    first, lengths = mask.int().argmax(1, keepdim=True), mask.sum(1, keepdim=True)
    is_contiguous = (mask == ((position >= first) & (position < first + lengths))).all(1) & (
        lengths[:, 0] > 0
    )
    if not bool(is_contiguous.all()):
        row = int(is_contiguous.int().argmin())
        fault = (
            "has a 0 between 1s: pad only at the ends"
            if bool(mask[row].any())
            else "is all 0: remove the row"
        )
        raise BatchError(f"row {row} of attention_mask {fault}.")
    return tokens, mask


def _as_bool(value: Tensor, *, name: str, shape: torch.Size) -> Tensor:
    if value.shape != shape:
        raise BatchError(
            f"{name} has shape {tuple(value.shape)}, but must have the shape of input_ids, "
            f"{tuple(shape)}."
        )
    if bool(((value != 0) & (value != 1)).any()):
        raise BatchError(f"{name} has values other than 0 and 1: put token weights into a column.")
    return value.bool()


def _read_loss_mask(value: Tensor, mask: Tensor) -> Tensor:
    loss_mask = _as_bool(value, name="loss_mask", shape=mask.shape)
    outside = (loss_mask & ~mask).any(1)
    if bool(outside.any()):
        raise BatchError(
            f"loss_mask of row {int(outside.int().argmax())} is True on padding: set it to 0 there."
        )
    return loss_mask[mask]


def _read_ids(padded: Mapping[str, Tensor], name: str, *, default: Tensor) -> Tensor:
    value = padded.get(name, default)
    if value.shape != default.shape or value.is_floating_point():
        raise BatchError(
            f"{name} is {tuple(value.shape)} {value.dtype}, but must be [{len(default)}] integers."
        )
    return value.long()


def _read_temperature(padded: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    value = padded.get("temperature", mask.new_ones((), dtype=torch.float32))
    if value.shape not in (torch.Size([]), torch.Size([len(mask)])):
        raise BatchError(
            f"temperature has shape {tuple(value.shape)}, but must be [] for all rows, or "
            f"[{len(mask)}]."
        )
    # A copy: in the expanded view all rows share one number in memory.
    return value.to(torch.float32).expand(len(mask)).clone()


def _read_position_ids(value: Tensor, mask: Tensor) -> Tensor:
    if value.shape == mask.shape:
        return value[mask].long()
    if value.shape == (3, *mask.shape):
        return value[:, mask].long()
    raise BatchError(
        f"position_ids has shape {tuple(value.shape)}, but must be {tuple(mask.shape)} or "
        f"{(3, *mask.shape)}."
    )


def _read_columns(
    padded: Mapping[str, Tensor], mask: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    token_columns: dict[str, Tensor] = {}
    sequence_columns: dict[str, Tensor] = {}
    for name in padded.keys() - _RESERVED_NAMES:
        value = padded[name]
        if value.shape[:2] == mask.shape and value.ndim in (2, 3):
            token_columns[name] = value[mask]
        elif value.shape[:1] == mask.shape[:1] and value.ndim in (1, 2):
            sequence_columns[name] = value
        else:
            rows, width = mask.shape
            raise BatchError(
                f"column {name!r} has shape {tuple(value.shape)}, but must be [{rows}, {width}] or "
                f"[{rows}, {width}, K] per token, or [{rows}] or [{rows}, K] per sequence."
            )
    # Sorted, because set order depends on the hash seed, which differs across ranks.
    return dict(sorted(token_columns.items())), dict(sorted(sequence_columns.items()))
