"""Read and write files of ``torch.save``: zips of a pickle and raw storages.

The pickle is read inertly, storages stay on the disk.

Storages are read with ``pread`` at their place in the file, not mapped: a mapped file that is cut
off while it is read kills the process, and mapped pages count as this process's memory.
"""

import io
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from temper_legacy_shim.checkpoints.files.pickles import MAX_PICKLE_BYTES, load_inert
from temper_legacy_shim.errors import DamagedFileError, LayoutError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_PICKLE_MAGIC = b"\x80"
_BEFORE_ZIPS = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First value of files of torch before 1.6, whose storages follow without a directory."""
# zipfile checks little, so damaged directories end in many kinds of errors.
_ZIP_FAULTS = (
    zipfile.BadZipFile,
    NotImplementedError,
    struct.error,
    ValueError,
    EOFError,
    KeyError,
    IndexError,
    OverflowError,
    RuntimeError,
)


class FileBytes:
    """A part of a file that is read by position, opened at the first read and shared by views."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Files of all ranks are indexed first. Opened at once, thousands of them exceed the limit
        # of descriptors.
        self._handle: int | None = None
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor()).st_size

    def _descriptor(self) -> int:
        with self._lock:
            if self._handle is None:
                try:
                    self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise LayoutError(f"{self.path} can't be read: {error.strerror}.") from error
            return self._handle

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read exactly these bytes.

        Raises:
            DamagedFileError: the file ends before.
        """
        buffer = bytearray(num_bytes)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a writable buffer of bytes from a position.

        Raises:
            DamagedFileError: the file ends before.
        """
        done, handle = 0, self._descriptor()
        while done < len(buffer):
            # One call reads at most 2 GiB on Linux.
            count = os.preadv(handle, [buffer[done:]], offset + done)
            if count == 0:
                raise DamagedFileError(
                    f"{self.path} has {self.size} bytes, but {offset + len(buffer)} are needed: it "
                    "is truncated; copy it again."
                )
            done += count

    def close(self) -> None:
        """Close; a later read opens it again."""
        with self._lock:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close the file; works at interpreter exit, when the module's globals are gone."""
        if self._handle is not None:
            close(self._handle)


