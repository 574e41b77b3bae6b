"""Tests of reading rows from files, and of the errors for invalid files."""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pytest
from pyarrow import parquet

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import (
    ArithmeticSource,
    DatasetsSource,
    JsonlSource,
    ParquetSource,
    PreferenceKind,
)
from temper_trainer.data.rows import ChatMessage, DataError
from temper_trainer.data.sources import load_preferences, load_rows

PROBLEMS = [
    {"question": "1 + 1?", "answer": "1+1=2\n#### 2"},
    {"question": "2 + 3?", "answer": "2+3=5\n#### 5"},
]


def write_lines(path: Path, *lines: str) -> JsonlSource:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return JsonlSource(paths=(str(path),))


def test_jsonl_and_parquet_of_the_same_problems_give_the_same_rows(tmp_path: Path) -> None:
    jsonl = write_lines(tmp_path / "a.jsonl", *(json.dumps(problem) for problem in PROBLEMS))
    parquet.write_table(pa.Table.from_pylist(PROBLEMS), tmp_path / "a.parquet")
    columnar = ParquetSource(paths=(str(tmp_path / "a.parquet"),))
    texts = [(row.row_id, row.prompt, row.answer, row.solution) for row in load_rows(jsonl)]
    assert texts == [
        (row.row_id, row.prompt, row.answer, row.solution) for row in load_rows(columnar)
    ]
    assert texts[1] == (1, "2 + 3?", "2+3=5\n#### 5", "2+3=5\n#### 5")


def test_hugging_face_datasets_of_the_same_problems_give_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra temper-trainer[datasets]")
    datasets.disable_progress_bars()
    saved = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_list(PROBLEMS),
            "test": datasets.Dataset.from_list(PROBLEMS[1:]),
        }
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    train = load_rows(DatasetsSource(path="saved"), base_dir=tmp_path)
    test = load_rows(DatasetsSource(path="saved", split="test"), base_dir=tmp_path)
    assert [row.prompt for row in train] == ["1 + 1?", "2 + 3?"]
    assert [(row.row_id, row.prompt) for row in test] == [(0, "2 + 3?")]
    with pytest.raises(DataError, match="split 'dev'"):
        load_rows(DatasetsSource(path="saved", split="dev"), base_dir=tmp_path)


def test_rows_are_numbered_over_all_files_up_to_max_rows(tmp_path: Path) -> None:
    for name in "ab":
        write_lines(tmp_path / name, *(json.dumps(problem) for problem in PROBLEMS))
    rows = load_rows(JsonlSource(paths=("a", "b"), max_rows=3), base_dir=tmp_path)
    assert [(row.row_id, row.prompt) for row in rows] == [
        (0, "1 + 1?"),
        (1, "2 + 3?"),
        (2, "1 + 1?"),
    ]
    assert rows[2].location == f"{tmp_path / 'b'}:1"


