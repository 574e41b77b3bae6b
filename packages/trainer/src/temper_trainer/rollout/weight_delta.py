"""What changed in a bucket of weights since its receiver got it: places and new values of single elements, or whole tensors.

Elements are compared and written as bits, so that a set with its changes is the next set, bit for bit. Needs torch alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.packed_bucket import (
    ALIGNMENT,
    TensorEntry,
    compute_digest,
    create_mapped_file,
    open_mapped_file,
)

FULL_TENSOR = -1
"""In place of a number of changed elements: the whole tensor is sent."""
_BLOCK = 1 << 22
"""Elements that are compared at once: what lies in between is bounded, however large a tensor is."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StaleBaseError(WeightError):
    """Changes came for another set of weights than the one that is held; the whole set must be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDelta:
    """What a receiver must know of one bucket's changes."""

    counts: tuple[int, ...]
    """Changed elements of each tensor of the bucket, in its order; WHOLE where all of them are sent."""
    num_bytes: int
    """Of the changes."""
    digest: int | None
    """Of the changes, see ``digest_of``; None is unchecked."""
    updated_digest: int | None
    """Of the bucket's tensors after them, see ``digest_of_tensors``; None is unchecked."""
    path: str | None = None
    """Their file; None where the bytes travel in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaManifest:
    """One set of changes."""

    version: int
    """Of the weights afterwards."""
    base_version: int
    """Of the weights that they are changes of."""
    parcels: tuple[PackedDelta, ...]
    """One for each bucket of the whole set, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBucket:
    """What changed in one bucket, with its bytes."""

    index: int
    """Place in the set, from 0."""
    is_last: bool
    """Whether the set ends here."""
    entries: tuple[TensorEntry, ...]
    """Of the whole bucket."""
    counts: tuple[int, ...]
    """As in ChangeParcel."""
    data: Tensor
    """[size_of] uint8, on the CPU."""
    digest: int
    """Of the data."""

    @property
    def num_elements(self) -> int:
        """Of the whole bucket."""
        return sum(_count_elements(entry) for entry in self.entries)

    @property
    def num_sent_elements(self) -> int:
        """Elements that are sent."""
        return count_sent_elements(self.entries, self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDelta:
    """What is sent of one tensor."""

    indices: Tensor | None
    """[C] int32 (int64 in a tensor of 2^31 elements or more) places in the flat tensor; None where it is sent whole."""
    values: Tensor
    """[C], or the whole tensor; in the tensor's dtype."""

    @property
    def count(self) -> int:
        """Changed elements, or WHOLE."""
        return FULL_TENSOR if self.indices is None else len(self.indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeltaSlices:
    """Where one tensor's changes lie."""

    entry: TensorEntry
    count: int
    indices_at: int
    values_at: int

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.entry.dtype)
        return found

    def indices(self, data: Tensor) -> Tensor:
        dtype = _choose_index_dtype(_count_elements(self.entry))
        return data[self.indices_at : self.indices_at + self.count * dtype.itemsize].view(dtype)

    def values(self, data: Tensor) -> Tensor:
        count = _count_elements(self.entry) if self.count == FULL_TENSOR else self.count
        return data[self.values_at : self.values_at + count * self.dtype.itemsize].view(self.dtype)


def compute_delta(
    part: Sequence[NamedWeight], held: Sequence[Tensor], *, max_changed_fraction: float
) -> list[TensorDelta]:
    """What of a bucket differs from what its receivers hold.

    Args:
        part: the bucket's tensors now, on any device.
        held: the same tensors as they were sent last, on the CPU.
        max_share: a tensor of which a larger share changed is sent whole; so is one whose changes would take more bytes than itself.
    """
    return [
        _compute_tensor_delta(
            weight.tensor.detach(), old, max_changed_fraction=max_changed_fraction
        )
        for weight, old in zip(part, held, strict=True)
    ]


def count_delta_bytes(entries: Sequence[TensorEntry], counts: Sequence[int]) -> int:
    """Bytes that the changes of a bucket take; 0 where there are none."""
    return _locate_slices(entries, counts)[1]


def count_sent_elements(entries: Sequence[TensorEntry], counts: Sequence[int]) -> int:
    """Elements of a bucket that are sent."""
    return sum(
        _count_elements(entry) if count == FULL_TENSOR else count
        for entry, count in zip(entries, counts, strict=True)
    )


def pack_delta(
    data: Tensor, changes: Sequence[TensorDelta], entries: Sequence[TensorEntry]
) -> None:
    """Copy the changes of a bucket into ``size_of`` bytes, on whatever device those are."""
    pieces, _ = _locate_slices(entries, [change.count for change in changes])
    for piece, change in zip(pieces, changes, strict=True):
        if change.indices is not None:
            piece.indices(data).copy_(change.indices)
        piece.values(data).copy_(change.values.reshape(-1))


def unpack_delta(
    data: Tensor, entries: Sequence[TensorEntry], counts: Sequence[int]
) -> Iterator[tuple[TensorEntry, TensorDelta]]:
    """The tensors that changed and what changed in them, as views of the bytes.

    Raises:
        WeightError: a place lies outside its tensor.
    """
    for piece in _locate_slices(entries, counts)[0]:
        if piece.count == FULL_TENSOR:
            yield (
                piece.entry,
                TensorDelta(indices=None, values=piece.values(data).view(piece.entry.shape)),
            )
        elif piece.count:
            indices = piece.indices(data)
            if int(indices.min()) < 0 or int(indices.max()) >= _count_elements(piece.entry):
                raise WeightError(
                    f"changes of {piece.entry.name} name places outside it: publish the weights again."
                )
            yield piece.entry, TensorDelta(indices=indices, values=piece.values(data))


def check_delta_buckets(buckets: Sequence[DeltaBucket]) -> None:
    """Whether a set of changes is complete, in order and unharmed.

    Raises:
        WeightError: it is not.
    """
    order = [(bucket.index, bucket.is_last) for bucket in buckets]
    if order != [(i, i == len(buckets) - 1) for i in range(len(buckets))] or not buckets:
        raise WeightError(
            f"{len(buckets)} buckets of changes came, but not all in order: publish the weights again."
        )
    for bucket in buckets:
        if compute_digest(bucket.data) != bucket.digest:
            raise WeightError(
                f"changes of weight bucket {bucket.index} arrived damaged (checksum differs): publish the weights again."
            )


def apply_delta(
    held: Sequence[Tensor], data: Tensor, entries: Sequence[TensorEntry], counts: Sequence[int]
) -> None:
    """Write changes into the tensors of a bucket. To do it twice is to do it once.

    Args:
        held: contiguous, on the CPU.
        data: from ``fill_changes``, on the CPU.
        entries: of the bucket.
        counts: as in ChangeParcel.
    """
    places = {entry.name: tensor for entry, tensor in zip(entries, held, strict=True)}
    for entry, change in unpack_delta(data, entries, counts):
        apply_tensor_delta(places[entry.name], change)


def apply_tensor_delta(target: Tensor, change: TensorDelta) -> None:
    """Write the changes of one tensor into it, cast to its dtype where it has another one."""
    if change.indices is None:
        target.copy_(change.values)
        return
    flat = target.view(-1) if target.is_contiguous() else target.reshape(-1)
    values = change.values.to(device=target.device, dtype=target.dtype)
    _view_bits(flat)[change.indices.to(target.device).long()] = _view_bits(values)
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))


