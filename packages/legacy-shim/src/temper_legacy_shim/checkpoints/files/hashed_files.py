"""Write files and hash them in one pass."""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from temper_engine_api.checksums import RunningChecksum, compute_file_checksum
from temper_legacy_shim.errors import VerificationError

_BUFFER_BYTES = 2 << 20
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


def written_file(path: Path, *, relative: str) -> WrittenFile:
    """Return the record of a file of another writer.

    Args:
        path: where it lies.
        relative: where it will lie in the output.
    """
    return WrittenFile(
        path=relative, num_bytes=path.stat().st_size, checksum=compute_file_checksum(path)
    )


class HashingWriter:
    """Hash and write a new file; a thread writes a buffer while the next one is filled.

    The file is written and read back past the page cache where its file system can do that. On
    return from its `with` block, it is on disk.

    Args:
        path: a new file.
        is_compared: read everything back from the file and compare it.

    Raises:
        VerificationError: the file differs from the written bytes.
        OSError: the disk is full.
    """

    def __init__(self, path: Path, *, is_compared: bool = False) -> None:
        self._path = path
        self._checksum = RunningChecksum()
        # Mapped memory starts at a page, as direct reads and writes require. Copies to the page
        # cache took 0.2 to 1.1 s of CPU time for 1 GiB, and direct writes 0.1 s.
        self._buffers = [mmap.mmap(-1, _BUFFER_BYTES) for _ in range(2)]
        self._again = mmap.mmap(-1, _BUFFER_BYTES) if is_compared else None
        self._is_direct = hasattr(os, "O_DIRECT")
        self._descriptor = self._open()
        self._writer, self._flusher = (
            ThreadPoolExecutor(1, thread_name_prefix=f"temper-migrate-{work}")
            for work in ("writer", "flusher")
        )
        self._pending: Future[None] | None = None
        self._flushed: Future[None] | None = None
        self._filled = self._num_flushed = self._num_written = self.num_bytes = 0

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o666)
        if self._is_direct:
            # open() with O_DIRECT may create the file and then fail, and a second O_EXCL could not
            # tell it from the file of another process.
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
            except OSError:
                # Such as EINVAL or EOPNOTSUPP: the file system has no such writes.
                self._is_direct = False
        return descriptor

    def __enter__(self) -> "HashingWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._submit()
                self._wait()
                if self._flushed is not None:
                    self._flushed.result()
                os.fsync(self._descriptor)
        finally:
            for pool in (self._writer, self._flusher):
                pool.shutdown()
            os.close(self._descriptor)

    def put(self, data: bytes | memoryview) -> None:
        """Queue a block; raise the exception of an earlier block."""
        view = memoryview(data)
        # Hashed here and not by a thread: the block is still in the cache of this core.
        self._checksum.update(view)
        self.num_bytes += len(view)
        while view:
            count = min(len(view), _BUFFER_BYTES - self._filled)
            self._buffers[0][self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == _BUFFER_BYTES:
                self._submit()

    def record(
        self, relative: str, *, num_tensors: int = 0, with_nan: tuple[str, ...] = ()
    ) -> WrittenFile:
        """Return the record of the finished file with its path in the output."""
        return WrittenFile(
            path=relative,
            num_bytes=self.num_bytes,
            checksum=str(self._checksum),
            num_tensors=num_tensors,
            with_nan=with_nan,
        )

    def _submit(self) -> None:
        self._wait()
        full = memoryview(self._buffers[0])[: self._filled]
        self._pending = self._writer.submit(self._write, full)
        self._buffers.reverse()
        self._filled = 0

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
        self._pending = None

    def _write(self, data: memoryview) -> None:
        begun, rest = self._num_written, data
        while rest:
            count = self._write_some(rest)
            rest = rest[count:]
            self._num_written += count
        if self._again is not None:
            again = memoryview(self._again)[: len(data)]
            count = os.preadv(self._descriptor, [again], begun)
            # By numpy, because memoryviews are compared byte by byte in a slow loop.
            if count != len(data) or not np.array_equal(again, data):
                raise VerificationError(
                    f"{self._path}: bytes from {begun} on are others than were written: check the "
                    "disk, and convert again."
                )
        if not self._is_direct:
            self._flush()

    def _write_some(self, data: memoryview) -> int:
        if not self._is_direct:
            return os.write(self._descriptor, data)
        try:
            count = os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            count = 0
        # The file system may require another alignment, the disk may be full, and the end of the
        # file is no multiple of a sector: the rest goes through the page cache.
        if count < len(data):
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self._is_direct = False
        return count

    def _flush(self) -> None:
        # On a slow disk the next flush starts after the last one has ended, so writing never waits.
        if self._num_written - self._num_flushed < _FLUSHED_BYTES:
            return
        if self._flushed is None or self._flushed.done():
            if self._flushed is not None:
                self._flushed.result()
            self._num_flushed = self._num_written
            self._flushed = self._flusher.submit(os.fsync, self._descriptor)