def test_file_system_url_is_passed_on_unchanged(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", json.dumps(PROBLEMS[0]))
    (row,) = load_rows(
        JsonlSource(paths=(f"file://{tmp_path}/a.jsonl",)), base_dir=Path("elsewhere")
    )
    assert row.prompt == "1 + 1?"


def test_chat_messages_become_a_tuple(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    source = write_lines(tmp_path / "a.jsonl", json.dumps({"question": messages, "answer": "2"}))
    (row,) = load_rows(source)
    assert row.prompt == (
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="1 + 1?"),
    )
    assert row.texts == ("Be brief.", "1 + 1?", "2", "2")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": "1 + 1?"', "not a JSON object"),
        ("[" * 2000, "not a JSON object"),
        (r'{"question": "\ud83d", "answer": "1"}', "half of a surrogate pair"),
        ('["1 + 1?", "2"]', 'write each row as an object, as in {"question": '),
        ('{"question": "1 + 1?"}', "no field 'answer' among"),
        ('{"question": "1 + 1?", "answer": 2.5}', "must be text or an integer, but is float 2.5"),
        ('{"question": "1 + 1?", "answer": null}', "must be text or an integer, but is NoneType"),
        ('{"question": "1 + 1?", "answer": true}', "must be text or an integer, but is bool True"),
        (
            '{"question": 7, "answer": "2"}',
            "must be text or a list of chat messages, but is int 7: write it as text, or name",
        ),
        ('{"question": "  ", "answer": "2"}', "is empty"),
        ('{"question": [], "answer": "2"}', "empty list"),
        ('{"question": [{"role": "user"}], "answer": "2"}', "message 0 must have role and content"),
    ],
)
def test_malformed_row_is_named_with_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    source = write_lines(tmp_path / "a.jsonl", json.dumps(PROBLEMS[0]), "", line)
    with pytest.raises(DataError, match=complaint) as caught:
        load_rows(source)
    assert f"{tmp_path / 'a.jsonl'}:3: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("a.csv", "question,answer", "Convert the table"),
        ("a.json", "[", "write each row on its own line"),
        ("a.jsonl", "{", "write each row on its own line"),
    ],
)
def test_file_of_another_format_is_refused_with_what_to_do(
    tmp_path: Path, name: str, content: str, remedy: str
) -> None:
    with pytest.raises(DataError, match=remedy):
        load_rows(write_lines(tmp_path / name, content))


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (gzip.compress(b"{}"), "is compressed with gzip: decompress it"),
        (b"PAR1\x15\x04\x15\xff", "is a parquet file: set data.train=parquet"),
        ("{}".encode("utf-16"), "Convert it with iconv -f UTF-16 -t UTF-8"),
        ("é".encode("latin-1"), "Convert it to UTF-8, for example with iconv -f LATIN1 -t UTF-8"),
    ],
)
def test_file_that_is_not_utf_8_is_refused_with_what_to_do(
    tmp_path: Path, content: bytes, remedy: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=f"a.jsonl is not UTF-8 text.*{remedy}"):
        load_rows(JsonlSource(paths=("a.jsonl",)), base_dir=tmp_path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    for source, name, complaint in (
        (JsonlSource, "absent", "cannot be read"),
        (ParquetSource, "absent", "cannot be read"),
        (JsonlSource, "picture", "not UTF-8"),
        (ParquetSource, "picture", "not a readable parquet file"),
    ):
        with pytest.raises(DataError, match=complaint) as caught:
            load_rows(source(paths=(name,)), base_dir=tmp_path)
        assert str(tmp_path / name) in str(caught.value)


def test_parquet_file_without_the_columns_lists_its_columns(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"problem": ["1 + 1?"], "answer": ["2"]}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError,
        match="expected columns 'question' and 'answer', but it has \\['problem', 'answer'\\]",
    ):
        load_rows(ParquetSource(paths=("a.parquet",)), base_dir=tmp_path)


def test_empty_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows"):
        load_rows(write_lines(tmp_path / "a.jsonl", ""))


@pytest.mark.parametrize("kind", get_args(PreferenceKind))
def test_generated_problems_are_no_preferences(kind: PreferenceKind) -> None:
    with pytest.raises(ConfigError, match="arithmetic yields one answer per prompt"):
        load_preferences(ArithmeticSource(max_rows=1), kind=kind)


def test_missing_datasets_library_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError,
        match=(
            r"needs the Hugging Face datasets library: run pip install "
            r"'\./packages/trainer\[datasets\]' in a clone of Temper"
        ),
    ):
        load_rows(DatasetsSource(path="any"))


def test_nested_fields_are_found_in_jsonl_and_parquet(tmp_path: Path) -> None:
    record = {
        "prompt": "1 + 1?",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "data_source": "sums",
        "extra_info": {"index": 7},
    }
    write_lines(tmp_path / "a.jsonl", json.dumps(record))
    parquet.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    for read in (JsonlSource, ParquetSource):
        source = read(
            paths=(str(tmp_path / f"a.{read.name}"),),
            prompt_key="prompt",
            answer_key="reward_model.ground_truth",
            extra_keys=("data_source", "extra_info.index", "nothing"),
        )
        (row,) = load_rows(source)
        assert row.answer == "2"
        assert row.extra == {"data_source": "sums", "extra_info.index": 7, "nothing": None}


def test_field_with_a_dot_in_its_name_takes_precedence_over_a_nested_field(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "a.jsonl", json.dumps({"question": "1?", "a.b": "named", "a": {"b": "within"}})
    )
    (row,) = load_rows(replace(source, answer_key="a.b"))
    assert row.answer == "named"


def test_integer_answer_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "3 + 4?", "answer": 7}\n')
    (row,) = load_rows(JsonlSource(paths=(str(path),)))
    assert (row.answer, row.solution) == ("7", "7")


def test_byte_order_mark_at_the_start_of_a_file_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "3 + 4?", "answer": "7"}\n')
    (row,) = load_rows(JsonlSource(paths=(str(path),)))
    assert row.prompt == "3 + 4?"
