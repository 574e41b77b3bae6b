"""Deltas between two sets of weights: indices and new values of changed elements, or full tensors.

Elements are compared and written as bits, so a set plus its delta equals the next set bit for bit.
Imported inside vLLM's workers, so it needs only torch, and blake3, which vLLM requires, too.
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
"""Used in place of the changed element count when the full tensor is sent."""
_BLOCK = 1 << 22
"""Elements compared at once, which bounds temporary memory however large a tensor is."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype of each element size."""


class StaleBaseError(WeightError):
    """A delta arrived for other weights than the receiver has; all weights must be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDelta:
    """Describes one bucket's delta.

    The bytes are in a file or are sent through a channel.
    """

    counts: tuple[int, ...]
    """Number of changed elements in each tensor of the bucket; FULL_TENSOR if all are sent."""
    num_bytes: int
    digest: int | None
    """Checksum of the delta's bytes, see `compute_digest`; None if checksums are off."""
    updated_digest: int | None
    """Checksum of the bucket after the delta, see `compute_tensors_digest`."""
    path: str | None = None
    """File of the bytes; None if they travel through a channel, or nothing changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaManifest:
    """The delta for all buckets."""

    version: int
    """Version after the delta is applied."""
    base_version: int
    """Version that the delta is applied to."""
    deltas: tuple[PackedDelta, ...]
    """One per bucket of the full weights, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBucket:
    """The delta of one bucket with its bytes, for a sampler that the driver can reach."""

    index: int
    """Position in the set, from 0."""
    is_last: bool
    entries: tuple[TensorEntry, ...]
    """Layout of the full bucket."""
    counts: tuple[int, ...]
    """See `PackedDelta.counts`."""
    data: Tensor
    """[count_delta_bytes(entries, counts)] uint8, on the CPU."""
    digest: int
    """Checksum of `data`."""

    @property
    def num_elements(self) -> int:
        """Number of elements in the full bucket."""
        return sum(_count_elements(entry) for entry in self.entries)

    @property
    def num_sent_elements(self) -> int:
        """Number of elements in the delta."""
        return count_sent_elements(self.entries, self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDelta:
    """One tensor's delta.

    Example:
        >>> last_sent, current = torch.zeros(8, 16), torch.zeros(8, 16)
        >>> current[1, 3] = 0.5
        >>> weights = [NamedWeight("a.weight", current)]
        >>> (delta,) = compute_delta(weights, [last_sent], max_changed_fraction=0.25)
        >>> delta.indices.tolist(), delta.values.tolist(), delta.count
        ([19], [0.5], 1)
        >>> apply_tensor_delta(last_sent, delta)
        >>> torch.equal(last_sent, current)
        True
    """

    indices: Tensor | None
    """[C] indices into the flattened tensor; None if the full tensor is sent.

    int32, or int64 for a tensor of 2^31 or more elements."""
    values: Tensor
    """[C] new values, or the full tensor; in the tensor's dtype."""

    @property
    def count(self) -> int:
        """Number of changed elements, or FULL_TENSOR."""
        return FULL_TENSOR if self.indices is None else len(self.indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeltaSlices:
    """Position of one tensor's delta in its bucket's delta bytes."""

    entry: TensorEntry
    count: int
    indices_offset: int
    values_offset: int

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.entry.dtype)
        return dtype

    def indices(self, data: Tensor) -> Tensor:
        dtype = _choose_index_dtype(_count_elements(self.entry))
        end = self.indices_offset + self.count * dtype.itemsize
        return data[self.indices_offset : end].view(dtype)

    def values(self, data: Tensor) -> Tensor:
        count = _count_elements(self.entry) if self.count == FULL_TENSOR else self.count
        end = self.values_offset + count * self.dtype.itemsize
        return data[self.values_offset : end].view(self.dtype)


def compute_delta(
    weights: Sequence[NamedWeight], last_sent: Sequence[Tensor], *, max_changed_fraction: float
) -> list[TensorDelta]:
    """Compute the delta between a bucket and the receivers' copy of it.

    Args:
        weights: The bucket's current tensors, on any device.
        last_sent: The same tensors as they were sent last, on the CPU.
        max_changed_fraction: A tensor is sent in full if more than this fraction of its elements
            changed, or if its delta would take more bytes than the tensor.
    """
    return [
        _compute_tensor_delta(
            weight.tensor.detach(), old, max_changed_fraction=max_changed_fraction
        )
        for weight, old in zip(weights, last_sent, strict=True)
    ]


def count_delta_bytes(entries: Sequence[TensorEntry], counts: Sequence[int]) -> int:
    """Return the size of a bucket's delta in bytes; 0 if nothing changed."""
    return _locate_slices(entries, counts)[1]


def count_sent_elements(entries: Sequence[TensorEntry], counts: Sequence[int]) -> int:
    """Return the number of elements in a bucket's delta."""
    return sum(
        _count_elements(entry) if count == FULL_TENSOR else count
        for entry, count in zip(entries, counts, strict=True)
    )


def pack_delta(data: Tensor, delta: Sequence[TensorDelta], entries: Sequence[TensorEntry]) -> None:
    """Copy the delta of a bucket into `count_delta_bytes` bytes, which may be on another device."""
    # The offsets are not sent, because both sides compute them from layout and counts.
    slices, _ = _locate_slices(entries, [tensor_delta.count for tensor_delta in delta])
    for one, tensor_delta in zip(slices, delta, strict=True):
        if tensor_delta.indices is not None:
            one.indices(data).copy_(tensor_delta.indices)
        one.values(data).copy_(tensor_delta.values.reshape(-1))


def unpack_delta(
    data: Tensor, entries: Sequence[TensorEntry], counts: Sequence[int]
) -> Iterator[tuple[TensorEntry, TensorDelta]]:
    """Yield each changed tensor with its delta, as views of the bytes.

    Raises:
        WeightError: If an index is outside its tensor.
    """
    for one in _locate_slices(entries, counts)[0]:
        if one.count == FULL_TENSOR:
            values = one.values(data).view(one.entry.shape)
            yield one.entry, TensorDelta(indices=None, values=values)
        elif one.count:
            indices = one.indices(data)
            # Checked here because indexing out of range on a GPU would end the process.
            if int(indices.min()) < 0 or int(indices.max()) >= _count_elements(one.entry):
                raise WeightError(
                    f"the delta of {one.entry.name} has indices outside the tensor: publish the "
                    "weights again."
                )
            yield one.entry, TensorDelta(indices=indices, values=one.values(data))


def check_delta_buckets(buckets: Sequence[DeltaBucket]) -> None:
    """Check that all buckets have arrived, in order and undamaged.

    Raises:
        WeightError: If not.
    """
    order = [(bucket.index, bucket.is_last) for bucket in buckets]
    if order != [(i, i == len(buckets) - 1) for i in range(len(buckets))] or not buckets:
        raise WeightError(
            f"{len(buckets)} delta buckets arrived, but not all of them in order: publish the "
            "weights again."
        )
    for bucket in buckets:
        if compute_digest(bucket.data) != bucket.digest:
            raise WeightError(
                f"the delta of weight bucket {bucket.index} arrived damaged (checksum differs): "
                "publish the weights again."
            )


def apply_delta(
    tensors: Sequence[Tensor], data: Tensor, entries: Sequence[TensorEntry], counts: Sequence[int]
) -> None:
    """Write a delta into a bucket's tensors. Idempotent.

    Args:
        tensors: Contiguous CPU tensors.
        data: Bytes from `pack_delta`, on the CPU.
        entries: Layout of the bucket.
        counts: Number of changed elements in each tensor, as in `PackedDelta.counts`.
    """
    targets = {entry.name: tensor for entry, tensor in zip(entries, tensors, strict=True)}
    for entry, tensor_delta in unpack_delta(data, entries, counts):
        apply_tensor_delta(targets[entry.name], tensor_delta)


def apply_tensor_delta(target: Tensor, delta: TensorDelta) -> None:
    """Apply a delta to a tensor in place; cast the new values to the tensor's dtype."""
    if delta.indices is None:
        target.copy_(delta.values)
        return
    flat = target.view(-1) if target.is_contiguous() else target.reshape(-1)
    values = delta.values.to(device=target.device, dtype=target.dtype)
    _view_as_integers(flat)[delta.indices.to(target.device).long()] = _view_as_integers(values)
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))  # `flat` is a copy of it


