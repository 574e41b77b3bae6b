"""Lazy tensors: the source of the rows, and the operations on them.

Tensors are loaded in blocks (slices along dimension 0), so that an operation on
it never needs more memory than a few blocks, whatever its size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from temper_legacy_shim.checkpoints.files.archive import FileBytes
from temper_legacy_shim.checkpoints.files.dtypes import (
    FLOAT32,
    Block,
    Dtype,
    from_float32,
    to_float32,
)

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 1 << 20
"""Bytes of a tensor in memory at once, which fit a cache; a single row may be larger."""

Shape = tuple[int, ...]


class LazyTensor(Protocol):
    """A tensor that loads rows when they are used."""

    @property
    def shape(self) -> Shape:
        """Full shape."""

    @property
    def dtype(self) -> Dtype:
        """Element type."""

    def read(self, start: int, stop: int) -> Block:
        """Return rows start to stop, [stop - start, *shape[1:]]; a scalar has one row."""


def num_rows(shape: Shape) -> int:
    return shape[0] if shape else 1


def num_bytes(tensor: LazyTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.num_bytes


def blocks(tensor: LazyTensor, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    for start, stop in spans(tensor, block_bytes=block_bytes):
        yield tensor.read(start, stop)


def buffered_blocks(tensor: LazyTensor, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Read a tensor in blocks that share memory: each is valid until the next one is read.

    The pages of new memory for each block would cost more than the read.
    """
    memory = None
    for start, stop in spans(tensor, block_bytes=block_bytes):
        if memory is None:  # the first block is the largest
            memory = np.empty((stop - start, *tensor.shape[1:]), tensor.dtype.container)
        block = memory[: stop - start]
        read_into(tensor, start, block)
        yield block