def compute_tensors_digest(tensors: Sequence[Tensor]) -> int:
    """A checksum of tensors in order, each on its own device: that of each, times an odd number of its place, summed modulo 2^64."""
    return (
        sum(
            (2 * place + 1) * compute_digest(_view_bytes(tensor))
            for place, tensor in enumerate(tensors)
        )
        % 2**64
    )


def check_updated_bucket(
    held: Sequence[Tensor], expected: int | None, *, version: int, base_version: int
) -> None:
    """Whether a bucket with its changes is what the sender has.

    Raises:
        WeightError: it is not.
    """
    if expected is not None and compute_tensors_digest(held) != expected:
        raise WeightError(
            f"a bucket of weights {base_version} with its changes is not that of weights {version} (checksum differs): publish the weights "
            "again."
        )


def write_delta_file(
    part: Sequence[NamedWeight],
    changes: Sequence[TensorDelta],
    entries: Sequence[TensorEntry],
    path: Path,
    *,
    with_digest: bool,
) -> PackedDelta:
    """The changes of one bucket as a file; none where nothing changed.

    Raises:
        WeightError: there is no room.
    """
    counts = tuple(change.count for change in changes)
    num_bytes = count_delta_bytes(entries, counts)
    data = (
        create_mapped_file(path, num_bytes=num_bytes)
        if num_bytes
        else torch.empty(0, dtype=torch.uint8)
    )
    pack_delta(data, changes, entries)
    return PackedDelta(
        counts=counts,
        num_bytes=num_bytes,
        digest=compute_digest(data) if with_digest and num_bytes else None,
        updated_digest=compute_tensors_digest([weight.tensor for weight in part])
        if with_digest
        else None,
        path=str(path) if num_bytes else None,
    )


