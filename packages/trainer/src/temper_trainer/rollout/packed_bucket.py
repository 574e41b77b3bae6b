"""Weights as files in shared memory: one bucket is one file, which its reader maps instead of copying. Needs torch alone."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight

ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple."""
_BLOCK = 1 << 19
"""Words whose weighted sum is taken at once: small enough to stay in a processor's cache."""
_BLOCKS_AT_ONCE = 32
"""On a GPU, whose kernels take longer to start than one block takes to sum: 128 MB of products in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor in a parcel."""

    name: str
    """Under Hugging Face names."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    """torch's name, such as bfloat16."""
    offset: int
    """Bytes from the parcel's begin."""

    def read(self, data: Tensor) -> Tensor:
        """The tensor as a view of a parcel's bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        num_bytes = dtype.itemsize
        for size in self.shape:
            num_bytes *= size
        return data[self.offset : self.offset + num_bytes].view(dtype).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBucket:
    """What a receiver must know of one bucket."""

    entries: tuple[TensorEntry, ...]
    """In the order of the stream."""
    num_bytes: int
    """Of the whole parcel."""
    digest: int | None
    """See ``digest_of``; None is unchecked."""
    path: str | None = None
    """Its file; None where the bytes travel in another way."""


def plan_layout(weights: Sequence[NamedWeight]) -> tuple[tuple[TensorEntry, ...], int]:
    """Where each tensor of a bucket lies, and the bucket's size in bytes."""
    entries, offset = [], 0
    for name, tensor in weights:
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            TensorEntry(name=name, shape=tuple(tensor.shape), dtype=dtype, offset=offset)
        )
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return tuple(entries), max(offset, ALIGNMENT)


def pack_tensors(
    data: Tensor, weights: Sequence[NamedWeight], entries: Sequence[TensorEntry]
) -> None:
    """Copy the tensors of a bucket into its bytes, on whatever device those are."""
    for weight, entry in zip(weights, entries, strict=True):
        entry.read(data).copy_(weight.tensor.detach())


def write_weight_file(
    weights: Sequence[NamedWeight], path: Path, *, with_digest: bool
) -> PackedBucket:
    """One bucket as a file.

    Raises:
        WeightError: there is no room.
    """
    entries, num_bytes = plan_layout(weights)
    data = create_mapped_file(path, num_bytes=num_bytes)
    pack_tensors(data, weights, entries)
    return PackedBucket(
        entries=entries,
        num_bytes=num_bytes,
        digest=compute_digest(data) if with_digest else None,
        path=str(path),
    )


def create_mapped_file(path: Path, *, num_bytes: int) -> Tensor:
    """[num_bytes] uint8 zeros, mapped from a file that is made here.

    Raises:
        WeightError: there is no room.
    """
    try:
        with path.open("xb") as file:
            # A write into a mapped file beyond the memory that is left would end the process; this says so first.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightError(
            f"{num_bytes} bytes of weights don't fit into {path.parent}: {error.strerror}. Give shared memory more room (df {path.parent})."
        ) from error
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def open_weight_file(parcel: PackedBucket) -> Tensor:
    """[num_bytes] uint8, mapped from the parcel's file; what is written there stays in this process.

    Raises:
        WeightError: the file is not there or has another size.
    """
    assert parcel.path is not None
    return open_mapped_file(Path(parcel.path), num_bytes=parcel.num_bytes, is_shared=False)


def open_mapped_file(path: Path, *, num_bytes: int, is_shared: bool) -> Tensor:
    """[num_bytes] uint8, mapped from a file.

    Args:
        path: of the file.
        num_bytes: its size.
        is_shared: whether what is written into the tensor gets into the file.

    Raises:
        WeightError: the file is not there or has another size.
    """
    if not path.is_file() or path.stat().st_size != num_bytes:
        size = path.stat().st_size if path.is_file() else "missing"
        raise WeightError(
            f"the weights' file {path} is {size}, but should have {num_bytes} bytes: is this its machine?"
        )
    return torch.from_file(str(path), shared=is_shared, size=num_bytes, dtype=torch.uint8)


def check_digest(data: Tensor, parcel: PackedBucket) -> None:
    """Compare a bucket's bytes with what was sent.

    Raises:
        WeightError: they differ.
    """
    if parcel.digest is not None and compute_digest(data) != parcel.digest:
        first = parcel.entries[0].name if parcel.entries else "nothing"
        raise WeightError(
            f"the bucket of weights from {first} on arrived damaged (checksum differs): publish the weights again."
        )


def unpack_tensors(data: Tensor, parcel: PackedBucket) -> Iterator[NamedWeight]:
    """The tensors of a parcel as views of its bytes."""
    return (NamedWeight(entry.name, entry.read(data)) for entry in parcel.entries)


def split_into_buckets(
    stream: Iterable[NamedWeight], *, bucket_bytes: int
) -> Iterator[list[NamedWeight]]:
    """A stream in parts of at most ``bucket_bytes``, a larger tensor alone; nothing is copied, so a part must be used before the next."""
    held: list[NamedWeight] = []
    size = 0
    for weight in stream:
        weight_bytes = weight.tensor.numel() * weight.tensor.element_size()
        if held and size + weight_bytes > bucket_bytes:
            yield held
            held, size = [], 0
        held.append(weight)
        size += weight_bytes
    if held:
        yield held


def compute_digest(data: Tensor) -> int:
    """A checksum of uint8 data on its own device, at the speed of memory: every word times an odd number of its place, summed modulo 2^64.

    It finds damage, swaps and stale parts; it does not withstand someone who forges it.
    """
    words = data[: len(data) // 8 * 8].view(torch.int64)
    rest = torch.nn.functional.pad(data[len(words) * 8 :], (0, 8 - len(data) % 8)).view(torch.int64)
    places = torch.arange(min(_BLOCK, len(words)), device=data.device) * 2 + 1
    num_whole = len(words) // _BLOCK
    rows = (
        words[: num_whole * _BLOCK]
        .view(num_whole, _BLOCK)
        .split(_BLOCKS_AT_ONCE if data.is_cuda else 1)
    )
    sums = [(row * places).sum(dim=1) for row in rows if len(row)]
    last = words[num_whole * _BLOCK :]
    sums.append((last * places[: len(last)]).sum(dim=0, keepdim=True))
    weights = torch.arange(num_whole + 1, device=data.device) * 2 + 1
    return (int((torch.cat(sums) * weights).sum() + rest.sum()) + len(data)) % 2**64
