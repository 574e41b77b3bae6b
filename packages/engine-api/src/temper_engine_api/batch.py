"""Sequences laid end to end with their columns; the same with a plan is a rank's share of one mini-batch.

Column entry t belongs to ``tokens[t]``: ``logprobs[t] = log p(tokens[t] | earlier tokens of its sequence)``, and ``values[t]`` is the
value of the state before ``tokens[t]``. No padding here and no flags: options travel in dataclasses of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from temper_engine_api.errors import BatchError

DUMMY_ID = -1
"""Sample, atom and group id of the one-token sequence that stands in an empty micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What the losses of a whole mini-batch, over all ranks, are divided by; counted after all masking, where the batch is planned."""

    tokens: int
    """Trained tokens (entries of ``loss_mask``)."""
    sequences: int
    """Sequences with at least one trained token."""
    groups: int
    """Groups with at least one trained token."""

    @property
    def is_empty(self) -> bool:
        """Whether the mini-batch trains nothing."""
        return self.tokens == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """B sequences of T tokens in all, laid end to end, with their columns."""

    tokens: Tensor
    """[T] int64."""
    sequence_starts: Tensor
    """[B + 1] int32, from 0 to T; sequence b is tokens[sequence_starts[b]:sequence_starts[b + 1]], never empty."""
    loss_mask: Tensor
    """[T] bool; entry t says whether predicting tokens[t] is trained. The first entry of a sequence is False."""
    sample_ids: Tensor
    """[B] int64, unique in a mini-batch; DUMMY_ID marks a dummy."""
    group_ids: Tensor
    """[B] int64; completions of one prompt share it."""
    atom_ids: Tensor
    """[B] int64; sequences that share it (preference pairs) are never split over micro-batches."""
    temperature: Tensor
    """[B] float32, above 0; logits are divided by it before the log-softmax."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token inputs of an objective by name, [T] or [T, K]."""
    sequence_columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-sequence inputs of an objective by name, [B] or [B, K]."""
    position_ids: Tensor | None = None
    """[T] or [3, T] int64 where they don't simply count from 0 in each sequence."""
    media: tuple[object, ...] | None = None
    """Reserved for inputs that are not text; opaque to every engine of 0.x."""

    def __post_init__(self) -> None:
        self._check_shapes()
        if self.tokens.device.type != "cpu":
            return  # values were checked where the batch was made; reading them here would stall the device
        starts = self.sequence_starts.long()
        if int(starts[0]) != 0 or int(starts[-1]) != self.num_tokens or bool((starts.diff() < 1).any()):
            raise BatchError(f"sequence_starts must rise from 0 to {self.num_tokens} without empty sequences, but is {starts.tolist()}.")
        if bool(self.loss_mask[starts[:-1]].any()):
            raise BatchError("loss_mask is True at the first token of a sequence, which nothing predicts: set it to False there.")

    def _check_shapes(self) -> None:
        per_token = {"loss_mask": self.loss_mask, **self.columns}
        per_sequence = {"sample_ids": self.sample_ids, "group_ids": self.group_ids, "atom_ids": self.atom_ids}
        per_sequence |= {"temperature": self.temperature, **self.sequence_columns}
        if self.tokens.ndim != 1 or self.tokens.dtype != torch.int64 or self.sequence_starts.numel() < 2:
            raise BatchError("tokens must be [T] int64 and sequence_starts [B + 1] with B >= 1.")
        if self.loss_mask.dtype != torch.bool:
            raise BatchError(f"loss_mask must be bool, but is {self.loss_mask.dtype}; weights are a separate float column.")
        for name, column in per_token.items():
            if column.shape[:1] != (self.num_tokens,):
                raise BatchError(f"column {name!r} has shape {tuple(column.shape)}, but there are {self.num_tokens} tokens.")
        for name, column in per_sequence.items():
            if column.shape[:1] != (self.num_sequences,):
                raise BatchError(f"column {name!r} has shape {tuple(column.shape)}, but there are {self.num_sequences} sequences.")
        if self.position_ids is not None and self.position_ids.shape[-1] != self.num_tokens:
            raise BatchError(f"position_ids has shape {tuple(self.position_ids.shape)}, but there are {self.num_tokens} tokens.")

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.sequence_starts.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """[B] int64 tokens of each sequence."""
        return self.sequence_starts.long().diff()

    @property
    def sequence_index(self) -> Tensor:
        """[T] int64: which sequence each token belongs to."""
        order = torch.arange(self.num_sequences, device=self.tokens.device)
        return torch.repeat_interleave(order, self.lengths, output_size=self.num_tokens)

    @property
    def is_dummy(self) -> Tensor:
        """[B] bool."""
        return self.sample_ids == DUMMY_ID

    def positions(self) -> Tensor:
        """[T] or [3, T] int64 position of each token: those given, else counted from 0 in each sequence."""
        if self.position_ids is not None:
            return self.position_ids
        starts = self.sequence_starts.long()[:-1]
        return torch.arange(self.num_tokens, device=self.tokens.device) - starts[self.sequence_index]

    def select(self, sequences: Sequence[int] | Tensor) -> "SequenceBatch":
        """The sequences of these indices in this order, all columns with them; an index may come more than once."""
        index = torch.as_tensor(sequences, dtype=torch.long, device=self.tokens.device)
        lengths = self.lengths[index]
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        within = torch.arange(int(starts[-1]), device=self.tokens.device) - torch.repeat_interleave(starts[:-1], lengths)
        source = within + torch.repeat_interleave(self.sequence_starts.long()[:-1][index], lengths)
        return SequenceBatch(
            tokens=self.tokens[source],
            sequence_starts=starts.int(),
            loss_mask=self.loss_mask[source],
            sample_ids=self.sample_ids[index],
            group_ids=self.group_ids[index],
            atom_ids=self.atom_ids[index],
            temperature=self.temperature[index],
            columns={name: column[source] for name, column in self.columns.items()},
            sequence_columns={name: column[index] for name, column in self.sequence_columns.items()},
            position_ids=None if self.position_ids is None else self.position_ids[..., source],
            media=None if self.media is None else tuple(self.media[i] for i in index.tolist()),
        )

    def with_columns(self, columns: Mapping[str, Tensor], sequence_columns: Mapping[str, Tensor] | None = None) -> Self:
        """This batch with further columns; a name that is already there is replaced."""
        return replace(self, columns={**self.columns, **columns}, sequence_columns={**self.sequence_columns, **(sequence_columns or {})})

    def to(self, device: torch.device | str) -> Self:
        """The same batch with every tensor on this device."""
        return replace(
            self,
            tokens=_moved(self.tokens, device),
            sequence_starts=_moved(self.sequence_starts, device),
            loss_mask=_moved(self.loss_mask, device),
            sample_ids=_moved(self.sample_ids, device),
            group_ids=_moved(self.group_ids, device),
            atom_ids=_moved(self.atom_ids, device),
            temperature=_moved(self.temperature, device),
            columns={name: _moved(column, device) for name, column in self.columns.items()},
            sequence_columns={name: _moved(column, device) for name, column in self.sequence_columns.items()},
            position_ids=None if self.position_ids is None else _moved(self.position_ids, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(SequenceBatch):
    """One rank's share of one mini-batch: sequences laid end to end, with their split into micro-batches."""

    micro_batch_starts: Tensor
    """[M + 1] int32, in sequences; given by the plan, executed by the engine, never changed. No micro-batch is empty."""
    denominators: Denominators
    """Trained tokens, sequences and groups of the whole mini-batch over all ranks."""

    def __post_init__(self) -> None:
        SequenceBatch.__post_init__(self)
        if self.tokens.device.type != "cpu":
            return
        starts = self.micro_batch_starts.tolist()
        if starts[0] != 0 or starts[-1] != self.num_sequences or any(b <= a for a, b in pairwise(starts)):
            raise BatchError(f"micro_batch_starts must rise from 0 to {self.num_sequences} without empty micro-batches, but is {starts}.")

    def to(self, device: torch.device | str) -> Self:
        """The same batch with every tensor on this device."""
        return replace(SequenceBatch.to(self, device), micro_batch_starts=_moved(self.micro_batch_starts, device))

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return self.micro_batch_starts.shape[0] - 1

    def micro_batches(self) -> Iterator[SequenceBatch]:
        """The micro-batches in the plan's order, as views of this batch's tensors."""
        for first, last in pairwise(self.micro_batch_starts.tolist()):
            yield slice_sequences(self, first=first, last=last)


def _moved(column: Tensor, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cuda" and column.device.type == "cpu":
        # From memory that is not pinned, the host waits until the device has done all that it was given before.
        return column.pin_memory().to(device, non_blocking=True)
    # A copy to the host that nobody waits for would be read before it has arrived.
    return column.to(device, non_blocking=torch.device(device).type != "cpu")


def slice_sequences(batch: SequenceBatch, *, first: int, last: int) -> SequenceBatch:
    """Sequences first to last - 1 as views, nothing copied but the starts."""
    a, b = int(batch.sequence_starts[first]), int(batch.sequence_starts[last])
    return SequenceBatch(
        tokens=batch.tokens[a:b],
        sequence_starts=batch.sequence_starts[first : last + 1] - batch.sequence_starts[first],
        loss_mask=batch.loss_mask[a:b],
        sample_ids=batch.sample_ids[first:last],
        group_ids=batch.group_ids[first:last],
        atom_ids=batch.atom_ids[first:last],
        temperature=batch.temperature[first:last],
        columns={name: column[a:b] for name, column in batch.columns.items()},
        sequence_columns={name: column[first:last] for name, column in batch.sequence_columns.items()},
        position_ids=None if batch.position_ids is None else batch.position_ids[..., a:b],
        media=None if batch.media is None else batch.media[first:last],
    )


def concatenate(batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """Batches one after the other; they must have the same columns.

    Raises:
        BatchError: no batch at all, or their columns differ.
    """
    if not batches:
        raise BatchError("there is no batch to concatenate.")
    head = batches[0]
    for other in batches[1:]:
        if set(other.columns) != set(head.columns) or set(other.sequence_columns) != set(head.sequence_columns):
            raise BatchError(
                f"batches with different columns can't be concatenated: {sorted(head.columns)} + {sorted(head.sequence_columns)} "
                f"against {sorted(other.columns)} + {sorted(other.sequence_columns)}."
            )
    lengths = torch.cat([b.lengths for b in batches])
    has_positions = any(b.position_ids is not None for b in batches)
    return SequenceBatch(
        tokens=torch.cat([b.tokens for b in batches]),
        sequence_starts=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
        loss_mask=torch.cat([b.loss_mask for b in batches]),
        sample_ids=torch.cat([b.sample_ids for b in batches]),
        group_ids=torch.cat([b.group_ids for b in batches]),
        atom_ids=torch.cat([b.atom_ids for b in batches]),
        temperature=torch.cat([b.temperature for b in batches]),
        columns={name: torch.cat([b.columns[name] for b in batches]) for name in head.columns},
        sequence_columns={name: torch.cat([b.sequence_columns[name] for b in batches]) for name in head.sequence_columns},
        position_ids=torch.cat([b.positions() for b in batches], dim=-1) if has_positions else None,
        media=None if head.media is None else tuple(item for b in batches for item in b.media or ()),
    )


def from_sequences(
    tokens: Sequence[Tensor],
    *,
    loss_masks: Sequence[Tensor],
    sample_ids: Sequence[int] | None = None,
    group_ids: Sequence[int] | None = None,
    atom_ids: Sequence[int] | None = None,
    temperature: float | Sequence[float] = 1.0,
    columns: Mapping[str, Sequence[Tensor]] | None = None,
    sequence_columns: Mapping[str, Tensor] | None = None,
) -> SequenceBatch:
    """A batch from one tensor per sequence.

    Args:
        tokens: B tensors [L_b] of token ids.
        loss_masks: B tensors [L_b] bool.
        sample_ids: B ids, by default 0 to B - 1; group_ids and atom_ids are by default the sample's own id.
        group_ids: see sample_ids.
        atom_ids: see sample_ids.
        temperature: one for all, or one each.
        columns: per name B tensors [L_b] or [L_b, K].
        sequence_columns: per name [B] or [B, K].
    """
    ids = torch.arange(len(tokens)) if sample_ids is None else torch.as_tensor(sample_ids, dtype=torch.int64)
    lengths = torch.tensor([len(t) for t in tokens], dtype=torch.int64)
    heat = torch.as_tensor(temperature, dtype=torch.float32).expand(len(tokens)).clone()
    return SequenceBatch(
        tokens=torch.cat(list(tokens)).long(),
        sequence_starts=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
        loss_mask=torch.cat(list(loss_masks)).bool(),
        sample_ids=ids,
        group_ids=ids.clone() if group_ids is None else torch.as_tensor(group_ids, dtype=torch.int64),
        atom_ids=ids.clone() if atom_ids is None else torch.as_tensor(atom_ids, dtype=torch.int64),
        temperature=heat,
        columns={name: torch.cat(list(parts)) for name, parts in (columns or {}).items()},
        sequence_columns=dict(sequence_columns or {}),
    )
