"""Prompts that are read from disk and tokenized on access, for `data.streaming`.

A run starts at once, even with many rows. Prompts and their order are the same as when all rows are
loaded at the start.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from temper_trainer.config.data import DataConfig, DatasetsSource, FileSource, RecordSource
from temper_trainer.data.prompts import encode_prompts
from temper_trainer.data.rows import DataError, Row, build_row
from temper_trainer.data.sources import load_dataset, make_unreadable_error, parse_json_line
from temper_trainer.types import Prompt

_CHUNK_BYTES = 1 << 24
_NUM_CHECKED_ROWS = 100
"""Number of first rows that `map_prompts` reads to find chat messages to check tools with."""


def map_prompts(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> "MappedPrompts":
    """Return the prompts of ``data.train``, to be tokenized on access.

    Raises:
        DataError: See `MappedPrompts`.
        ConfigError: If data.tools_path has no effect.
    """
    assert isinstance(data.train, RecordSource)

    def encode(row: Row) -> Prompt:
        (prompt,), _ = encode_prompts([row], tokenizer, data, must_use_tools=False)
        return prompt

    prompts = MappedPrompts(data.train, encode)
    if data.tools_path is not None:
        rows = [prompts.read_row(i) for i in range(min(len(prompts), _NUM_CHECKED_ROWS))]
        # Do not complain if none of these has chat messages: later rows may have some.
        if len(rows) == len(prompts) or any(not isinstance(row.prompt, str) for row in rows):
            encode_prompts(rows, tokenizer, data)
    return prompts


class MappedLines:
    """Lines of a local file, read on access. Keeps 12 bytes per line in memory (its position)."""

    def __init__(self, path: str) -> None:
        """Find the lines.

        Raises:
            DataError: If the file cannot be read.
        """
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            self._state = self._read_state()
            self._starts, unusual = _find_lines(self._descriptor)
        except OSError as error:
            raise make_unreadable_error(path, error) from error
        blank = [line for line in unusual if self._is_blank(line)]
        self._lines = np.delete(np.arange(len(self._starts) - 1, dtype=np.uint32), blank)
        """Lines that are not blank."""

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, index: int) -> tuple[str, object]:
        """Return file and line, and the record.

        Raises:
            DataError: If the line is not a JSON object, or the file has changed.
        """
        line = int(self._lines[index])
        return parse_json_line(self._read_line(line), path=self._path, number=line + 1)

    def _read_line(self, line: int) -> bytes:
        start, end = (int(position) for position in self._starts[line : line + 2])
        try:
            # Do not use mmap: reading it after the file was truncated kills the process.
            data = os.pread(self._descriptor, end - start, start)
            has_changed = self._read_state() != self._state
        except OSError as error:
            raise make_unreadable_error(self._path, error) from error
        if has_changed:
            raise DataError(
                f"{self._path} has changed since the run started: restore it and resume the run "
                "from its last checkpoint."
            )
        return data

    def _read_state(self) -> tuple[int, int]:
        """Return size and time of the last change."""
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _is_blank(self, line: int) -> bool:
        # Decode first: loading strips Unicode spaces, too, which bytes.strip() does not.
        return not self._read_line(line).decode("utf-8-sig", errors="replace").strip()


class MappedPrompts(Sequence[Prompt]):
    """Prompts of a source, indexed by row."""

    def __init__(self, source: RecordSource, encode: Callable[[Row], Prompt]) -> None:
        """Find the rows without reading them.

        Args:
            source: Local JSON lines, or a data set.
            encode: Tokenizes a row.

        Raises:
            DataError: If a file cannot be read, or there is no row.
        """
        self.reward = source.reward or ""
        """Name of the reward of all prompts."""
        self._source = source
        self._encode = encode
        self._files: list[MappedLines] = []
        if isinstance(source, DatasetsSource):
            self._dataset = load_dataset(source)
            num_rows = len(self._dataset)
        else:
            assert isinstance(source, FileSource)
            self._files = [MappedLines(path) for path in source.paths]
            num_rows = sum(map(len, self._files))
        self._num_rows = num_rows if source.max_rows is None else min(num_rows, source.max_rows)
        if not self._num_rows:
            raise DataError(f"the data set {source.location} has no rows: give one that has some.")

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._encode(self.read_row(range(len(self))[index]))

    def read_row(self, row_id: int) -> Row:
        """Return a row before it is tokenized.

        Raises:
            DataError: If the row is invalid, for example without a prompt.
        """
        location, record = self._read(row_id)
        return build_row(record, config=self._source, row_id=row_id, location=location)

    def _read(self, row_id: int) -> tuple[str, object]:
        """Return location and record of a row."""
        if isinstance(self._source, DatasetsSource):
            return f"{self._source.location} row {row_id}", self._dataset[row_id]
        for file in self._files:
            if row_id < len(file):
                return file.read(row_id)
            row_id -= len(file)
        raise IndexError(row_id)


def _find_lines(descriptor: int) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return the start of each line and the end of the file, and the lines that may be blank.

    A line may be blank if it does not start with "{".
    """
    starts = [np.empty(0, dtype=np.int64)]
    unusual: list[int] = []
    position, num_lines, ends_line = 0, 0, True
    with open(descriptor, "rb", closefd=False) as file:
        while chunk := file.read(_CHUNK_BYTES):
            data = np.frombuffer(chunk, dtype=np.uint8)
            newlines = data == ord("\n")
            line_starts = np.flatnonzero(newlines[:-1]) + 1
            # A line also starts at the first byte if the previous chunk ends with a line.
            line_starts = np.insert(line_starts, 0, 0) if ends_line else line_starts
            unusual += (np.flatnonzero(data[line_starts] != ord("{")) + num_lines).tolist()
            starts.append(line_starts + position)
            position, num_lines = position + len(chunk), num_lines + len(line_starts)
            ends_line = bool(newlines[-1])
    return np.concatenate([*starts, [position]]), unusual
