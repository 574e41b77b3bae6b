"""Convert rows of an old batch to packed sequences, and engine outputs to grids [B, W]."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.errors import BatchError
from temper_engine_api.padding import from_padded
from temper_legacy_shim.data_proto import DataProto


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """B rows of an old batch in both layouts."""

    sequences: SequenceBatch
    """The rows without padding; sample ids are row numbers."""
    position: Tensor
    """[T] int64: cell of the B * W grid that each token fills; -1 in the prompt."""
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
        data: input_ids, attention_mask, position_ids [B, L] and responses [B, W], the last W
            columns; response_mask [B, W] marks trained tokens, without it every token of the
            response is.
        temperature: of every row.
        columns: further [B, W] tensors that an objective reads.

    Raises:
        BatchError: a tensor is missing, or of a kind that these workers never carry on: images,
            positions of several axes.
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


def temperature_of(data: DataProto) -> float:
    """Return the temperature at which the responses were sampled.

    Raises:
        BatchError: meta_info does not say it.
    """
    value = data.meta_info.get("temperature")
    if not isinstance(value, int | float) or not value > 0:
        raise BatchError(
            f"meta_info['temperature'] is {value!r}, but must be the number above 0 that the "
            "responses were sampled with."
        )
    return float(value)


def row_lengths(data: DataProto) -> list[int]:
    lengths: list[int] = _tensors(data)["attention_mask"].sum(1).tolist()
    return lengths


def _tensors(data: DataProto) -> dict[str, Tensor]:
    tensors = dict(data.batch.items()) if data.batch is not None else {}
    missing = {"input_ids", "attention_mask", "position_ids", "responses"} - tensors.keys()
    if missing:
        raise BatchError(
            f"the batch has no {', '.join(sorted(missing))}; it has {sorted(tensors)}."
        )
    if "multi_modal_inputs" in data.non_tensor_batch or tensors["position_ids"].ndim != 2:
        raise BatchError(
            "the batch carries images or positions of several axes, and Temper 0.x trains on text "
            "alone: remove them."
        )
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _response_mask(mask: Tensor, *, within: Tensor) -> Tensor:
    if mask.shape != within.shape:
        raise BatchError(
            f"response_mask has shape {tuple(mask.shape)}, but the responses have "
            f"{tuple(within.shape)}."
        )
    trained = mask.bool()
    outside = (trained & ~within).any(1)
    if bool(outside.any()):
        raise BatchError(
            f"response_mask of row {int(outside.int().argmax())} is 1 where attention_mask is 0: "
            "set it to 0 there."
        )
    return trained


def _has_predecessor(attention: Tensor) -> Tensor:
    """Return [B, L] False at the first token of each row, which nothing predicts."""
    return attention & (attention.cumsum(1) > 1)


OLD_NAMES = {
    "advantages": "advantages",
    "old_logprobs": "old_log_probs",
    "ref_logprobs": "ref_log_prob",
    "returns": "returns",
    "values": "values",
}
"""Temper's column, and the key of the old batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedPart:
    """Token positions in a rank's part [B, P + W]; responses begin at column P."""

    kept: SequenceBatch
    """The share without dummies, in its order."""
    row: Tensor
    """[T] int64 row of each token."""
    position: Tensor
    """[T] int64 column of each token."""
    prompt_width: int
    response_width: int
    max_tokens: int
    """Tokens of the fullest micro-batch, which the old worker gets as its budget."""
    temperature: float

    def data(self, *, columns: Sequence[str]) -> DataProto:
        """Return the rows of a mini-batch under verl's keys, padded to its widths."""
        missing = set(columns) - self.kept.columns.keys()
        if missing:
            raise BatchError(
                f"the mini-batch has no {', '.join(sorted(missing))}, which the deprecated worker "
                "reads."
            )
        ids, attention = self._pad(self.kept.tokens), self._pad(torch.ones_like(self.kept.tokens))
        tensors = {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": self._pad(self.kept.get_position_ids()),
            "prompts": ids[:, : self.prompt_width],
            "responses": ids[:, self.prompt_width :],
            "response_mask": self._pad(self.kept.loss_mask.long())[:, self.prompt_width :],
        }
        tensors |= {
            OLD_NAMES[name]: self._pad(self.kept.columns[name])[:, self.prompt_width :]
            for name in columns
        }
        if not columns:
            del tensors["response_mask"]
        return DataProto.from_dict(tensors=tensors, meta_info={"temperature": self.temperature})

    def tokens_of(self, grid: Tensor) -> Tensor:
        """Gather the entries [T] of a response grid [B, W]; 0 at tokens of the prompt."""
        is_response = self.position >= self.prompt_width
        column = grid.new_zeros(self.kept.num_tokens)
        column[is_response] = grid[
            self.row[is_response], self.position[is_response] - self.prompt_width
        ]
        return column

    def _pad(self, column: Tensor) -> Tensor:
        out = column.new_zeros(self.kept.num_sequences, self.prompt_width + self.response_width)
        out[self.row, self.position] = column
        return out


def pad_part(part: PackedBatch, *, full_rows: bool = False) -> PaddedPart:
    """Lay a share out as old rows.

    Args:
        part: this rank's share; its dummies are left out.
        full_rows: the response is everything but the first token, so that every token gets its
            answer; otherwise it begins at the first trained token.

    Raises:
        BatchError: only dummies, or rows of different temperatures.
    """
    keep = torch.nonzero(~part.is_dummy)[:, 0]
    if not len(keep):
        raise BatchError(
            "this rank's share of the mini-batch is empty, which the deprecated workers never met: "
            "use fewer ranks."
        )
    kept = part.select(keep)
    heats = kept.temperature.unique()
    if len(heats) != 1:
        raise BatchError(
            f"rows have temperatures {heats.tolist()}, but the deprecated workers know one for a "
            "batch."
        )
    row, starts, lengths = kept.sequence_index, kept.sequence_starts.long()[:-1], kept.lengths
    within = torch.arange(kept.num_tokens) - starts[row]
    begins = torch.ones_like(lengths) if full_rows else _first_trained(kept, within)
    prompt_width = int(begins.max())
    return PaddedPart(
        kept=SequenceBatch(
            **{name: getattr(kept, name) for name in SequenceBatch.__dataclass_fields__}
        ),
        row=row,
        position=within - begins[row] + prompt_width,
        prompt_width=prompt_width,
        response_width=max(1, int((lengths - begins).max())),
        max_tokens=max(int(micro.lengths.sum()) for micro in part.iterate_micro_batches()),
        temperature=float(heats[0]),
    )


def _first_trained(batch: SequenceBatch, within: Tensor) -> Tensor:
    """Return [B] place of each sequence's first trained token; its length if it has none."""
    first = batch.lengths.clone()
    trained = batch.loss_mask
    return first.scatter_reduce(0, batch.sequence_index[trained], within[trained], reduce="amin")
