"""Write an output directory that is complete or absent, and resume interrupted work.

Everything is written into a hidden folder next to the output and renamed into place at the end. A
journal in it names the files that are finished, under a fingerprint of sources and options: with
other sources or options the work begins again.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType

from temper_engine_api.checksums import RunningChecksum, has_checksum
from temper_legacy_shim.checkpoints.files.hashed_files import WrittenFile, written_file
from temper_legacy_shim.errors import OutputError, VerificationError

JOURNAL = ".temper-migrate.json"


class Staging:
    """The hidden folder of one output, kept for the next run if its ``with`` ends early."""

    def __init__(self, out: Path, *, fingerprint: str) -> None:
        # A link is followed: the hidden folder must be on the same disk as the final folder.
        self.out = Path(os.path.realpath(out))
        self.folder = self.out.with_name(f".{self.out.name}.temper-partial")
        self._fingerprint = fingerprint
        self._lock: int | None = None
        self._finished: dict[str, WrittenFile] = {}

    def __enter__(self) -> "Staging":
        check_absent(self.out)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise OutputError(
                f"{self.out} can't be written ({error.strerror}): give an --out below a folder of "
                "yours."
            ) from error
        try:
            # The kernel releases this lock when the process ends, so a killed run leaves none
            # behind.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise OutputError(
                f"another temper-migrate is writing {self.out}: wait for it."
            ) from error
        self._take_up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
        if self.folder.is_dir() and (not self._finished or isinstance(error, VerificationError)):
            shutil.rmtree(self.folder)  # nothing that the next run could take up
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(
                f"the disk of {self.out} is full: free space and run the same command again; "
                "finished files are kept."
            ) from error

    @property
    def kept(self) -> frozenset[str]:
        """Paths of finished files; at first, those of the previous run."""
        return frozenset(self._finished)

    @property
    def num_kept_bytes(self) -> int:
        """Bytes of files finished by an earlier run."""
        return sum(file.num_bytes for file in self._finished.values())

    def _take_up(self) -> None:
        """Keep the finished files of the previous run, and remove the rest of the hidden folder."""
        journal = self.folder / JOURNAL
        try:
            content = json.loads(journal.read_text()) if journal.is_file() else {}
        except ValueError:
            content = {}  # cut off while it was written: nothing counts as finished
        if content.get("fingerprint") == self._fingerprint:
            for record in content["files"]:
                file = WrittenFile(**{**record, "with_nan": tuple(record["with_nan"])})
                path = self.folder / file.path
                # Also the content: files that were damaged meanwhile are written again.
                if (
                    path.is_file()
                    and path.stat().st_size == file.num_bytes
                    and has_checksum(path, file.checksum)
                ):
                    self._finished[file.path] = file
        # In reverse order a folder comes after its content, and is removed if that has gone.
        for path in sorted(self.folder.rglob("*"), reverse=True):
            relative = path.relative_to(self.folder).as_posix()
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif relative not in self._finished and relative != JOURNAL:
                path.unlink()

    def produce(self, relative: str, write: Callable[[Path], WrittenFile]) -> WrittenFile:
        """Return one file, of an earlier run or created by ``write``."""
        if relative in self._finished:
            return self._finished[relative]
        draft = self.folder / f"{relative}.draft"
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        try:
            written = write(draft)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        # The file gets its name only when it is complete, so a killed run leaves no half of it.
        os.replace(draft, self.folder / relative)
        self._finished[relative] = written
        self._write_journal()
        return written

    def produce_folder(
        self, relative: str, names: Sequence[str], write: Callable[[Path], Sequence[WrittenFile]]
    ) -> list[WrittenFile]:
        """Return the files that mean something only together.

        They are the files of the previous run, or are created by ``write`` in a draft folder.

        Args:
            relative: path of the folder in the output.
            names: of the files in it.
            write: creates a folder with these files, and returns the record of each.
        """
        paths = [f"{relative}/{name}" for name in names]
        if all(path in self._finished for path in paths):
            return [self._finished[path] for path in paths]
        draft = self.folder / f"{relative}.draft"
        for leftover in (draft, self.folder / relative):
            if leftover.is_dir():
                shutil.rmtree(leftover)
        draft.parent.mkdir(parents=True, exist_ok=True)
        try:
            written = list(write(draft))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        os.replace(draft, self.folder / relative)
        self._finished |= {file.path: file for file in written}
        self._write_journal()
        return written

    def produce_text(self, relative: str, text: str) -> WrittenFile:
        return self.produce(
            relative, lambda path: _write_bytes(path, text.encode(), relative=relative)
        )

    def produce_copy(self, relative: str, source: Path) -> WrittenFile:
        return self.produce(
            relative, lambda path: _write_bytes(path, source.read_bytes(), relative=relative)
        )

    def adopt(self, relative: str) -> WrittenFile:
        """Register a file of another writer in the hidden folder."""
        path = self.folder / relative
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        return written_file(path, relative=relative)

    def commit(self) -> None:
        """Rename into place; the journal goes."""
        (self.folder / JOURNAL).unlink(missing_ok=True)
        # The entries of folders must be on the disk before the rename. Otherwise a crash could
        # leave an output that lacks files.
        for directory in {self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())}:
            _sync(directory)
        if self.out.is_dir():
            self.out.rmdir()  # it was empty
        os.rename(self.folder, self.out)
        _sync(self.out.parent)

    def _write_journal(self) -> None:
        draft = self.folder / f"{JOURNAL}.draft"
        content = {
            "fingerprint": self._fingerprint,
            "files": [asdict(file) for file in self._finished.values()],
        }
        draft.write_text(json.dumps(content))
        os.replace(draft, self.folder / JOURNAL)


def check_absent(out: Path) -> None:
    """Check that the output is absent or an empty directory.

    Raises:
        OutputError: the output exists.
    """
    if os.path.islink(os.path.realpath(out)):
        raise OutputError(f"{out} is a link that leads nowhere: give another --out, or remove it.")
    if os.path.exists(out) and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(
            f"{out} exists already and is never overwritten: give another --out, or move it away."
        )


def fingerprint(parts: Mapping[str, object]) -> str:
    """Hash a description of the work and the version of the journal's format."""
    form = [each.name for each in fields(WrittenFile)]
    return hashlib.sha256(
        json.dumps([parts, form], sort_keys=True, default=str).encode()
    ).hexdigest()


def _write_bytes(path: Path, data: bytes, *, relative: str) -> WrittenFile:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path=relative, num_bytes=len(data), checksum=str(RunningChecksum(data)))


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_SPARE_BYTES = 64 << 20


def check_space(folder: Path, needed: int) -> None:
    """Reject output that does not fit on the disk.

    Raises:
        OutputError: too little space; the message shows the required and the free size.
    """
    free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise OutputError(
            f"{(needed + _SPARE_BYTES) / 1e6:,.0f} MB are needed ({_SPARE_BYTES / 1e6:.0f} of them "
            f"to spare), but {free / 1e6:,.0f} MB are "
            f"free at {folder}: choose another disk, or make room."
        )
