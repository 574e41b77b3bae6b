"""torch's distributed checkpoint format, which Megatron's ``dist_ckpt`` is.

Its ``.metadata`` is read without executing it, and chunks are inside ``.distcp`` files.

Neither torch nor Megatron is needed. A chunk is read when it is used.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from itertools import product
from pathlib import Path, PurePosixPath

from temper_legacy_shim.checkpoints.files.archive import Archive, FileBytes
from temper_legacy_shim.checkpoints.files.dtypes import Block, Dtype
from temper_legacy_shim.checkpoints.files.lazy import (
    LazyTensor,
    Piece,
    Shape,
    Stored,
    Unflattened,
    read_all,
)
from temper_legacy_shim.checkpoints.files.pickles import Inert, load_inert
from temper_legacy_shim.checkpoints.files.sharded import covering
from temper_legacy_shim.checkpoints.files.tensors import (
    TensorReader,
    attributes_of,
    properties_dtype,
    sizes_of,
)
from temper_legacy_shim.errors import DamagedFileError, LayoutError

DESCRIPTION = ".metadata"
"""Index file of the format."""
_METADATA = ("Metadata", "MCoreMetadata")
"""torch's, and Megatron's own of 0.15."""


_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)
"""Exceptions of reading objects that lack what the format promises."""


class DistCheckpoint:
    """A folder: lazy tensors by name, and the names of other entries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / DESCRIPTION
        if not path.is_file():
            raise LayoutError(
                f"{folder} has no .metadata, which is written last: its save was not finished."
            )
        file = FileBytes(path)
        value = load_inert(file.read(0, file.size), source=str(path))
        if not isinstance(value, Inert) or value.function.name not in _METADATA:
            raise DamagedFileError(
                f"{path} is no metadata of a distributed checkpoint: copy it again."
            )
        try:
            described = attributes_of(value.state)
            self._entries = _mapping(described["state_dict_metadata"])
            self._original_shapes = _original_shapes(described.get("mcore_data"))
            self.positions = _positions(described["storage_data"], path=path)
        except _MALFORMED as error:
            if isinstance(error, DamagedFileError):
                raise
            raise DamagedFileError(
                f"{path} is malformed ({type(error).__name__}: {error}): copy it again."
            ) from error
        self._files: dict[str, FileBytes] = {}

    @cached_property
    def tensors(self) -> dict[str, LazyTensor]:
        """All tensors by name, not loaded yet.

        Raises:
            DamagedFileError: a chunk is missing, or lies outside its tensor.
        """
        result: dict[str, LazyTensor] = {}
        for name, node in self._entries.items():
            if (
                isinstance(name, str)
                and isinstance(node, Inert)
                and node.function.name == "TensorStorageMetadata"
            ):
                try:
                    result[name] = self._tensor(name, attributes_of(node.state))
                except _MALFORMED as error:
                    if isinstance(error, DamagedFileError):
                        raise
                    raise DamagedFileError(
                        f"{self.folder}/.metadata: {name} is malformed ({error}): copy it again."
                    ) from error
        return result

    @property
    def other_names(self) -> list[str]:
        """Names of entries that are stored as bytes, such as random-number states."""
        return [
            str(name)
            for name, node in self._entries.items()
            if isinstance(node, Inert) and node.function.name != "TensorStorageMetadata"
        ]

    def _tensor(self, name: str, described: Mapping[object, object]) -> LazyTensor:
        """Return one tensor by its chunks, each at a position of a file.

        Sizes are compared with the bytes that the description promises, because it is not trusted.
        """
        shape, dtype = sizes_of(described["size"]), properties_dtype(described["properties"])
        chunks = described["chunks"]
        if dtype is None or not isinstance(chunks, list):
            raise DamagedFileError(
                f"{self.folder}/.metadata: {name} has elements of a type that is not known."
            )
        is_flattened = name in self._original_shapes
        pieces = []
        for chunk in chunks:
            box = attributes_of(chunk.state)
            offsets, sizes = sizes_of(box["offsets"]), sizes_of(box["sizes"])
            position = self.positions.get((name, offsets)) or self.positions.get((name, None))
            if position is None:
                raise DamagedFileError(
                    f"{self.folder}/.metadata names no file for the part of {name} at {offsets}: "
                    "copy it again."
                )
            if (
                math.prod(sizes) * dtype.num_bytes > position[2]
                or position[2] < 0
                or position[1] < 0
            ):
                raise DamagedFileError(
                    f"{self.folder}/.metadata gives {name} {position[2]} bytes for a part of shape "
                    f"{sizes}: copy it again."
                )
            if 0 not in sizes:
                kind = _FlatChunk if is_flattened else _Chunk
                pieces.append(
                    Piece(
                        offsets=offsets,
                        tensor=kind(self.folder, position, name=name, shape=sizes, dtype=dtype),
                    )
                )
        like = _Chunk(self.folder, ("", 0, 0), name=name, shape=shape, dtype=dtype)
        if is_flattened:
            return self._unflattened(name, pieces, saved=shape, like=like)
        return covering(name, pieces, shape=shape, like=like, where=str(self.folder))

    def _unflattened(
        self, name: str, pieces: list[Piece], *, saved: Shape, like: LazyTensor
    ) -> LazyTensor:
        """Read a tensor in the layout of Megatron up to 0.15.

        The layout is [shards along each dimension, elements of a shard].

        Each shard is flat and cut over the data-parallel ranks, as the distributed optimizer keeps
        it.
        """
        full, counts, where = self._original_shapes[name], saved[:-1], str(self.folder)
        is_grid = (
            len(full) == len(counts)
            and all(counts)
            and not any(size % count for size, count in zip(full, counts, strict=True))
        )
        # Each shard is in one piece at least, so that larger counts are of no genuine save.
        if not is_grid or math.prod(counts) > max(len(pieces), 1):
            raise DamagedFileError(
                f"{where}/.metadata: {name} is flattened as {saved}, which is no grid of shards of "
                f"{full}: copy it again."
            )
        shard = tuple(size // count for size, count in zip(full, counts, strict=True))
        vectors: dict[Shape, list[Piece]] = {
            position: [] for position in product(*map(range, counts))
        }
        for piece in pieces:
            vectors.setdefault(piece.offsets[:-1], []).append(
                Piece(offsets=piece.offsets[-1:], tensor=piece.tensor)
            )
        boxes = []
        for position, parts in vectors.items():
            offsets = tuple(at * size for at, size in zip(position, shard, strict=True))
            vector = covering(
                f"{name} at {offsets}", parts, shape=(math.prod(shard),), like=like, where=where
            )
            boxes.append(Piece(offsets=offsets, tensor=Unflattened(vector, shard)))
        return covering(name, boxes, shape=full, like=like, where=where)


class _Chunk:
    """A tensor in a part of a larger file; the part is located at first use."""

    def __init__(
        self, folder: Path, position: tuple[str, int, int], *, name: str, shape: Shape, dtype: Dtype
    ) -> None:
        self._folder, self._position, self._name, self._saved_shape = folder, position, name, shape
        self.shape, self.dtype = shape, dtype

    @cached_property
    def _stored(self) -> LazyTensor:
        relative, offset, length = self._position
        archive = Archive(self._folder / relative, start=offset, length=length)
        tensor = TensorReader(archive).plain(archive.value(), key=self._name)
        if tensor.shape != self._saved_shape or tensor.dtype != self.dtype:
            raise DamagedFileError(
                f"{self._folder / relative}: {self._name} has shape {tensor.shape} of "
                f"{tensor.dtype.name}, but .metadata says "
                f"{self._saved_shape} of {self.dtype.name}: the files are not of one save."
            )
        return tensor

    def read(self, start: int, stop: int) -> Block:
        return self._stored.read(start, stop)


class _FlatChunk(_Chunk):
    """A part of a flat shard, saved with the dimensions of the tensor, leading ones of size 1."""

    def __init__(
        self, folder: Path, position: tuple[str, int, int], *, name: str, shape: Shape, dtype: Dtype
    ) -> None:
        super().__init__(folder, position, name=name, shape=shape, dtype=dtype)
        self.shape = shape[-1:] if math.prod(shape[:-1]) == 1 else shape

    def read(self, start: int, stop: int) -> Block:
        stored = self._stored
        if isinstance(stored, Stored):
            return Stored(
                file=stored.file, offset=stored.offset, shape=self.shape, dtype=self.dtype
            ).read(start, stop)
        return read_all(stored).reshape(self.shape)[start:stop]


def _original_shapes(node: object) -> dict[object, Shape]:
    """Read the shapes of flattened tensors from the metadata that Megatron adds to torch's."""
    key = "nd_reformulated_orig_global_shape"
    result = {}
    for name, described in node.items() if isinstance(node, dict) else ():
        if isinstance(described, dict) and key in described:
            result[name] = sizes_of(described[key])
    return result


def _mapping(node: object) -> dict[object, object]:
    if not isinstance(node, dict):
        raise ValueError(f"a {type(node).__name__} where a mapping should be")
    return node


def _positions(node: object, *, path: Path) -> dict[tuple[str, Shape | None], tuple[str, int, int]]:
    """Return (file, first byte, number of bytes) by name and offset of the chunk."""
    result: dict[tuple[str, Shape | None], tuple[str, int, int]] = {}
    for index, info in _mapping(node).items():
        if not isinstance(index, Inert):
            raise ValueError("an index that is none")
        key, where = _index(index), attributes_of(info.state if isinstance(info, Inert) else None)
        relative, offset, length = where["relative_path"], where["offset"], where["length"]
        if where.get("transform_descriptors"):
            raise LayoutError(
                f"{path}: {key[0]} is stored compressed or encrypted, which can't be read here."
            )
        if (
            not isinstance(relative, str)
            or not isinstance(offset, int)
            or not isinstance(length, int)
        ):
            raise ValueError("a place that is no file with an offset")
        # The description is not trusted: no path may lead out of the folder.
        pure = PurePosixPath(relative)
        if pure.is_absolute() or ".." in pure.parts or "\\" in relative or "\0" in relative:
            raise DamagedFileError(
                f"{path} refers to {relative!r:.200}, which lies outside its folder: it is no "
                "genuine checkpoint."
            )
        result[key] = (relative, offset, length)
    return result


def _index(node: Inert) -> tuple[str, Shape | None]:
    described = attributes_of(node.state)
    name = described.get("fqn", node.arguments[0] if node.arguments else None)
    offset = described.get("offset", node.arguments[1] if len(node.arguments) > 1 else None)
    if not isinstance(name, str):
        raise ValueError("an index without a name")
    return name, None if offset is None else sizes_of(offset)
