"""Read rows from files or the Hugging Face ``datasets`` library, or generate them.

fsspec, pyarrow and datasets are imported where a kind of source needs them, because they take up to
half as long as the rest of ``temper-train --check``.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from temper_engine_api.errors import ConfigError, format_install
from temper_trainer.config.data import (
    ArithmeticSource,
    DatasetsSource,
    DataSource,
    FileSource,
    ParquetSource,
    PreferenceKind,
    RecordSource,
)
from temper_trainer.data.arithmetic import generate_arithmetic_rows
from temper_trainer.data.loss_weights import describe_missing_weights, read_loss_weights
from temper_trainer.data.rows import (
    DataError,
    PreferenceRow,
    Row,
    build_labeled_row,
    build_pair,
    build_row,
    describe_missing_label,
    parse_number,
)

if TYPE_CHECKING:
    from datasets import Dataset

_PARQUET_BATCH = 4096


def load_rows(source: DataSource, *, base_dir: Path | None = None) -> list[Row]:
    """Return all rows from a source, validated, in file order.

    Args:
        source: Files, fields and number of rows.
        base_dir: Base of relative local paths; None is the working directory.

    Raises:
        DataError: If a file is missing, malformed or empty, or a row is invalid. The message names
            its line.
        ConfigError: If the ``datasets`` library is needed but not installed.
    """
    rows = list(iterate_rows(source, base_dir=base_dir))
    if not rows:
        raise DataError(
            f"the data set {source.location} has no rows (max_rows is {source.max_rows}): give a "
            "file that has some."
        )
    if problem := describe_missing_weights(rows, config=source):
        raise DataError(problem)
    return rows


def iterate_rows(source: DataSource, *, base_dir: Path | None = None) -> Iterator[Row]:
    """Yield the rows of a source one at a time, reading files lazily; see ``load_rows``."""
    if isinstance(source, ArithmeticSource):
        yield from generate_arithmetic_rows(source)
        return
    assert isinstance(source, RecordSource)
    fields: tuple[str, ...] = (
        (source.prompt_key, source.answer_key)
        if source.messages_key is None
        else (source.messages_key,)
    )
    fields += tuple(
        key
        for key in (
            source.route_key,
            source.category_key,
            source.reward_key,
            source.teacher_prompt_key,
            source.completion_key,
            source.difficulty_key,
            # In a conversation the weight is a field in each message, not in the row.
            source.loss_weight_key if source.messages_key is None else None,
        )
        if key is not None
    )
    # Numbered over all files, so that an id names one row of the source in every epoch.
    for i, (location, record) in enumerate(
        iterate_records(source, fields=fields, base_dir=base_dir)
    ):
        row = build_row(record, config=source, row_id=i, location=location)
        if source.loss_weight_key is not None:
            weights = read_loss_weights(record, config=source, location=location)
            row = replace(row, loss_weights=weights)
        if (key := source.difficulty_key) is not None:
            difficulty = parse_number(record, key=key, setting="difficulty_key", location=location)
            row = replace(row, difficulty=difficulty)
        yield row


def load_preferences(source: DataSource, *, kind: PreferenceKind) -> list[PreferenceRow]:
    """Return every preference pair of a source, or every labeled completion.

    Raises:
        DataError: If a record lacks a field, a completion is empty, or all labels are equal.
        ConfigError: If the source generates its rows: these have answers, but no preferences.
    """
    if not isinstance(source, RecordSource):
        raise ConfigError(
            f"the generator {source.name} yields one answer per prompt, but no preferences: use "
            "files."
        )
    rows = list(iterate_preferences(source, kind=kind))
    if problem := describe_missing_label(rows, config=source):
        raise DataError(problem)
    return rows


def iterate_preferences(source: RecordSource, *, kind: PreferenceKind) -> Iterator[PreferenceRow]:
    """Yield the preferences of a source one at a time; see `load_preferences`."""
    fields = {
        "pairs": (
            source.prompt_key,
            source.chosen_key,
            source.rejected_key,
            *(() if source.margin_key is None else (source.margin_key,)),
        ),
        "labels": (source.prompt_key, source.answer_key, source.label_key),
    }[kind]
    for i, (location, record) in enumerate(iterate_records(source, fields=fields)):
        if kind == "pairs":
            yield build_pair(record, config=source, row_id=i, location=location)
        else:
            yield build_labeled_row(record, config=source, row_id=i, location=location)


def iterate_records(
    source: RecordSource, *, fields: tuple[str, ...], base_dir: Path | None = None
) -> Iterator[tuple[str, object]]:
    """Yield (location, raw record) from a source of files or datasets, at most max_rows.

    Args:
        source: Files and number of rows.
        fields: Fields that a record must have; of a parquet file only these columns are read.
        base_dir: See load_rows.
    """
    located: Iterator[tuple[str, object]]
    if isinstance(source, DatasetsSource):
        located = _datasets_records(source, base_dir)
    else:
        assert isinstance(source, FileSource)
        paths = (_resolve_path(path, base_dir) for path in source.paths)
        read = (
            functools.partial(_parquet_records, fields=fields, extra_keys=source.extra_keys)
            if isinstance(source, ParquetSource)
            else _jsonl_records
        )
        located = itertools.chain.from_iterable(map(read, paths))
    # Lazy, so that no file after the limit is opened.
    return itertools.islice(located, source.max_rows)


def count_rows(source: FileSource, *, limit: int) -> int:
    """Return the number of rows in local files, at most `limit` and max_rows, without parsing them.

    The first rows of these files have been read before, so an error is not explained here.
    """
    limit = limit if source.max_rows is None else min(limit, source.max_rows)
    if isinstance(source, ParquetSource):
        from pyarrow import parquet

        num_rows: int = sum(parquet.read_metadata(path).num_rows for path in source.paths)
        return min(limit, num_rows)
    num_rows = 0
    for path in source.paths:
        with open(path, "rb") as lines:
            rows = (line for line in lines if line.strip())
            num_rows += sum(1 for _ in itertools.islice(rows, limit - num_rows))
    return num_rows


def _resolve_path(path: str, base_dir: Path | None) -> str:
    """Return a URL or absolute path unchanged, else the path below base_dir."""
    # fsspec chains URLs with "::", as in zip://rows.jsonl::https://host/a.zip.
    if base_dir is None or "://" in path or "::" in path:
        return path
    return str(base_dir / path)


_GZIP = "it is compressed with gzip: decompress it."
_PARQUET = "it is a parquet file: set data.train=parquet, or the source of these data."
_UTF_16 = "expected JSON lines. Convert it with iconv -f UTF-16 -t UTF-8."
_REMEDIES = {b"\x1f\x8b": _GZIP, b"PAR1": _PARQUET, b"\xff\xfe": _UTF_16, b"\xfe\xff": _UTF_16}
"""Remedy for a file that is not text, by its first bytes."""


def _suggest_remedy(path: str, line: str) -> str:
    """Return what to do about a line that is no JSON object."""
    if path.endswith((".csv", ".tsv")):
        return "Convert the table: pandas has to_json(PATH, orient='records', lines=True)."
    if line.strip() in ("[", "{"):
        return "One JSON document over several lines must be split: write each row on its own line."
    return "Correct or remove the line."


def _jsonl_records(path: str) -> Iterator[tuple[str, object]]:
    """Yield (file:line, record) for every line that is not blank."""
    import fsspec

    try:
        # utf-8-sig skips the byte order mark that programs on Windows put at the start.
        with fsspec.open(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield parse_json_line(line, path=path, number=number)
    except UnicodeDecodeError as error:
        raise _make_encoding_error(path, error) from error
    except OSError as error:
        raise make_unreadable_error(path, error) from error


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape sequence of one half of a character. Each half alone is valid JSON, but cannot be encoded
as UTF-8, so that no tokenizer takes it."""


