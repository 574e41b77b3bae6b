"""Packed batches of sequences: `SequenceBatch`, and `PackedBatch` with its micro-batches.

Sequences are concatenated without padding. Entry t of a per-token column belongs to `tokens[t]`:
`logprobs[t] = log p(tokens[t] | earlier tokens of its sequence)`, and `values[t]` is the value of
the state before `tokens[t]`. See `padding` for conversion to and from padded tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from temper_engine_api.distributed.gatherable import gatherable
from temper_engine_api.errors import BatchError

DUMMY_ID = -1
"""Sample, group and pack-group id of the one-token dummy that fills an empty micro-batch."""


@gatherable
@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts for a mini-batch across all ranks; summed losses are divided by them.

    They are counted once, when the mini-batch is planned and all masks are final. So all ranks and
    micro-batches divide by the same numbers, however many tokens they have themselves.

    Example:
        >>> Denominators(tokens=512, sequences=16, groups=4).is_empty
        False
    """

    tokens: int
    """Trained tokens (entries of ``loss_mask``)."""
    sequences: int
    """Sequences with at least one trained token."""
    groups: int
    """Groups with at least one trained token."""

    @property
    def is_empty(self) -> bool:
        """True if no token of the mini-batch is trained."""
        return self.tokens == 0


_PER_TOKEN = {"axis": "token", "dim": 0}
"""Metadata of a field with one entry per token along `dim`; see `_map_columns`."""
_PER_TOKEN_LAST = {"axis": "token", "dim": -1}
_PER_SEQUENCE = {"axis": "sequence", "dim": 0}
"""Metadata of a field with one entry per sequence."""


