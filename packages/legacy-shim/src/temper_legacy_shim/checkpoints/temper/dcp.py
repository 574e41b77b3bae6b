"""Write torch's distributed checkpoint format from lazy tensors, without torch.

A block of a tensor is in memory at a time, and no process group is needed.

A large checkpoint is written in groups of tensors, each a small checkpoint that is finished for
itself; ``join`` makes one of them by moving their data files and writing one description.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from temper_legacy_shim.checkpoints.files.archive import write_archive
from temper_legacy_shim.checkpoints.files.dist_ckpt import DESCRIPTION, DistCheckpoint
from temper_legacy_shim.checkpoints.files.dtypes import FLOAT32, Block, Dtype, has_nonfinite
from temper_legacy_shim.checkpoints.files.hashed_files import HashingWriter, Progress, WrittenFile
from temper_legacy_shim.checkpoints.files.lazy import (
    LazyTensor,
    Rows,
    Shape,
    buffered_blocks,
    spans,
)
from temper_legacy_shim.checkpoints.files.pickles import Global, Inert, dump_inert
from temper_legacy_shim.checkpoints.files.tensors import describe_tensor

DATA = "__0_0.distcp"
_CHUNK_BYTES = 1 << 25
"""Bytes per entry of a file, since a layer's joined experts may be large; a row may be larger."""
_METADATA = "torch.distributed.checkpoint.metadata"
_STRIDED = Inert(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Inert(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
"""torch.contiguous_format."""

Positions = dict[tuple[str, Shape], tuple[str, int, int]]
"""File, first byte and number of bytes of each chunk, by name and offset in its tensor."""


class Zeros:
    dtype = FLOAT32

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def read(self, start: int, stop: int) -> Block:
        """Return rows, as one number with strides of 0: new pages would cost as much as a copy."""
        return np.broadcast_to(np.float32(0), (stop - start, *self.shape[1:]))


def find_copies(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Return the tensors of zeros that need no bytes, each with a tensor that has them."""
    # The format lets several tensors have one position in a file. Moments that begin at 0 are two
    # thirds of all bytes.
    names: dict[tuple[int, ...], str] = {}
    zeros = {name: tensor.shape for name, tensor in tensors.items() if isinstance(tensor, Zeros)}
    originals = {name: names.setdefault(shape, name) for name, shape in zeros.items()}
    return {name: original for name, original in originals.items() if name != original}


def write_group(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    *,
    relative: str = "",
    progress: Progress,
) -> list[WrittenFile]:
    """Write ``DATA`` and its description.

    Args:
        folder: to be made.
        tensors: by name.
        relative: path of the folder in the output.
        progress: told of every block.

    Returns:
        The records of both files; that of ``DATA`` names the tensors with NaN or infinity.

    Raises:
        DamagedFileError: a source file is shorter than it says.
        OSError: the disk is full.
    """
    folder.mkdir()
    with_nan: dict[str, None] = {}
    positions: Positions = {}

    def read(name: str, part: LazyTensor) -> Iterator[memoryview]:
        for block in buffered_blocks(part):
            if has_nonfinite(block, part.dtype):
                with_nan[name] = None
            progress(block.nbytes)
            yield block.reshape(-1).view(np.uint8).data

    with HashingWriter(folder / DATA) as writer:
        for name, tensor in tensors.items():
            for offset, shape in _chunks(tensor):
                part = Rows(tensor, ((offset[0], offset[0] + shape[0]),)) if shape else tensor
                begun = writer.num_bytes
                write_archive(writer.put, _pickle(shape, part.dtype), {"0": read(name, part)})
                positions[name, offset] = (DATA, begun, writer.num_bytes - begun)
    return [
        writer.record(f"{relative}/{DATA}", with_nan=tuple(with_nan)),
        _write_description(folder, tensors, positions, relative=relative),
    ]


def join(
    folder: Path,
    groups: Sequence[Path],
    tensors: Mapping[str, LazyTensor],
    *,
    copies: Mapping[str, str],
) -> dict[Path, str]:
    """Make one checkpoint of several, whose data files are moved into it.

    Args:
        folder: to be made.
        groups: folders that ``write_group`` filled.
        tensors: those of all groups, and their copies.
        copies: tensors that are in no group, with the name of one that has their bytes.

    Returns:
        The new name of each data file; the metadata file is next to them.
    """
    written: Positions = {}
    moved: dict[Path, str] = {}
    for number, group in enumerate(groups):
        name = moved[group / DATA] = f"__{number}_0.distcp"
        for (tensor, offset), (_, start, length) in DistCheckpoint(group).positions.items():
            written[tensor, offset or ()] = (name, start, length)
    folder.mkdir()
    for source, name in moved.items():
        source.rename(folder / name)
    positions = {
        (name, offset): written[copies.get(name, name), offset]
        for name, tensor in tensors.items()
        for offset, _ in _chunks(tensor)
    }
    _write_description(folder, tensors, positions, relative="")
    return moved


@cache
def _pickle(shape: Shape, dtype: Dtype) -> bytes:
    # Cached, because the layers of a model have the same few shapes.
    return dump_inert(describe_tensor(shape, dtype, key="0"))


def _chunks(tensor: LazyTensor) -> Iterator[tuple[Shape, Shape]]:
    """Yield (offset, shape) of the parts that are separate entries, large tensors' by rows."""
    inner = tensor.shape[1:]
    rows = list(spans(tensor, block_bytes=_CHUNK_BYTES)) if tensor.shape else []
    if len(rows) < 2:
        yield (0,) * len(tensor.shape), tensor.shape
        return
    for start, stop in rows:
        yield (start, *(0 for _ in inner)), (stop - start, *inner)


def _write_description(
    folder: Path, tensors: Mapping[str, LazyTensor], positions: Positions, *, relative: str
) -> WrittenFile:
    """Write the pickle of torch's ``Metadata``."""
    chunks = [
        (name, offset, number)
        for name, tensor in tensors.items()
        for number, (offset, _) in enumerate(_chunks(tensor))
    ]
    metadata = _instance(
        "Metadata",
        state_dict_metadata={name: _describe(tensor) for name, tensor in tensors.items()},
        planner_data=None,
        storage_data={
            _instance("MetadataIndex", fqn=name, offset=_size(offset), index=number): _position(
                *positions[name, offset]
            )
            for name, offset, number in chunks
        },
        storage_meta=None,
        version="1.0.0",
    )
    with HashingWriter(folder / DESCRIPTION) as writer:
        writer.put(dump_inert(metadata))
    return writer.record(f"{relative}/{DESCRIPTION}")


def _describe(tensor: LazyTensor) -> Inert:
    chunks = [
        _instance("ChunkStorageMetadata", offsets=_size(offset), sizes=_size(shape))
        for offset, shape in _chunks(tensor)
    ]
    properties = Inert(
        Global(_METADATA, "TensorProperties"),
        (),
        (Global("torch", tensor.dtype.name), _STRIDED, False, _CONTIGUOUS, False),
    )
    return _instance(
        "TensorStorageMetadata", properties=properties, size=_size(tensor.shape), chunks=chunks
    )


def _position(file: str, start: int, length: int) -> Inert:
    state = {"relative_path": file, "offset": start, "length": length}
    return Inert(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), (), state)


def _instance(name: str, **attributes: object) -> Inert:
    return Inert(Global(_METADATA, name), (), attributes)


@cache
def _size(shape: Shape) -> Inert:
    # Cached, so that a shape that occurs often is written once.
    return Inert(Global("torch", "Size"), (shape,))