def parse_json_line(line: str | bytes, *, path: str, number: int) -> tuple[str, object]:
    """Return a line's file and number as `FILE:NUMBER`, and its parsed JSON.

    Raises:
        DataError: If the line is not valid JSON.
    """
    try:
        text = line if isinstance(line, str) else line.decode("utf-8-sig")
        record = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(record, ensure_ascii=False).encode()
        return f"{path}:{number}", record
    except UnicodeDecodeError as error:
        raise _make_encoding_error(path, error) from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}:{number}: has half of a surrogate pair ({error}), such as \\ud83d without the "
            "escape sequence after it: correct or remove the line."
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(
            f"{path}:{number}: not a JSON object ({error}): expected one object per line. "
            f"{_suggest_remedy(path, text)}"
        ) from error


def _make_encoding_error(path: str, error: UnicodeDecodeError) -> DataError:
    # The error has the bytes from the beginning of the file, unless a megabyte of it is text.
    remedies = (remedy for magic, remedy in _REMEDIES.items() if error.object.startswith(magic))
    default = (
        "expected JSON lines. Convert it to UTF-8, for example with iconv -f LATIN1 -t UTF-8, or "
        "decompress it."
    )
    return DataError(f"{path} is not UTF-8 text ({error}): {next(remedies, default)}")