@gatherable
@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """B sequences of T tokens in total, concatenated without padding, and their columns.

    Every field but `sequence_starts` declares in its metadata whether it has one entry per token
    or per sequence. Selecting, slicing, concatenating, packing and moving to a device are derived
    from that declaration, so a new field needs no other change.

    Example:
        >>> batch = from_sequences(
        ...     [torch.tensor([5, 6, 7]), torch.tensor([8, 9])],
        ...     loss_masks=[torch.tensor([False, True, True]), torch.tensor([False, True])],
        ... )
        >>> batch.tokens.tolist(), batch.sequence_starts.tolist()
        ([5, 6, 7, 8, 9], [0, 3, 5])
        >>> batch.select([1, 0]).tokens.tolist()
        [8, 9, 5, 6, 7]
    """

    tokens: Tensor = field(metadata=_PER_TOKEN)
    """[T] int64 token ids of all sequences, one sequence after the other."""
    sequence_starts: Tensor
    """[B + 1] int32, from 0 to T. Sequence b is
    tokens[sequence_starts[b]:sequence_starts[b + 1]] and never empty."""
    loss_mask: Tensor = field(metadata=_PER_TOKEN)
    """[T] bool; True where the prediction of tokens[t] is trained. Aligned with the label, so the
    first entry of each sequence is False."""
    sample_ids: Tensor = field(metadata=_PER_SEQUENCE)
    """[B] int64, unique in a mini-batch; DUMMY_ID marks a dummy."""
    group_ids: Tensor = field(metadata=_PER_SEQUENCE)
    """[B] int64; completions of one prompt share it."""
    pack_group_ids: Tensor = field(metadata=_PER_SEQUENCE)
    """[B] int64; sequences with the same value (preference pairs) stay in one micro-batch."""
    temperature: Tensor = field(metadata=_PER_SEQUENCE)
    """[B] float32, above 0; logits are divided by it before the log-softmax."""
    columns: Mapping[str, Tensor] = field(metadata=_PER_TOKEN, default_factory=dict)
    """Per-token inputs for an objective or the engine by name, [T], [T, K] or [T, layers, K]."""
    sequence_columns: Mapping[str, Tensor] = field(metadata=_PER_SEQUENCE, default_factory=dict)
    """Per-sequence inputs of an objective by name, [B] or [B, K]."""
    position_ids: Tensor | None = field(metadata=_PER_TOKEN_LAST, default=None)
    """[T] or [3, T] int64; None if positions count from 0 in each sequence."""
    media: tuple[object, ...] | None = field(metadata=_PER_SEQUENCE, default=None)
    """B entries, reserved for images and other inputs that are not text; engines ignore them."""

    def __post_init__(self) -> None:
        self._check_shapes()
        if self.tokens.device.type != "cpu":
            return  # Values were checked on the CPU; reading them here would stall the device.
        starts = self.sequence_starts.long()
        if (
            int(starts[0]) != 0
            or int(starts[-1]) != self.num_tokens
            or bool((starts.diff() < 1).any())
        ):
            raise BatchError(
                f"sequence_starts is {starts.tolist()}, but must increase from 0 to "
                f"{self.num_tokens} "
                "without empty sequences."
            )
        if bool(self.loss_mask[starts[:-1]].any()):
            raise BatchError(
                "loss_mask is True at the first token of a sequence, which has no context to be "
                "predicted from: set it to False there."
            )

    def _check_shapes(self) -> None:
        if (
            self.tokens.ndim != 1
            or self.tokens.dtype != torch.int64
            or self.sequence_starts.numel() < 2
        ):
            raise BatchError("tokens must be [T] int64 and sequence_starts [B + 1] with B >= 1.")
        if self.loss_mask.dtype != torch.bool:
            raise BatchError(
                f"loss_mask is {self.loss_mask.dtype}, but must be bool: put token weights into a "
                "column."
            )
        if self.media is not None and len(self.media) != self.num_sequences:
            raise BatchError(
                f"media has {len(self.media)} entries, but the batch has {self.num_sequences} "
                "sequences: give one entry per sequence."
            )
        sizes = {"token": self.num_tokens, "sequence": self.num_sequences}
        for _, name, axis, dim, tensor in list_columns(self):
            if tensor.ndim == 0 or tensor.shape[dim] != sizes[axis]:
                raise BatchError(
                    f"column {name!r} has shape {tuple(tensor.shape)}, but the batch has "
                    f"{sizes[axis]} {axis}s: expected {sizes[axis]} entries along dim {dim}."
                )

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        """Number of sequences B."""
        return self.sequence_starts.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """[B] int64, number of tokens per sequence."""
        return self.sequence_starts.long().diff()

    @property
    def sequence_index(self) -> Tensor:
        """[T] int64, index of the sequence that each token belongs to."""
        order = torch.arange(self.num_sequences, device=self.tokens.device)
        # Without output_size, repeat_interleave waits for the device to learn the size of its
        # result.
        return torch.repeat_interleave(order, self.lengths, output_size=self.num_tokens)

    @property
    def is_dummy(self) -> Tensor:
        """[B] bool, True for dummy sequences."""
        return self.sample_ids == DUMMY_ID

    def get_position_ids(self) -> Tensor:
        """Return `position_ids`, or if it is None positions [T] from 0 in each sequence."""
        if self.position_ids is not None:
            return self.position_ids
        starts = self.sequence_starts.long()[:-1]
        return (
            torch.arange(self.num_tokens, device=self.tokens.device) - starts[self.sequence_index]
        )

    def select(self, sequences: Sequence[int] | Tensor) -> "SequenceBatch":
        """Return the sequences of these indices in this order; an index may repeat."""
        index = torch.as_tensor(sequences, dtype=torch.long, device=self.tokens.device)
        lengths = self.lengths[index]
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        # For each token in the result: the start of its sequence in this batch, minus its start in
        # the result.
        offsets = torch.repeat_interleave(
            self.sequence_starts.long()[:-1][index] - starts[:-1], lengths
        )
        source = torch.arange(int(starts[-1]), device=self.tokens.device) + offsets
        return SequenceBatch(
            sequence_starts=starts.int(),
            **_map_columns(
                [self],
                per_token=lambda tensors, *, dim: tensors[0].index_select(dim, source),
                per_sequence=lambda tensors: tensors[0][index],
                media=lambda items: tuple(items[i] for i in index.tolist()),
            ),
        )

    def with_columns(
        self, columns: Mapping[str, Tensor], sequence_columns: Mapping[str, Tensor] | None = None
    ) -> Self:
        """Return this batch with columns added; a column of the same name is replaced."""
        return replace(
            self,
            columns={**self.columns, **columns},
            sequence_columns={**self.sequence_columns, **(sequence_columns or {})},
        )

    def to(self, device: torch.device | str) -> Self:
        """Return the same batch with every tensor on this device."""
        return replace(
            self,
            sequence_starts=copy_to_device(self.sequence_starts, device),
            **_map_columns(
                [self],
                per_token=lambda tensors, *, dim: copy_to_device(tensors[0], device),
                per_sequence=lambda tensors: copy_to_device(tensors[0], device),
                media=tuple,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(SequenceBatch):
    """One rank's sequences of a mini-batch, ordered and split into micro-batches.

    Example:
        >>> batch = from_sequences(
        ...     [torch.tensor([5, 6, 7]), torch.tensor([8, 9]), torch.tensor([3, 4])],
        ...     loss_masks=[torch.arange(n) > 0 for n in (3, 2, 2)],
        ... )
        >>> names = [column.name for column in fields(SequenceBatch)]
        >>> packed = PackedBatch(
        ...     **{name: getattr(batch, name) for name in names},
        ...     micro_batch_starts=torch.tensor([0, 1, 3], dtype=torch.int32),
        ...     denominators=Denominators(tokens=4, sequences=3, groups=3),
        ... )
        >>> [micro.tokens.tolist() for micro in packed.iterate_micro_batches()]
        [[5, 6, 7], [8, 9, 3, 4]]
    """

    micro_batch_starts: Tensor
    """[M + 1] int32, from 0 to B. Micro-batch m has sequences micro_batch_starts[m] to
    micro_batch_starts[m + 1] - 1, at least one. The engine runs exactly this split."""
    denominators: Denominators
    """Counts for the full mini-batch across all ranks, not for this rank."""

    def __post_init__(self) -> None:
        SequenceBatch.__post_init__(self)
        if self.tokens.device.type != "cpu":
            return
        starts = self.micro_batch_starts.tolist()
        if (
            starts[0] != 0
            or starts[-1] != self.num_sequences
            or any(b <= a for a, b in pairwise(starts))
        ):
            raise BatchError(
                f"micro_batch_starts is {starts}, but must increase from 0 to {self.num_sequences} "
                "without empty micro-batches."
            )

    def to(self, device: torch.device | str) -> Self:
        """Return the same batch with every tensor on this device."""
        return replace(
            SequenceBatch.to(self, device),
            micro_batch_starts=copy_to_device(self.micro_batch_starts, device),
        )

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches M."""
        return self.micro_batch_starts.shape[0] - 1

    def iterate_micro_batches(self) -> Iterator[SequenceBatch]:
        """Iterate over the micro-batches, as views of this batch's tensors."""
        for first, last in pairwise(self.micro_batch_starts.tolist()):
            yield slice_sequences(self, first=first, last=last)


class Column(NamedTuple):
    """One tensor in a batch, and the axis that its entries belong to."""

    field: str
    """Field of SequenceBatch that has the tensor."""
    name: str
    """Key of the tensor when the field is a mapping, else the field name."""
    axis: Literal["token", "sequence"]
    """Axis of the entries: one for each token, or one for each sequence."""
    dim: int
    """Dimension of the entries."""
    tensor: Tensor


def list_columns(batch: SequenceBatch) -> list[Column]:
    """List all tensors of a batch except `sequence_starts`."""
    columns = []
    for declared in fields(SequenceBatch):
        value = getattr(batch, declared.name)
        tensors = value if isinstance(value, Mapping) else {declared.name: value}
        columns += [
            Column(declared.name, name, declared.metadata["axis"], declared.metadata["dim"], tensor)
            for name, tensor in tensors.items()
            if "axis" in declared.metadata and isinstance(tensor, Tensor)
        ]
    return columns


def copy_to_device(column: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor; the host waits only for copies to the host.

    A host that waits for the device within a micro-batch starts the next one with an empty queue.
    With several ranks, all then wait for the slowest host.
    """
    if torch.device(device).type == "cuda" and column.device.type == "cpu":
        # A copy from pageable memory would block the host until the stream has drained.
        return column.pin_memory().to(device, non_blocking=True)
    # A non-blocking copy to the host could be read before it has arrived.
    return column.to(device, non_blocking=torch.device(device).type != "cpu")


def slice_sequences(batch: SequenceBatch, *, first: int, last: int) -> SequenceBatch:
    """Return sequences first to last - 1 as views; only the starts are copied."""
    begin, end = int(batch.sequence_starts[first]), int(batch.sequence_starts[last])
    return SequenceBatch(
        sequence_starts=batch.sequence_starts[first : last + 1] - batch.sequence_starts[first],
        **_map_columns(
            [batch],
            per_token=lambda tensors, *, dim: tensors[0].narrow(dim, begin, end - begin),
            per_sequence=lambda tensors: tensors[0][first:last],
            media=lambda items: tuple(items[first:last]),
        ),
    )


def concatenate(batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """Concatenate batches that have the same columns.

    If only some batches have position_ids, the others get positions that count from 0 in each
    sequence. If only some have media, the entries of the others are None.

    Raises:
        BatchError: If there is no batch, or if their columns differ.
    """
    if not batches:
        raise BatchError("concatenate() got no batch: pass at least one.")
    head = batches[0]
    for other in batches[1:]:
        if set(other.columns) != set(head.columns) or set(other.sequence_columns) != set(
            head.sequence_columns
        ):
            raise BatchError(
                "batches with different columns can't be concatenated: "
                f"{sorted(head.columns)} and {sorted(head.sequence_columns)} against "
                f"{sorted(other.columns)} and {sorted(other.sequence_columns)}."
            )
    if any(batch.position_ids is not None for batch in batches):
        batches = [replace(batch, position_ids=batch.get_position_ids()) for batch in batches]
    if any(batch.media is not None for batch in batches):
        batches = [
            replace(batch, media=batch.media or (None,) * batch.num_sequences) for batch in batches
        ]
    # Concatenate lengths, not starts: the starts of each batch count from its own first token.
    lengths = torch.cat([batch.lengths for batch in batches])
    return SequenceBatch(
        sequence_starts=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
        **_map_columns(
            batches,
            per_token=lambda tensors, *, dim: torch.cat(tensors, dim=dim),
            per_sequence=torch.cat,
            media=tuple,
        ),
    )


def make_dummy_sequence(batch: SequenceBatch) -> SequenceBatch:
    """Return a sequence with one untrained token and the columns of `batch`, all zero.

    It fills a micro-batch that would otherwise be empty. Every rank must run the same number of
    micro-batches, because each one runs collectives.
    """
    zeros = SequenceBatch(
        sequence_starts=torch.tensor([0, 1], dtype=torch.int32, device=batch.tokens.device),
        **_map_columns(
            [batch],
            per_token=lambda tensors, *, dim: torch.zeros_like(tensors[0].narrow(dim, 0, 1)),
            per_sequence=lambda tensors: torch.zeros_like(tensors[0][:1]),
            media=lambda items: (None,),
        ),
    )
    marker = torch.full_like(zeros.sample_ids, DUMMY_ID)
    # Logits are divided by the temperature, so the dummy's is 1.
    return replace(
        zeros,
        sample_ids=marker,
        group_ids=marker,
        pack_group_ids=marker,
        temperature=torch.ones_like(zeros.temperature),
    )


class _PerToken(Protocol):
    def __call__(self, tensors: list[Tensor], /, *, dim: int) -> Tensor: ...


def _map_columns(
    batches: Sequence[SequenceBatch],
    *,
    per_token: _PerToken,
    per_sequence: Callable[[list[Tensor]], Tensor],
    media: Callable[[Sequence[object]], tuple[object, ...]],
) -> dict[str, Any]:
    """Apply one function per axis to every batch column.

    Args:
        batches: One batch, or several with the same columns.
        per_token: Computes a per-token column from the column's tensors, one from each batch;
            `dim` is their token dimension.
        per_sequence: Computes a per-sequence column from the column's tensors, one from each
            batch; their dimension 0 is the sequence.
        media: Computes the media of the result from one list with the media of all batches.

    Returns:
        Arguments of SequenceBatch for every field but `sequence_starts`.
    """

    def apply(tensors: list[Tensor], declared: "Field[Any]") -> Tensor:
        if declared.metadata["axis"] == "token":
            return per_token(tensors, dim=declared.metadata["dim"])
        return per_sequence(tensors)

    mapped: dict[str, Any] = {}
    for declared in fields(SequenceBatch):
        if "axis" not in declared.metadata:
            continue
        values = [getattr(batch, declared.name) for batch in batches]
        if values[0] is None:
            mapped[declared.name] = None
        elif isinstance(values[0], Mapping):
            names = values[0]
            mapped[declared.name] = {
                name: apply([value[name] for value in values], declared) for name in names
            }
        elif isinstance(values[0], tuple):
            mapped[declared.name] = media([item for value in values for item in value])
        else:
            mapped[declared.name] = apply(values, declared)
    return mapped


def from_sequences(
    tokens: Sequence[Tensor],
    *,
    loss_masks: Sequence[Tensor],
    sample_ids: Sequence[int] | None = None,
    group_ids: Sequence[int] | None = None,
    pack_group_ids: Sequence[int] | None = None,
    temperature: float | Sequence[float] = 1.0,
    columns: Mapping[str, Sequence[Tensor]] | None = None,
    sequence_columns: Mapping[str, Tensor] | None = None,
) -> SequenceBatch:
    """Build a batch from one tensor per sequence.

    Args:
        tokens: B tensors [L_b] of token ids.
        loss_masks: B tensors [L_b] bool.
        sample_ids: B ids; 0 to B - 1 by default.
        group_ids: B ids of prompts; the sample ids by default.
        pack_group_ids: B ids; sequences with equal ids stay in one micro-batch. By default the
            sample ids.
        temperature: One number for all sequences, or B numbers.
        columns: Per-token columns by name, each as a list of B tensors [L_b] or [L_b, K].
        sequence_columns: Per-sequence columns by name, each as one tensor [B] or [B, K].
    """
    ids = (
        torch.arange(len(tokens))
        if sample_ids is None
        else torch.as_tensor(sample_ids, dtype=torch.int64)
    )
    lengths = torch.tensor([len(t) for t in tokens], dtype=torch.int64)
    # A copy: in the expanded view all sequences share one number in memory.
    temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(len(tokens)).clone()
    return SequenceBatch(
        tokens=torch.cat(list(tokens)).long(),
        sequence_starts=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
        loss_mask=torch.cat(list(loss_masks)).bool(),
        sample_ids=ids,
        group_ids=ids.clone()
        if group_ids is None
        else torch.as_tensor(group_ids, dtype=torch.int64),
        pack_group_ids=ids.clone()
        if pack_group_ids is None
        else torch.as_tensor(pack_group_ids, dtype=torch.int64),
        temperature=temperatures,
        columns={name: torch.cat(list(parts)) for name, parts in (columns or {}).items()},
        sequence_columns=dict(sequence_columns or {}),
    )
