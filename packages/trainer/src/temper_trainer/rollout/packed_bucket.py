"""Buckets of weights as contiguous bytes, in a file in shared memory or in a buffer on a device.

Imported inside vLLM's workers, so it needs only torch, and blake3, which vLLM requires, too.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes."""
_BLOCK = 1 << 19
"""Words that a checksum weights at once: 4 MB, which stays in a CPU's cache."""
_BLOCKS_AT_ONCE = 32
"""Blocks per operation on a GPU: 128 MB of products, so that kernel launches do not dominate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """The position of a tensor in a packed bucket."""

    name: str
    """Name of the tensor in Hugging Face files."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dtype: str
    """Name of the torch dtype, such as bfloat16."""
    offset: int
    """Byte offset in the bucket."""

    def read(self, data: Tensor) -> Tensor:
        """Return the tensor as a view of the bucket's bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        num_bytes = dtype.itemsize
        for size in self.shape:
            num_bytes *= size
        return data[self.offset : self.offset + num_bytes].view(dtype).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBucket:
    """Description of a packed bucket; the bytes are in a file or travel through a channel.

    Example:
        >>> weights = [
        ...     NamedWeight("a.weight", torch.zeros(2, 3)),
        ...     NamedWeight("b.weight", torch.tensor([0.5, 1.0], dtype=torch.bfloat16)),
        ... ]
        >>> entries, num_bytes = plan_layout(weights)
        >>> data = torch.zeros(num_bytes, dtype=torch.uint8)
        >>> pack_tensors(data, weights, entries)
        >>> bucket = PackedBucket(entries=entries, num_bytes=num_bytes, digest=compute_digest(data))
        >>> [(entry.name, entry.dtype, entry.offset) for entry in bucket.entries], bucket.num_bytes
        ([('a.weight', 'float32', 0), ('b.weight', 'bfloat16', 64)], 128)
        >>> bucket.entries[1].read(data).tolist()
        [0.5, 1.0]
    """

    entries: tuple[TensorEntry, ...]
    """Entries in the order of the weight stream."""
    num_bytes: int
    """Size of all tensors, padding for alignment included."""
    digest: int | None
    """Checksum from `compute_digest`; None if checksums are off."""
    path: str | None = None
    """File of the bytes; None if they travel through a channel."""


def plan_layout(weights: Sequence[NamedWeight]) -> tuple[tuple[TensorEntry, ...], int]:
    """Return an entry per tensor and the bucket size in bytes."""
    entries, offset = [], 0
    for name, tensor in weights:
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            TensorEntry(name=name, shape=tuple(tensor.shape), dtype=dtype, offset=offset)
        )
        # Align the next tensor: torch reinterprets bytes as another dtype only if their offset is a
        # multiple of that dtype's size.
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    # Never 0: an empty file cannot be mapped.
    return tuple(entries), max(offset, ALIGNMENT)


def pack_tensors(
    data: Tensor, weights: Sequence[NamedWeight], entries: Sequence[TensorEntry]
) -> None:
    """Copy tensors into the bytes of a bucket, which may be on another device."""
    for weight, entry in zip(weights, entries, strict=True):
        entry.read(data).copy_(weight.tensor.detach())


def unpack_tensors(data: Tensor, bucket: PackedBucket) -> Iterator[NamedWeight]:
    """Return a bucket's tensors as views of its bytes."""
    return (NamedWeight(entry.name, entry.read(data)) for entry in bucket.entries)


def split_into_buckets(
    stream: Iterable[NamedWeight], *, bucket_bytes: int
) -> Iterator[list[NamedWeight]]:
    """Split a stream into lists of at most `bucket_bytes`; a larger tensor gets its own list.

    Nothing is copied, so use each list before the next one is taken: the engine may free its
    tensors.
    """
    bucket: list[NamedWeight] = []
    size = 0
    for weight in stream:
        weight_bytes = weight.tensor.numel() * weight.tensor.element_size()
        if bucket and size + weight_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += weight_bytes
    if bucket:
        yield bucket