def compute_tensors_digest(tensors: Sequence[Tensor]) -> int:
    """Return a checksum of tensors in their order, each computed on its device.

    The sum of each tensor's checksum multiplied by an odd number that depends on its position,
    modulo 2^64.
    """
    return (
        sum((2 * i + 1) * compute_digest(_view_bytes(tensor)) for i, tensor in enumerate(tensors))
        % 2**64
    )


def check_updated_bucket(
    tensors: Sequence[Tensor], expected: int | None, *, version: int, base_version: int
) -> None:
    """Compare the checksum of an updated bucket with the sender's.

    Raises:
        WeightError: If they differ.
    """
    if expected is not None and compute_tensors_digest(tensors) != expected:
        raise WeightError(
            f"a bucket of weights {base_version} plus its delta differs from weights {version} "
            "(checksum differs): publish the weights again."
        )


def write_delta_file(
    weights: Sequence[NamedWeight],
    delta: Sequence[TensorDelta],
    entries: Sequence[TensorEntry],
    path: Path,
    *,
    with_digest: bool,
) -> PackedDelta:
    """Write the delta of one bucket to a new file; no file if nothing changed.

    Args:
        weights: The new weights of the bucket, for the checksum.
        delta: Changed elements in each weight.
        entries: Layout of the bucket.
        path: File to write.
        with_digest: Compute checksums.

    Raises:
        WeightError: If the file system is full.
    """
    counts = tuple(tensor_delta.count for tensor_delta in delta)
    num_bytes = count_delta_bytes(entries, counts)
    data = (
        create_mapped_file(path, num_bytes=num_bytes)
        if num_bytes
        else torch.empty(0, dtype=torch.uint8)
    )
    pack_delta(data, delta, entries)
    # A checksum of the delta alone would not find a receiver that applies it to another base.
    updated_digest = compute_tensors_digest([w.tensor for w in weights]) if with_digest else None
    return PackedDelta(
        counts=counts,
        num_bytes=num_bytes,
        digest=compute_digest(data) if with_digest and num_bytes else None,
        updated_digest=updated_digest,
        path=str(path) if num_bytes else None,
    )