class _Window(io.RawIOBase):
    """A stretch of a file as a seekable stream, for zipfile."""

    def __init__(self, file: FileBytes, *, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = {0: 0, 1: self._at, 2: self._length}[whence] + offset
        if at < 0:
            raise ValueError("a seek before the start")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(self._length - self._at, 0)
        count = rest if size is None or size < 0 else min(size, rest)
        data = self._file.read(self._start + self._at, count)
        self._at += count
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Location of a storage's raw bytes."""

    file: FileBytes
    offset: int
    """First byte, from the start of the file."""
    num_bytes: int


class Archive:
    """A file of ``torch.save``, alone or inside a larger one, as in distributed checkpoints."""

    def __init__(self, path: str | Path, *, start: int = 0, length: int | None = None) -> None:
        self.path = Path(path)
        self.file = FileBytes(self.path)
        self._start = start
        full = self.file.size - start
        self._length = full if length is None else length
        if start < 0 or self._length < 0 or self._length > full:
            raise DamagedFileError(
                f"{self.path}: bytes {start} to {start + self._length} lie outside its "
                f"{full + start} bytes."
            )
        self._entries: dict[str, zipfile.ZipInfo] = {}
        self._prefix = ""
        # A bare pickle begins with this byte too; it has no directory to read.
        if self.file.read(start, min(4, self._length))[:1] != _PICKLE_MAGIC:
            self._read_directory()

    @property
    def records(self) -> frozenset[str]:
        """Names of the entries that are no storage, which depend on torch's version."""
        names = (name.removeprefix(self._prefix) for name in self._entries)
        return frozenset(name for name in names if not name.startswith("data/"))

    def _read_directory(self) -> None:
        try:
            with zipfile.ZipFile(
                _Window(self.file, start=self._start, length=self._length)
            ) as directory:
                for entry in directory.infolist():
                    # Readers of zips differ in which of two entries with one name they return.
                    if entry.filename in self._entries:
                        raise DamagedFileError(
                            f"{self.path} holds {entry.filename!r} twice: copy the file again."
                        )
                    self._entries[entry.filename] = entry
        except _ZIP_FAULTS as error:
            if isinstance(error, DamagedFileError):
                raise
            raise DamagedFileError(
                f"{self.path} is neither a zip of torch.save nor a pickle ({error}): it is "
                "truncated or no checkpoint; copy it again."
            ) from error
        pickles = [
            name for name in self._entries if name == "data.pkl" or name.endswith("/data.pkl")
        ]
        if len(pickles) != 1:
            raise DamagedFileError(
                f"{self.path} is a zip with {len(pickles)} entries data.pkl instead of one: no "
                "file of torch.save."
            )
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = self._entries.get(f"{self._prefix}byteorder")
        # torch swaps the bytes on load. No GPU machine is big-endian, so an error is enough.
        if order is not None and self._content(order, limit=16) != b"little":
            raise DamagedFileError(
                f"{self.path} was written on a big-endian machine, which is not supported."
            )

    def value(self) -> object:
        """Return the pickle's value, inert; see ``load_inert``.

        Raises:
            UnsafeFileError: it asks for a global that no checkpoint needs.
            DamagedFileError: it is damaged.
            LayoutError: it is of torch before 1.6.
        """
        if not self._entries:
            if _BEFORE_ZIPS in self.file.read(self._start, min(32, self._length)):
                raise LayoutError(
                    f"{self.path} is in torch.save's format of before torch 1.6, which is no zip "
                    "and is not read: write it again with "
                    "torch.save(torch.load(path, weights_only=True), path), and convert again."
                )
            if self._length > MAX_PICKLE_BYTES:
                raise DamagedFileError(
                    f"{self.path}: its pickle has {self._length} bytes; no checkpoint's has more "
                    f"than {MAX_PICKLE_BYTES}."
                )
            return load_inert(self.file.read(self._start, self._length), source=str(self.path))
        data = self._content(self._entries[f"{self._prefix}data.pkl"], limit=MAX_PICKLE_BYTES)
        return load_inert(data, source=str(self.path))

    def _content(self, entry: zipfile.ZipInfo, *, limit: int) -> bytes:
        stretch = self._stretch(entry)
        if stretch.num_bytes > limit:
            raise DamagedFileError(
                f"{self.path}: {entry.filename} has {stretch.num_bytes} bytes; {limit} at most are "
                "expected."
            )
        return self.file.read(stretch.offset, stretch.num_bytes)

    def storage(self, key: str) -> Stretch:
        """Return the location of a storage.

        Raises:
            DamagedFileError: there is none of that name, or it lies outside the file.
        """
        entry = self._entries.get(f"{self._prefix}data/{key}")
        if entry is None:
            raise DamagedFileError(
                f"{self.path} has no storage {key[:40]!r}, which its pickle refers to: copy the "
                "file again."
            )
        return self._stretch(entry)

    def _stretch(self, entry: zipfile.ZipInfo) -> Stretch:
        # Compressed entries would need memory that the size of the file does not bound (zip bombs).
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise DamagedFileError(
                f"{self.path}: {entry.filename} is compressed, which torch.save never does."
            )
        at = self._start + entry.header_offset
        end = self._start + self._length
        if entry.header_offset < 0 or at + _LOCAL_HEADER.size > end:
            raise DamagedFileError(
                f"{self.path}: {entry.filename} lies outside the file: it is truncated; copy it "
                "again."
            )
        # torch aligns storages with padding in the local header's extra field. Its length is stated
        # only here, and not in the directory at the end of the zip.
        magic, *_, name_length, extra_length = _LOCAL_HEADER.unpack(
            self.file.read(at, _LOCAL_HEADER.size)
        )
        offset = at + _LOCAL_HEADER.size + name_length + extra_length
        if magic != b"PK\x03\x04" or offset + entry.file_size > end:
            raise DamagedFileError(
                f"{self.path}: {entry.filename} lies outside the file: it is truncated; copy it "
                "again."
            )
        return Stretch(file=self.file, offset=offset, num_bytes=entry.file_size)

    def close(self) -> None:
        """Close the file; views on it open it again."""
        self.file.close()


class _Sink(io.RawIOBase):
    """A stream without positions, so that zipfile never returns to an entry it has written."""

    def __init__(self, put: Callable[[bytes | memoryview], object]) -> None:
        self._put = put

    def writable(self) -> bool:
        return True

    def write(self, data: "ReadableBuffer") -> int:
        view = memoryview(data)
        self._put(view)
        return len(view)


def write_archive(
    put: Callable[[bytes | memoryview], object],
    pickle: bytes,
    storages: Mapping[str, Iterable[memoryview]],
) -> None:
    """Write a file of ``torch.save``, which torch.load reads with ``weights_only``.

    Args:
        put: takes the next bytes of the file.
        pickle: value of the file, as ``dump_inert`` returns it.
        storages: blocks of bytes by the keys of the storages.
    """
    with zipfile.ZipFile(_Sink(put), "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickle)
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), b"little")
        for key, blocks in storages.items():
            # The size is not known before the last block.
            with archive.open(
                zipfile.ZipInfo(f"archive/data/{key}"), "w", force_zip64=True
            ) as entry:
                for block in blocks:
                    entry.write(block)
        archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")