def write_weight_file(
    weights: Sequence[NamedWeight], path: Path, *, with_digest: bool
) -> PackedBucket:
    """Write a bucket to a new file.

    Raises:
        WeightError: If the file system is full.
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


def open_weight_file(bucket: PackedBucket) -> Tensor:
    """Map a bucket's file; writes to the returned [num_bytes] uint8 tensor do not reach the file.

    Raises:
        WeightError: If the file is missing or has another size.
    """
    assert bucket.path is not None
    return open_mapped_file(Path(bucket.path), num_bytes=bucket.num_bytes, is_shared=False)


def create_mapped_file(path: Path, *, num_bytes: int) -> Tensor:
    """Create a file of zeros and return it as a [num_bytes] uint8 tensor.

    Raises:
        WeightError: If the file system is full.
    """
    try:
        # Exclusive: an existing file belongs to another set, which a server may still be reading.
        with path.open("xb") as file:
            # Reserves the memory. Without it, writing to a mapped page that shared memory cannot
            # back would kill the process with SIGBUS.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightError(
            f"{num_bytes} bytes of weights don't fit into {path.parent}: {error.strerror}. "
            f"Give shared memory more room (df {path.parent})."
        ) from error
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def open_mapped_file(path: Path, *, num_bytes: int, is_shared: bool) -> Tensor:
    """Map a file as a [num_bytes] uint8 tensor.

    Args:
        path: The file.
        num_bytes: Its expected size.
        is_shared: True if writes to the tensor shall reach the file.

    Raises:
        WeightError: If the file is missing or has another size.
    """
    if not path.is_file() or path.stat().st_size != num_bytes:
        size = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
        raise WeightError(
            f"the weight file {path} {size}, but {num_bytes} bytes were expected: "
            "weight_sync.transport=shared_memory needs actor and servers on one host."
        )
    return torch.from_file(str(path), shared=is_shared, size=num_bytes, dtype=torch.uint8)


def check_digest(data: Tensor, bucket: PackedBucket) -> None:
    """Compare the checksum of received bytes with the sender's.

    Raises:
        WeightError: If they differ.
    """
    if bucket.digest is not None and compute_digest(data) != bucket.digest:
        first = bucket.entries[0].name if bucket.entries else "no tensor"
        raise WeightError(
            f"the weight bucket that starts with {first} arrived damaged (checksum differs): "
            "publish the weights again."
        )


def compute_digest(data: Tensor) -> int:
    """Return a checksum of uint8 data, computed on its device at memory speed.

    The sum of all 8-byte words, each multiplied by an odd number that depends on its position,
    modulo 2^64. It detects damage, swapped words and stale parts. It is no defense against somebody
    who forges data.
    """
    words = data[: len(data) // 8 * 8].view(torch.int64)
    rest = torch.nn.functional.pad(data[len(words) * 8 :], (0, 8 - len(data) % 8)).view(torch.int64)
    # Odd factors are invertible modulo 2^64, so every change of a single word changes the sum.
    factors = torch.arange(min(_BLOCK, len(words)), device=data.device) * 2 + 1
    num_blocks = len(words) // _BLOCK
    rows = (
        words[: num_blocks * _BLOCK]
        .view(num_blocks, _BLOCK)
        .split(_BLOCKS_AT_ONCE if data.is_cuda else 1)
    )
    sums = [(row * factors).sum(dim=1) for row in rows if len(row)]
    last = words[num_blocks * _BLOCK :]
    sums.append((last * factors[: len(last)]).sum(dim=0, keepdim=True))
    # A second set of odd factors, so that swapped blocks are detected too. int64 wraps modulo 2^64.
    block_factors = torch.arange(num_blocks + 1, device=data.device) * 2 + 1
    return (int((torch.cat(sums) * block_factors).sum() + rest.sum()) + len(data)) % 2**64
