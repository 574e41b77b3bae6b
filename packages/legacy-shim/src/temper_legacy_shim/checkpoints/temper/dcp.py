"""Write torch's distributed checkpoint format from lazy tensors.

One chunk is in memory at a time, and no process group is needed.

A large checkpoint is written in groups of tensors, each a small checkpoint that is finished for
itself; ``join`` makes one of them by moving their data files and writing one description.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.dtypes import FLOAT32, Block
from temper_legacy_shim.checkpoints.files.lazy import (
    LazyTensor,
    Rows,
    blocks,
    num_bytes,
    spans,
)
from temper_legacy_shim.checkpoints.files.safetensors_files import Progress

DATA = "__0_0.distcp"
_CHUNK_BYTES = 1 << 25
"""Bytes per write, since a layer's joined experts may be large; a row may be larger."""


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


def grouped(tensors: Mapping[str, LazyTensor], *, max_bytes: int) -> list[dict[str, LazyTensor]]:
    """Group tensors in order, up to a size; a larger tensor forms a group alone."""
    groups: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        count = num_bytes(tensor)
        if groups[-1] and size + count > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += count
    return groups


def write_group(
    folder: Path, tensors: Mapping[str, LazyTensor], *, progress: Progress
) -> tuple[str, ...]:
    """Write ``DATA`` and its description.

    Args:
        folder: to be made.
        tensors: by name.
        progress: told of every chunk.

    Returns:
        Names of tensors that hold NaN or infinity.

    Raises:
        DamagedFileError: a source file is shorter than it says.
        OSError: the disk is full.
    """
    with warnings.catch_warnings():
        # torch tells everyone without a process group that they have none.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = _LazyPlanner(tensors, progress=progress)
        try:
            save(
                _shells(tensors),
                # Without reading ahead, which torch does where it has CUDA: the planner's memory
                # holds one chunk.
                storage_writer=FileSystemWriter(folder, per_thread_copy_ahead=0),
                planner=planner,
                no_dist=True,
            )
        except CheckpointException as error:
            # torch wraps the exception, and the archive writer wraps that of the disk again.
            raise next((_root(failure) for failure, _ in error.failures.values()), error) from None
    return tuple(planner.with_nan)


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
    planner = _ChunkPlanner(tensors)
    planner.set_up_planner(_shells(tensors), is_coordinator=True)
    plan = planner.create_local_plan()
    _, metadata = planner.create_global_plan([plan])
    positions: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {}
    moved: dict[Path, str] = {}
    for number, group in enumerate(groups):
        name = moved[group / DATA] = f"__{number}_0.distcp"
        for (tensor, offset), (_, start, length) in DistCheckpoint(group).positions.items():
            position = _StorageInfo(relative_path=name, offset=start, length=length)
            positions[tensor, offset or ()] = position
    results = []
    for item in plan.items:
        tensor, offset = item.index.fqn, tuple(item.index.offset or ())
        position = positions[copies.get(tensor, tensor), offset]
        results.append(
            WriteResult(index=item.index, size_in_bytes=position.length, storage_data=position)
        )
    folder.mkdir()
    for source, name in moved.items():
        source.rename(folder / name)
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, [results])
    return moved


def _shells(tensors: Mapping[str, LazyTensor]) -> dict[str, Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype.name), device="meta")
        for name, tensor in tensors.items()
    }


def _root(error: BaseException) -> BaseException:
    """Return the first cause of an exception."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


class _ChunkPlanner(DefaultSavePlanner):
    """Plans tensors without content, large ones in chunks of rows."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors

    def create_local_plan(self) -> SavePlan:
        """Plan the chunks of every tensor, in order."""
        plan = super().create_local_plan()
        self.plan = replace(
            plan, items=[chunk for item in plan.items for chunk in self._chunks(item)]
        )
        return self.plan

    def _chunks(self, item: WriteItem) -> Iterator[WriteItem]:
        tensor, full = self._tensors[item.index.fqn], item.tensor_data
        rows = list(spans(tensor, block_bytes=_CHUNK_BYTES)) if tensor.shape else []
        if len(rows) < 2 or full is None:
            yield item
            return
        inner = tensor.shape[1:]
        for start, stop in rows:
            offsets = torch.Size((start, *(0 for _ in inner)))
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((stop - start, *inner)))
            data = TensorWriteData(chunk=chunk, properties=full.properties, size=full.size)
            yield WriteItem(
                index=MetadataIndex(item.index.fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=data,
            )


class _LazyPlanner(_ChunkPlanner):
    """Reads each chunk when it is its turn to be written."""

    def __init__(self, tensors: Mapping[str, LazyTensor], *, progress: Progress) -> None:
        super().__init__(tensors)
        self._progress = progress
        self._buffer = np.empty(0, np.uint8)
        self.with_nan: dict[str, None] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        part = self._tensors[write_item.index.fqn]
        if write_item.type == WriteItemType.SHARD and write_item.tensor_data is not None:
            start, count = (
                write_item.tensor_data.chunk.offsets[0],
                write_item.tensor_data.chunk.sizes[0],
            )
            part = Rows(part, ((start, start + count),))
        self._progress(num_bytes(part))
        content = self._load(part)
        if _is_spoilt(content):
            self.with_nan[write_item.index.fqn] = None
        return content

    def _load(self, part: LazyTensor) -> Tensor:
        """Return the content, in memory that the next chunk overwrites."""
        # torch's writer keeps the last chunk of every name until its file is complete, for another
        # format. All of them share this memory: a new allocation for each chunk would leave holes
        # in the heap, which grew by 150 MB for each GB of the checkpoint.
        size = num_bytes(part)
        if size > self._buffer.nbytes:
            self._buffer = np.empty(max(size, _CHUNK_BYTES), np.uint8)
        dtype: torch.dtype = getattr(torch, part.dtype.name)
        if size == 0:
            return torch.empty(part.shape, dtype=dtype)
        at = 0
        for block in blocks(part):
            target = self._buffer[at : at + block.nbytes].view(block.dtype)
            np.copyto(target.reshape(block.shape), block)
            at += block.nbytes
        return torch.frombuffer(
            self._buffer, dtype=dtype, count=size // part.dtype.num_bytes
        ).reshape(part.shape)


def _is_spoilt(content: Tensor) -> bool:
    """Check if a tensor holds NaN or infinity, by its extremes and without an allocation."""
    if content.numel() == 0 or not content.is_floating_point():
        return False
    return not all(bool(extreme.isfinite()) for extreme in content.aminmax())