def open_delta_file(delta: PackedDelta) -> Tensor:
    """Map the file of a delta as a [num_bytes] uint8 tensor; empty if nothing changed.

    Raises:
        WeightError: If the file is missing, has another size, or is damaged.
    """
    if delta.path is None:
        return torch.empty(0, dtype=torch.uint8)
    data = open_mapped_file(Path(delta.path), num_bytes=delta.num_bytes, is_shared=False)
    if delta.digest is not None and compute_digest(data) != delta.digest:
        raise WeightError(
            f"the weight delta in {delta.path} arrived damaged (checksum differs): publish the "
            "weights again."
        )
    return data


def _compute_tensor_delta(
    tensor: Tensor, last_sent: Tensor, *, max_changed_fraction: float
) -> TensorDelta:
    new, old = (
        _view_as_integers(tensor.contiguous().view(-1)),
        _view_as_integers(last_sent.reshape(-1)),
    )
    dtype = _choose_index_dtype(len(new))
    # C changed elements take C indices and C values, each padded to ALIGNMENT. Above this count the
    # delta would be larger than the tensor.
    max_smaller = (len(new) * new.element_size() - 2 * ALIGNMENT) // (
        new.element_size() + dtype.itemsize
    )
    max_count = max(min(int(max_changed_fraction * len(new)), max_smaller), 0)
    count, changed = 0, []
    for start in range(0, len(new), _BLOCK):
        block = new[start : start + _BLOCK]
        # Work block by block, so that the weights' device never holds a second copy of the tensor.
        indices = (block != old[start : start + _BLOCK].to(block.device)).nonzero()[:, 0]
        count += len(indices)
        # The tensor is sent in full anyway, so the remaining elements need not be compared.
        if count > max_count:
            return TensorDelta(indices=None, values=tensor)
        changed.append((indices + start).to(dtype))
    all_indices = torch.cat(changed) if changed else torch.empty(0, dtype=dtype, device=new.device)
    return TensorDelta(indices=all_indices, values=new[all_indices].view(tensor.dtype))


def _locate_slices(
    entries: Sequence[TensorEntry], counts: Sequence[int]
) -> tuple[list[_DeltaSlices], int]:
    """Return where each tensor's delta is, and the total size in bytes."""
    slices, end = [], 0
    for entry, count in zip(entries, counts, strict=True):
        numel = _count_elements(entry)
        values_offset = end + _round_up(max(count, 0) * _choose_index_dtype(numel).itemsize)
        one = _DeltaSlices(
            entry=entry, count=count, indices_offset=end, values_offset=values_offset
        )
        slices.append(one)
        num_values = numel if count == FULL_TENSOR else count
        end = values_offset + _round_up(num_values * one.dtype.itemsize)
    return slices, end


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
    """Return the tensor's bytes, starting at a multiple of 8 as `compute_digest` requires."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat.clone() if flat.storage_offset() % 8 else flat


def _view_as_integers(tensor: Tensor) -> Tensor:
    """View a tensor as integers, so that NaN equals itself and -0 differs from 0."""
    return tensor.view(_INTEGERS[tensor.element_size()])
