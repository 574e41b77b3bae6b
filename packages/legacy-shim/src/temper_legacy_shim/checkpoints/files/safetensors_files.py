"""Write safetensors as a stream: blocks are hashed, written, read back and compared."""

import hashlib
import json
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3

from temper_legacy_shim.checkpoints.files.dtypes import has_nonfinite
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, num_bytes, spans
from temper_legacy_shim.errors import DamagedFileError, VerificationError

_QUEUED_BLOCKS = 4
_READERS = 1 if (os.cpu_count() or 1) <= 2 else 2
"""Number of threads that read and cast blocks, and of blocks that they are ahead.

One more thread writes, hashes and compares: more threads than cores only contend for the
interpreter's lock.
"""
_HASHED_BYTES = 4 << 20
_FLUSHED_BYTES = 64 << 20
"""Bytes written between two flushes to disk, so that the last flush is short."""
Progress = Callable[[int], None]
"""Callback with the number of new bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    path: str
    """Relative, with forward slashes."""
    num_bytes: int
    checksum: str
    """Algorithm, a colon, and the hexadecimal digest of the content."""
    num_tensors: int = 0
    with_nan: tuple[str, ...] = ()
    """Tensors that hold NaN or infinity."""


def plan_shards(
    tensors: Mapping[str, LazyTensor], *, max_bytes: int, stem: str
) -> dict[str, dict[str, LazyTensor]]:
    """Assign tensors to files, in order, under Hugging Face's names of shards.

    Args:
        tensors: by name.
        max_bytes: maximum size of a file; a larger tensor gets a separate file.
        stem: ``model`` or ``adapter_model``.
    """
    groups: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        count = num_bytes(tensor)
        if groups[-1] and size + count > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += count
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
    with open(path, "x+b", buffering=0) as file:
        with (
            ThreadPoolExecutor(_READERS, thread_name_prefix="temper-migrate-reader") as readers,
            _HashingWriter(file.fileno(), path=path) as writer,
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
        os.fsync(file.fileno())
    return WrittenFile(
        path=relative,
        num_bytes=writer.num_bytes,
        checksum=writer.checksum(),
        num_tensors=len(tensors),
        with_nan=tuple(with_nan),
    )


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


class Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> object:
        """Take in more."""

    def hexdigest(self) -> str:
        """Return the digest of the data so far."""


_DIGESTS: dict[str, Callable[[], Digest]] = {"blake3": blake3, "sha256": hashlib.sha256}
"""Hash functions by their name in a checksum; 0.1.0 wrote SHA-256, four times as slow."""


def checksum(data: bytes) -> str:
    """Return the checksum of data in memory, in the form of new files."""
    return _named(blake3(data))


def has_checksum(path: Path, expected: str) -> bool:
    """Check if a file has this checksum; one of an unknown algorithm never fits."""
    algorithm, _, required = expected.partition(":")
    if algorithm not in _DIGESTS:
        return False
    digest = _DIGESTS[algorithm]()
    _update_with(path, digest)
    return digest.hexdigest() == required


def checksum_of(path: Path, *, algorithm: str = "blake3") -> str:
    digest = _DIGESTS[algorithm]()
    _update_with(path, digest)
    return f"{algorithm}:{digest.hexdigest()}"


def _named(digest: Digest) -> str:
    """Return a checksum as new files have it."""
    return f"blake3:{digest.hexdigest()}"


def _update_with(path: Path, digest: Digest) -> None:
    """Hash a file; a thread loads the next block meanwhile."""
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(file.read, _HASHED_BYTES)
        while data := ahead.result():
            ahead = pool.submit(file.read, _HASHED_BYTES)
            digest.update(data)


def written_file(
    path: Path, *, relative: str, with_nan: tuple[str, ...] = (), algorithm: str = "blake3"
) -> WrittenFile:
    """Return the record of a file of another writer.

    Args:
        path: where it lies.
        relative: where it will lie in the output.
        with_nan: names of tensors in it that hold NaN or infinity.
        algorithm: hash function of the checksum.
    """
    return WrittenFile(
        path=relative,
        num_bytes=path.stat().st_size,
        checksum=checksum_of(path, algorithm=algorithm),
        with_nan=with_nan,
    )


class _HashingWriter:
    """Write, hash and compare blocks in a thread, while the next block is read."""

    def __init__(self, descriptor: int, *, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self._digest = blake3()
        self._queue: queue.Queue[bytes | memoryview | None] = queue.Queue(maxsize=_QUEUED_BLOCKS)
        self._error: OSError | VerificationError | None = None
        self._thread = threading.Thread(target=self._run, name="temper-migrate-writer")
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="temper-migrate-flusher")
        self._flushed: Future[None] | None = None
        self._num_flushed = 0
        self._again = bytearray()
        self.num_bytes = 0

    def __enter__(self) -> "_HashingWriter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        self._flusher.shutdown()
        if self._error is not None:
            raise self._error
        if self._flushed is not None:
            self._flushed.result()

    def put(self, data: bytes | memoryview) -> None:
        """Queue a block; raise the exception of an earlier block."""
        if self._error is not None:
            raise self._error
        self._queue.put(data)

    def checksum(self) -> str:
        return _named(self._digest)

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            # After an error the queue is still emptied. Otherwise `put` would wait for a place in
            # it forever.
            if self._error is None:
                try:
                    self._write(data)
                except (OSError, VerificationError) as error:
                    self._error = error

    def _write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        begun, view = self.num_bytes, memoryview(data)
        while view:
            count = os.write(self._descriptor, view)
            view = view[count:]
            self.num_bytes += count
        self._compare(data, start=begun)
        # On a slow disk the next flush starts after the last one has ended, so writing never waits.
        if self.num_bytes - self._num_flushed >= _FLUSHED_BYTES and (
            self._flushed is None or self._flushed.done()
        ):
            if self._flushed is not None:
                self._flushed.result()
            self._num_flushed = self.num_bytes
            self._flushed = self._flusher.submit(os.fsync, self._descriptor)

    def _compare(self, data: bytes | memoryview, *, start: int) -> None:
        if len(self._again) != len(data):
            self._again = bytearray(len(data))
        count = os.preadv(self._descriptor, [self._again], start)
        if count != len(data) or self._again != data:  # type: ignore[comparison-overlap]  # of any two buffers, by memcmp
            raise VerificationError(
                f"{self._path}: bytes from {start} on are others than were written: check the "
                "disk, and convert again."
            )
