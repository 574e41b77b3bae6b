"""Write safetensors as a stream: blocks are hashed, written, read back and compared."""

import json
import os
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from temper_legacy_shim.checkpoints.files.dtypes import has_nonfinite
from temper_legacy_shim.checkpoints.files.hashed_files import HashingWriter, Progress, WrittenFile
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, num_bytes, spans
from temper_legacy_shim.errors import DamagedFileError

_READERS = 1 if (os.cpu_count() or 1) <= 2 else 2
"""Number of threads that read and cast blocks, and of blocks they are ahead.

Two more threads write and hash: more threads than cores only contend for the interpreter's lock.
"""


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


def plan_shards(
    tensors: Mapping[str, LazyTensor], *, max_bytes: int, stem: str
) -> dict[str, dict[str, LazyTensor]]:
    """Assign tensors to files, in order, under Hugging Face's names of shards.

    Args:
        tensors: by name.
        max_bytes: maximum size of a file; a larger tensor gets a separate file.
        stem: ``model`` or ``adapter_model``.
    """
    groups = grouped(tensors, max_bytes=max_bytes)
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {
        f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups)
    }


def index_of(shards: Mapping[str, Mapping[str, LazyTensor]]) -> dict[str, object]:
    """Return the content of ``model.safetensors.index.json``."""
    total = sum(num_bytes(tensor) for group in shards.values() for tensor in group.values())
    return {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, group in shards.items() for name in group},
    }


def header_of(tensors: Mapping[str, LazyTensor]) -> bytes:
    """Return the header of a safetensors file, with its length, padded to eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = num_bytes(tensor)
        entries[name] = {
            "dtype": tensor.dtype.tag,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(
    path: Path, tensors: Mapping[str, LazyTensor], *, relative: str, progress: Progress
) -> WrittenFile:
    """Write one file.

    On return, the file is on disk, and every byte was compared.

    Args:
        path: a new file.
        tensors: by name, in this order.
        relative: its path in the receipt.
        progress: told of every block.

    Raises:
        DamagedFileError: a source is shorter than it says.
        VerificationError: the file on disk differs from the written bytes.
        OSError: the disk is full.
    """
    with_nan: dict[str, None] = {}
    written = dict.fromkeys(tensors, 0)
    with (
        HashingWriter(path, is_compared=True) as writer,
        ThreadPoolExecutor(_READERS, thread_name_prefix="temper-migrate-reader") as readers,
        closing(_read_ahead(tensors, readers)) as blocks,
    ):
        writer.put(header_of(tensors))
        for read in blocks:
            writer.put(read.content)
            written[read.name] += len(read.content)
            if read.is_spoilt:
                with_nan[read.name] = None
            progress(len(read.content))
        for name, tensor in tensors.items():
            if written[name] != num_bytes(tensor):
                raise DamagedFileError(
                    f"{name} gave {written[name]} bytes instead of {num_bytes(tensor)}: a source "
                    "file changed meanwhile."
                )
    return writer.record(relative, num_tensors=len(tensors), with_nan=tuple(with_nan))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadBlock:
    name: str
    content: memoryview
    is_spoilt: bool
    """True if it holds NaN or infinity."""


def _read_ahead(
    tensors: Mapping[str, LazyTensor], readers: ThreadPoolExecutor
) -> Generator[_ReadBlock, None, None]:
    """Yield all blocks of all tensors in order, while the next blocks are loaded and cast."""
    waiting: deque[Future[_ReadBlock]] = deque()
    for name, tensor in tensors.items():
        for start, stop in spans(tensor):
            waiting.append(readers.submit(_read, name, tensor, start, stop))
            # Bounds the memory: the blocks that wait are at most one more than the threads that
            # read.
            if len(waiting) > _READERS:
                yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _read(name: str, tensor: LazyTensor, start: int, stop: int) -> _ReadBlock:
    block = tensor.read(start, stop)
    content = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
    return _ReadBlock(name=name, content=content, is_spoilt=has_nonfinite(block, tensor.dtype))
