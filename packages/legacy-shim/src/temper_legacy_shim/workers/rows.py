"""Rows of an old batch as sequences laid end to end, and what an engine answers as a grid [B, W] of response positions again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import BatchError
from temper_engine_api.padding import from_padded
from temper_legacy_shim.data_proto import DataProto


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """B rows of an old batch in both layouts."""

    sequences: SequenceBatch
    """The rows without their padding; sample ids are row numbers."""
    position: Tensor
    """[T] int64: which of the B * W cells of the grid each token fills; -1 for tokens of the prompt."""
    shape: tuple[int, int]
    """(B, W), W being the padded width of the responses."""

    def grid(self, column: Tensor) -> Tensor:
        """Return [B, W] a per-token answer [T] at its cells, 0 elsewhere, with gradient."""
        position = self.position.to(column.device)
        is_response = position >= 0
        cells = column.new_zeros(self.shape[0] * self.shape[1])
        return cells.index_copy(0, position[is_response], column[is_response]).reshape(self.shape)


def read_rows(data: DataProto, *, temperature: float = 1.0, columns: Sequence[str] = ()) -> Rows:
    """Return the sequences of an old batch.

    Args:
        data: input_ids, attention_mask, position_ids [B, L] and responses [B, W], the last W columns; response_mask [B, W] says what is
            trained, without it every token of the response is.
        temperature: of every row.
        columns: further [B, W] tensors that an objective reads.

    Raises:
        BatchError: a tensor is missing, or of a kind that these workers never carry on: images, positions of several axes.
    """
    tensors = _tensors(data)
    attention = tensors["attention_mask"].bool()
    batch_size, length = attention.shape
    width = tensors["responses"].shape[1]
    trained = attention[:, length - width :]
    if "response_mask" in tensors:
        trained = _response_mask(tensors["response_mask"], within=trained)

    def complete(column: Tensor) -> Tensor:
        return torch.cat([column.new_zeros(batch_size, length - width), column], dim=1)

    padded = {
        "input_ids": tensors["input_ids"],
        "attention_mask": attention,
        "loss_mask": complete(trained) & _has_predecessor(attention),
        "position_ids": tensors["position_ids"],
        "temperature": torch.tensor(temperature, dtype=torch.float32),
        **{name: complete(tensors[name].float()) for name in columns},
    }
    cells = torch.full((batch_size, length), -1, dtype=torch.int64)
    cells[:, length - width :] = torch.arange(batch_size * width).reshape(batch_size, width)
    return Rows(sequences=from_padded(padded), position=cells[attention], shape=(batch_size, width))


def row_lengths(data: DataProto) -> list[int]:
    """Return the tokens of each row."""
    lengths: list[int] = _tensors(data)["attention_mask"].sum(1).tolist()
    return lengths


def _tensors(data: DataProto) -> dict[str, Tensor]:
    tensors = dict(data.batch.items()) if data.batch is not None else {}
    missing = {"input_ids", "attention_mask", "position_ids", "responses"} - tensors.keys()
    if missing:
        raise BatchError(f"the batch has no {', '.join(sorted(missing))}; it has {sorted(tensors)}.")
    if "multi_modal_inputs" in data.non_tensor_batch or tensors["position_ids"].ndim != 2:
        raise BatchError("the batch carries images or positions of several axes, and Temper 0.x trains on text alone: remove them.")
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _response_mask(mask: Tensor, *, within: Tensor) -> Tensor:
    if mask.shape != within.shape:
        raise BatchError(f"response_mask has shape {tuple(mask.shape)}, but the responses have {tuple(within.shape)}.")
    trained = mask.bool()
    outside = (trained & ~within).any(1)
    if bool(outside.any()):
        raise BatchError(f"response_mask of row {int(outside.int().argmax())} is 1 where attention_mask is 0: set it to 0 there.")
    return trained


def _has_predecessor(attention: Tensor) -> Tensor:
    """Return [B, L] False at the first token of each row, which nothing predicts."""
    return attention & (attention.cumsum(1) > 1)