def spans(tensor: LazyTensor, *, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield (first row, row after the last) of each block; an empty tensor has none."""
    rows = num_rows(tensor.shape)
    row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.num_bytes
    if rows == 0 or row_bytes == 0:
        return
    step = max(1, block_bytes // row_bytes)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def read_all(tensor: LazyTensor) -> Block:
    rows = num_rows(tensor.shape)
    if rows == 0:
        return np.empty(tensor.shape, tensor.dtype.container)
    return tensor.read(0, rows).reshape(tensor.shape)


def as_torch(tensor: LazyTensor) -> "torch.Tensor":
    """Load a full tensor to new memory, as torch's and without a cast."""
    import torch  # a conversion to Hugging Face files starts without it

    block = read_all(tensor)
    dtype: torch.dtype = getattr(torch, tensor.dtype.name)
    # Elements that numpy has no type for travel as unsigned integers of the same width.
    result = torch.from_numpy(block.copy() if not block.flags.writeable else block)
    return result.view(dtype) if result.dtype != dtype else result


def read_into(tensor: LazyTensor, start: int, block: Block) -> None:
    """Read rows of any tensor from `start` on into a contiguous block."""
    if isinstance(tensor, Stored | Assembled | Rows):
        tensor.read_into(start, block)
    else:
        block[...] = tensor.read(start, start + len(block))


def _read_new(tensor: "Stored | Assembled | Rows", start: int, stop: int) -> Block:
    block = np.empty((stop - start, *tensor.shape[1:]), tensor.dtype.container)
    tensor.read_into(start, block)
    return block


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A contiguous tensor in a file."""

    file: FileBytes
    offset: int
    shape: Shape
    dtype: Dtype

    def read(self, start: int, stop: int) -> Block:
        return _read_new(self, start, stop)

    def read_into(self, start: int, block: Block) -> None:
        row_bytes = math.prod(self.shape[1:]) * self.dtype.num_bytes
        # A block without rows may lie at the end of the file, where a read fails.
        if block.nbytes:
            self.file.read_into(
                self.offset + start * row_bytes, block.reshape(-1).view(np.uint8).data
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """A tensor with gaps or another order of elements; the full span is loaded."""

    span: Stored
    """[N] the stretch of the file that holds all of its elements."""
    shape: Shape
    stride: Shape

    @property
    def dtype(self) -> Dtype:
        return self.span.dtype

    def read(self, start: int, stop: int) -> Block:
        first = start * (self.stride[0] if self.stride else 0)
        sizes = (stop - start, *self.shape[1:]) if self.shape else (1,)
        strides = self.stride or (1,)
        # From the first to the last element of these rows, with all elements between.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if 0 in sizes:
            return np.empty(sizes, self.dtype.container)
        flat = self.span.read(first, first + extent)
        view = np.lib.stride_tricks.as_strided(
            flat, sizes, [stride * flat.itemsize for stride in strides]
        )
        return np.ascontiguousarray(view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a larger tensor."""

    offsets: Shape
    """Offset of its first element in the full tensor."""
    tensor: LazyTensor


@dataclass(frozen=True)
class Assembled:
    """A tensor put together from boxes that cover it exactly."""

    pieces: tuple[Piece, ...]
    shape: Shape
    dtype: Dtype

    @cached_property
    def _in_order(self) -> tuple[Piece, ...]:
        return tuple(
            sorted(
                (piece for piece in self.pieces if 0 not in piece.tensor.shape),
                key=lambda piece: piece.offsets,
            )
        )

    @cached_property
    def _by_row(self) -> tuple[dict[int, list[Piece]], list[Piece]]:
        # Stacked layers of stacked experts are tens of thousands.
        single: dict[int, list[Piece]] = {}
        others: list[Piece] = []
        for piece in self._in_order:
            (
                single.setdefault(piece.offsets[0], []) if piece.tensor.shape[0] == 1 else others
            ).append(piece)
        return single, others

    def find_rows(self, start: int, stop: int) -> list[Piece]:
        single, others = self._by_row
        long = [
            p for p in others if p.offsets[0] < stop and p.offsets[0] + p.tensor.shape[0] > start
        ]
        rows = (
            range(start, stop)
            if stop - start <= len(single)
            else sorted(row for row in single if start <= row < stop)
        )
        return [*(piece for row in rows for piece in single.get(row, ())), *long]

    def read(self, start: int, stop: int) -> Block:
        return _read_new(self, start, stop)

    def read_into(self, start: int, block: Block) -> None:
        stop = start + len(block)
        for piece in self.find_rows(start, stop) if self.shape else self._in_order:
            at = piece.offsets[0] if self.shape else 0
            low, high = max(start, at), min(stop, at + num_rows(piece.tensor.shape))
            rows_of_block = block[low - start : high - start]
            # Full rows are read into their place, without a copy in between.
            if piece.tensor.shape[1:] == self.shape[1:]:
                read_into(piece.tensor, low - at, rows_of_block)
                continue
            inner = tuple(
                slice(o, o + n)
                for o, n in zip(piece.offsets[1:], piece.tensor.shape[1:], strict=True)
            )
            rows_of_block[(slice(None), *inner)] = piece.tensor.read(low - at, high - at)


@dataclass(frozen=True)
class View:
    """A selection or another form of a source's elements, with the source's dtype."""

    source: LazyTensor

    @property
    def dtype(self) -> Dtype:
        return self.source.dtype


@dataclass(frozen=True)
class Rows(View):
    """Selected rows of a tensor [R, ...], in any order."""

    spans: tuple[tuple[int, int], ...]
    """(start, stop) of rows of the source, laid end to end."""

    @cached_property
    def shape(self) -> Shape:
        return (sum(stop - start for start, stop in self.spans), *self.source.shape[1:])

    def read(self, start: int, stop: int) -> Block:
        return _read_new(self, start, stop)

    def read_into(self, start: int, block: Block) -> None:
        stop, at = start + len(block), 0
        for first, last in self.spans:
            low, high = max(start, at), min(stop, at + last - first)
            if low < high:
                read_into(self.source, first + low - at, block[low - start : high - start])
            at += last - first


@dataclass(frozen=True)
class Columns(View):
    """Some columns of a matrix [R, C]."""

    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        """[R, stop - start]."""
        return (self.source.shape[0], self.stop - self.start)

    def read(self, start: int, stop: int) -> Block:
        return np.ascontiguousarray(self.source.read(start, stop)[:, self.start : self.stop])


@dataclass(frozen=True)
class Element(View):
    """An entry of a tensor [N, ...] along dimension 0, such as a layer of stacked layers."""

    index: int

    @property
    def shape(self) -> Shape:
        return self.source.shape[1:]

    def read(self, start: int, stop: int) -> Block:
        """Return the rows of this entry; the full entry is loaded as a row of the source."""
        inner = self._stored
        if inner is not None:
            return inner.read(start, stop)
        full = self.source.read(self.index, self.index + 1)
        return full.reshape(num_rows(self.shape), *self.shape[1:])[start:stop]

    @cached_property
    def _stored(self) -> LazyTensor | None:
        """The same entry of the parts of the source, if they can be loaded by rows."""
        source = self.source
        if isinstance(source, Stored):
            stride = math.prod(source.shape[1:]) * source.dtype.num_bytes
            return Stored(
                file=source.file,
                offset=source.offset + self.index * stride,
                shape=self.shape,
                dtype=source.dtype,
            )
        if isinstance(source, Unflattened):
            inner = math.prod(source.shape[1:])
            return Unflattened(
                Rows(source.source, ((self.index * inner, (self.index + 1) * inner),)), self.shape
            )
        if isinstance(source, Assembled) and source.shape:
            pieces = tuple(
                Piece(
                    offsets=piece.offsets[1:],
                    tensor=Element(piece.tensor, self.index - piece.offsets[0]),
                )
                for piece in source.find_rows(self.index, self.index + 1)
            )
            return Assembled(pieces, self.shape, self.dtype)
        return None


@dataclass(frozen=True)
class Transposed(View):
    """The transpose of a small matrix [R, C], whose source is read in full for each block."""

    @property
    def shape(self) -> Shape:
        """[C, R]."""
        return (self.source.shape[1], self.source.shape[0])

    def read(self, start: int, stop: int) -> Block:
        return np.ascontiguousarray(
            np.concatenate([block[:, start:stop] for block in blocks(self.source)]).T
        )


@dataclass(frozen=True)
class Cast:
    """Another floating dtype, rounded to nearest even."""

    source: LazyTensor
    dtype: Dtype

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def read(self, start: int, stop: int) -> Block:
        return from_float32(
            to_float32(self.source.read(start, stop), self.source.dtype), self.dtype
        )


@dataclass(frozen=True)
class LowRankSum:
    """W + scale * B A in float32, rounded once to the dtype of W."""

    base: LazyTensor
    """[out, in]."""
    down: LazyTensor
    """[rank, in] A."""
    up: LazyTensor
    """[out, rank] B."""
    scale: float
    """alpha / rank, or the adapter's scale."""

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def dtype(self) -> Dtype:
        return self.base.dtype

    @cached_property
    def _down(self) -> NDArray[np.float32]:
        return to_float32(read_all(self.down), self.down.dtype)

    def read(self, start: int, stop: int) -> Block:
        up = to_float32(self.up.read(start, stop), self.up.dtype)
        with np.errstate(
            all="ignore"
        ):  # what grows too large becomes infinite and is told at the end
            delta = (up @ self._down) * np.float32(self.scale)
            return from_float32(
                to_float32(self.base.read(start, stop), self.base.dtype) + delta, self.dtype
            )


@dataclass(frozen=True)
class InMemory:
    """A small tensor that was computed."""

    block: Block
    dtype: Dtype = FLOAT32

    @property
    def shape(self) -> Shape:
        return cast(Shape, self.block.shape)

    def read(self, start: int, stop: int) -> Block:
        return np.ascontiguousarray(
            self.block.reshape(num_rows(self.shape), *self.shape[1:])[start:stop]
        )


def concatenated(tensors: Sequence[LazyTensor], *, dim: int) -> LazyTensor:
    """Return the tensors side by side along a dimension; the others agree."""
    if len(tensors) == 1:
        return tensors[0]
    first, at, pieces = tensors[0].shape, 0, []
    for tensor in tensors:
        pieces.append(
            Piece(offsets=tuple(at if d == dim else 0 for d in range(len(first))), tensor=tensor)
        )
        at += tensor.shape[dim]
    return Assembled(tuple(pieces), (*first[:dim], at, *first[dim + 1 :]), tensors[0].dtype)


@dataclass(frozen=True)
class Unflattened(View):
    """A vector [prod(shape)] in another shape."""

    shape: Shape

    def read(self, start: int, stop: int) -> Block:
        inner = math.prod(self.shape[1:])
        return self.source.read(start * inner, stop * inner).reshape(stop - start, *self.shape[1:])