def open_delta_file(parcel: PackedDelta) -> Tensor:
    """[num_bytes] uint8, mapped from its file where there is one.

    Raises:
        WeightError: the file is not there, has another size, or is damaged.
    """
    if parcel.path is None:
        return torch.empty(0, dtype=torch.uint8)
    data = open_mapped_file(Path(parcel.path), num_bytes=parcel.num_bytes, is_shared=False)
    if parcel.digest is not None and compute_digest(data) != parcel.digest:
        raise WeightError(
            f"changes of weights in {parcel.path} arrived damaged (checksum differs): publish the weights again."
        )
    return data


def _compute_tensor_delta(
    tensor: Tensor, held: Tensor, *, max_changed_fraction: float
) -> TensorDelta:
    given, old = _view_bits(tensor.contiguous().view(-1)), _view_bits(held.reshape(-1))
    dtype = _choose_index_dtype(len(given))
    # A change of C elements takes C places and values, each rounded up; the whole tensor takes its own bytes.
    affordable = (len(given) * given.element_size() - 2 * ALIGNMENT) // (
        given.element_size() + dtype.itemsize
    )
    most, count, found = min(int(max_changed_fraction * len(given)), affordable), 0, []
    for start in range(0, len(given), _BLOCK):
        block = given[start : start + _BLOCK]
        places = (block != old[start : start + _BLOCK].to(block.device)).nonzero()[:, 0]
        count += len(places)
        if count > max(most, 0):
            return TensorDelta(indices=None, values=tensor)
        found.append((places + start).to(dtype))
    indices = torch.cat(found) if found else torch.empty(0, dtype=dtype, device=given.device)
    return TensorDelta(indices=indices, values=given[indices].view(tensor.dtype))


def _locate_slices(
    entries: Sequence[TensorEntry], counts: Sequence[int]
) -> tuple[list[_DeltaSlices], int]:
    """Where the changes of each tensor lie, and how many bytes all of them take."""
    pieces, end = [], 0
    for entry, count in zip(entries, counts, strict=True):
        numel = _count_elements(entry)
        values_at = end + _round_up(max(count, 0) * _choose_index_dtype(numel).itemsize)
        piece = _DeltaSlices(entry=entry, count=count, indices_at=end, values_at=values_at)
        pieces.append(piece)
        end = values_at + _round_up(
            (numel if count == FULL_TENSOR else count) * piece.dtype.itemsize
        )
    return pieces, end


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _count_elements(entry: TensorEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return count


def _choose_index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < 2**31 else torch.int64


def _view_bytes(tensor: Tensor) -> Tensor:
    """[num_bytes] uint8 that can be read in words of eight; copied where a tensor is not contiguous, or a part of another one."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat.clone() if flat.storage_offset() % 8 else flat


def _view_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: equal bits are equal, also of NaN and of -0."""
    return tensor.view(_BITS[tensor.element_size()])