def _parquet_records(
    path: str, *, fields: Sequence[str], extra_keys: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """Yield (file row number, record) for every row, reading only the needed columns.

    The columns of ``extra_keys`` may be absent.
    """
    import fsspec
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with fsspec.open(path, "rb") as stream:
            # Read in batches, because a decoded file may be many times larger than the file.
            table = parquet.ParquetFile(stream)
            columns = [_find_column(key, table.schema_arrow.names) for key in fields]
            if not all(columns):
                raise DataError(
                    f"{path}: expected columns {' and '.join(map(repr, fields))}, but it has "
                    f"{table.schema_arrow.names}: set the keys that name them, such as prompt_key "
                    "and answer_key."
                )
            columns += [_find_column(key, table.schema_arrow.names) for key in extra_keys]
            numbers = itertools.count()
            for batch in table.iter_batches(
                # Two nested fields may be in the same column.
                batch_size=_PARQUET_BATCH,
                columns=list(dict.fromkeys(filter(None, columns))),
            ):
                for record in batch.to_pylist():
                    yield f"{path} row {next(numbers)}", record
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    except OSError as error:
        raise make_unreadable_error(path, error) from error


def _find_column(key: str, names: Sequence[str]) -> str:
    """Return the column that contains a field, possibly nested; empty if there is none."""
    return key if key in names else next((name for name in names if key.startswith(f"{name}.")), "")


def _datasets_records(
    source: DatasetsSource, base_dir: Path | None
) -> Iterator[tuple[str, object]]:
    """Yield (name[split] row number, record) with the Hugging Face library."""
    for number, record in enumerate(load_dataset(source, base_dir=base_dir)):
        yield f"{source.location} row {number}", record


def load_dataset(source: DatasetsSource, *, base_dir: Path | None = None) -> "Dataset":
    """Load a data set with the Hugging Face library, which maps it into memory.

    A local directory may be one that save_to_disk wrote.

    Raises:
        DataError: If it cannot be loaded.
        ConfigError: If the library is not installed.
    """
    try:
        import datasets  # imported here, because it is an extra
    except ImportError as error:
        raise ConfigError(
            "a source datasets needs the Hugging Face datasets library: run "
            f"{format_install('temper-trainer[datasets]')}."
        ) from error
    name = source.path
    local = Path(_resolve_path(name, base_dir))
    try:
        # The files of save_to_disk tell whether a directory has one split or several.
        if (local / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(local))[source.split]
        if (local / "state.json").is_file():
            return datasets.load_from_disk(str(local))
        return datasets.load_dataset(str(local) if local.is_dir() else name, split=source.split)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"the data set {name!r}, split {source.split!r}, cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def make_unreadable_error(path: str, error: OSError) -> DataError:
    """Return the error of a file that cannot be read."""
    return DataError(
        f"{path} cannot be read ({type(error).__name__}: {error}): give the path of a readable "
        "file. Relative paths start at the working directory, or at the given base directory."
    )
