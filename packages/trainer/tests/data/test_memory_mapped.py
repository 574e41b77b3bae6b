"""Prompts that are read when they are used: the same as those of a run that loads all rows."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import DataConfig, DatasetsSource, JsonlSource, RecordSource
from temper_trainer.data.memory_mapped import MappedPrompts, map_prompts
from temper_trainer.data.prompts import encode_prompts
from temper_trainer.data.rows import DataError
from temper_trainer.data.sources import load_rows
from temper_trainer.data.streams import InMemoryStream
from temper_trainer.types import DataCursor

RECORDS = [{"question": f"{i} plus one", "answer": str(i + 1), "level": i} for i in range(7)]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["<unk>", "plus", "one", *map(str, range(7))])}
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")


def assert_equal_to_loaded(source: RecordSource, tokenizer: PreTrainedTokenizerFast) -> None:
    data = DataConfig(train=source, streaming=True)
    loaded, _ = encode_prompts(load_rows(source), tokenizer, data)
    mapped = map_prompts(data, tokenizer)
    assert list(mapped) == loaded
    assert [each.extra for each in mapped] == [each.extra for each in loaded]
    assert (mapped[-1], mapped[1:3]) == (loaded[-1], loaded[1:3])
    streams = [InMemoryStream(each, seed=3, shuffle=True) for each in (mapped, loaded)]
    assert streams[0].take(10) == streams[1].take(10)
    assert streams[0].cursor == DataCursor(epoch=10 // len(loaded), index=10 % len(loaded))


def test_mapped_prompts_of_files_are_those_of_loaded_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    lines = [json.dumps(each) for each in RECORDS]
    # A byte order mark, blank lines, the ends of lines of Windows, and none at the end of the file.
    (tmp_path / "a.jsonl").write_bytes(
        "\ufeff".encode() + "\r\n".join([*lines[:3], "", ""]).encode()
    )
    blank = [" " * 3, "\t", "\u00a0", " " * 99, ""]
    (tmp_path / "b.jsonl").write_text("\n".join(["", lines[3], *blank, *lines[4:]]))
    (tmp_path / "empty.jsonl").write_text("")
    paths = tuple(str(tmp_path / name) for name in ("a.jsonl", "empty.jsonl", "b.jsonl"))
    source = JsonlSource(paths=paths, extra_keys=("level",))
    assert_equal_to_loaded(source, tokenizer)
    assert_equal_to_loaded(replace(source, max_rows=4), tokenizer)


def test_mapped_prompts_of_a_data_set_are_those_of_loaded_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "saved"))
    assert_equal_to_loaded(DatasetsSource(path=str(tmp_path / "saved")), tokenizer)


def map_text(path: Path, text: str, tokenizer: PreTrainedTokenizerFast) -> MappedPrompts:
    path.write_text(text)
    return map_prompts(
        DataConfig(train=JsonlSource(paths=(str(path),)), max_prompt_tokens=3), tokenizer
    )


def test_wrong_row_is_named_when_it_is_used(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    good = json.dumps(RECORDS[0])
    lines = [good, "", "{no json", '{"answer": "1"}', '{"question": "1 2 3 4", "answer": ""}']
    prompts = map_text(tmp_path / "a.jsonl", "\n".join(lines), tokenizer)
    assert prompts[0].location.endswith("a.jsonl:1")
    with pytest.raises(DataError, match=r"a\.jsonl:3: not a JSON object"):
        prompts[1]
    with pytest.raises(DataError, match=r"a\.jsonl:4: there is no field 'question'"):
        prompts[2]
    with pytest.raises(DataError, match=r"a\.jsonl:5: the prompt has 4 tokens"):
        prompts[3]
    with pytest.raises(IndexError):
        prompts[4]


def test_file_that_was_truncated_during_the_run_is_an_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "a.jsonl"
    text = "\n".join(map(json.dumps, RECORDS * 200))
    prompts = map_text(path, text, tokenizer)
    path.write_text("")
    with pytest.raises(DataError, match=r"a\.jsonl has changed since the run started"):
        prompts[-1]


def test_short_lines_are_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = map_text(tmp_path / "a.jsonl", "1\n{}", tokenizer)
    assert len(prompts) == 2
    with pytest.raises(DataError, match=r"a\.jsonl:2: there is no field 'question'"):
        prompts[1]


def test_string_prompts_may_be_mapped_next_to_chat_messages_with_tools(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    chat = {"question": [{"role": "user", "content": "1 plus one"}], "answer": "2"}
    path, tools = tmp_path / "a.jsonl", tmp_path / "tools.yaml"
    path.write_text("\n".join(json.dumps(each) for each in [*RECORDS, chat]))
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "plus"}}]))
    tokenizer.chat_template = "{{ 'plus ' if tools }}{{ messages[0].content }}"
    data = DataConfig(train=JsonlSource(paths=(str(path),)), tools_path=str(tools))
    loaded, _ = encode_prompts(load_rows(data.train), tokenizer, data)
    assert list(map_prompts(data, tokenizer)) == loaded
    path.write_text("\n".join(json.dumps(each) for each in RECORDS))
    with pytest.raises(ConfigError, match="tools_path has no effect"):
        map_prompts(data, tokenizer)


def test_file_without_rows_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="has no rows"):
        map_text(tmp_path / "a.jsonl", "\n\n", tokenizer)
    with pytest.raises(DataError, match="cannot be read"):
        map_prompts(DataConfig(train=JsonlSource(paths=(str(tmp_path / "no"),))), tokenizer)
