"""Tokenizers that are trained here, and one that is loaded."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import ArithmeticSource, TokenizerConfig
from temper_trainer.data.arithmetic import generate_arithmetic_rows
from temper_trainer.data.rows import DataError
from temper_trainer.data.tokenizer import build_tokenizer, load_or_train
from temper_trainer.data.trained_tokenizer import check_round_trip

TEXTS = ["Tom has 12 apples.\n", "12-3=9\n#### 9", "Zoé’s naïve_plan costs $4½ — 日本!"]


def build(
    config: TokenizerConfig, directory: Path, texts: list[str] = TEXTS
) -> PreTrainedTokenizerBase:
    return build_tokenizer(config, model_path=None, texts=texts, directory=directory)


@pytest.mark.parametrize(
    "config", [TokenizerConfig(kind="word_level"), TokenizerConfig(kind="bpe", vocab_size=300)]
)
def test_saved_tokenizer_loads_and_decodes_every_text(
    config: TokenizerConfig, tmp_path: Path
) -> None:
    made = build(config, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)
    for text in TEXTS:
        ids = made(text)["input_ids"]
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == text


@pytest.mark.parametrize(
    "config",
    [TokenizerConfig(kind="word_level"), TokenizerConfig(kind="bpe", vocab_size=270)],
    ids=lambda config: config.kind,
)
def test_tokenizer_next_to_an_exported_model_gives_the_same_ids(
    config: TokenizerConfig, tmp_path: Path
) -> None:
    text = "Tom has 3 apples and buys 4 more. #### 7"
    trained = build_tokenizer(config, model_path=None, texts=[text], directory=tmp_path)
    # With this file next to it, AutoTokenizer returns a Qwen2 tokenizer with its own rules.
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    loaded = load_or_train(TokenizerConfig(kind="pretrained"), model_path=str(tmp_path), texts=())
    assert loaded(text)["input_ids"] == trained(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token_id, loaded.pad_token_id) == (trained.eos_token_id, 0)


def test_word_level_splits_words_with_their_space_and_single_digits(tmp_path: Path) -> None:
    tokenizer = build(TokenizerConfig(kind="word_level"), tmp_path)
    ids = tokenizer("Tom has 12 apples.\n#### 9")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "Tom",
        " has",
        " ",
        "1",
        "2",
        " apples",
        ".",
        "\n",
        "####",
        " ",
        "9",
    ]


def test_word_level_encodes_new_words_as_unknown(tmp_path: Path) -> None:
    tokenizer = build(TokenizerConfig(kind="word_level"), tmp_path)
    assert tokenizer.unk_token_id in tokenizer("Tom has pears")["input_ids"]


def test_bpe_keeps_its_size_and_never_merges_digits(tmp_path: Path) -> None:
    tokenizer = build(
        TokenizerConfig(kind="bpe", vocab_size=280), tmp_path, ["1212 1212 1212 abab abab"] * 9
    )
    assert len(tokenizer) <= 280
    assert tokenizer.convert_ids_to_tokens(tokenizer("1212")["input_ids"]) == ["1", "2", "1", "2"]
    assert len(tokenizer("abab")["input_ids"]) < 4


@given(text=st.text())
def test_bpe_decodes_any_text_unchanged(text: str, bpe: PreTrainedTokenizerBase) -> None:
    assert bpe.decode(bpe(text)["input_ids"]) == text


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return build(TokenizerConfig(kind="bpe", vocab_size=300), tmp_path_factory.mktemp("bpe"))


def test_arithmetic_problems_need_few_words_and_no_unknown_token(tmp_path: Path) -> None:
    rows = generate_arithmetic_rows(ArithmeticSource(max_rows=3000))
    tokenizer = build(
        TokenizerConfig(kind="word_level"), tmp_path, [text for row in rows for text in row.texts]
    )
    test_rows = generate_arithmetic_rows(ArithmeticSource(max_rows=300, split="test"))
    assert len(tokenizer) < 100
    encoded = tokenizer([text for row in test_rows for text in row.texts])["input_ids"]
    assert not any(tokenizer.unk_token_id in ids for ids in encoded)


def test_text_that_would_change_is_refused() -> None:
    lossy = Tokenizer(models.WordLevel({"tom": 0, "<unk>": 1}, unk_token="<unk>"))
    lossy.normalizer = normalizers.Lowercase()
    check_round_trip(lossy, ["tom"])
    with pytest.raises(DataError, match="'Tom' comes back as 'tom'"):
        check_round_trip(lossy, ["tom", "Tom"])


def test_text_with_a_special_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains one of the special tokens"):
        build(TokenizerConfig(kind="word_level"), tmp_path, ["it would end <eos> here"])


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (TokenizerConfig(), "neither tokenizer.path nor the actor's model.path is set"),
        (TokenizerConfig(path="absent"), "no tokenizer can be loaded from 'absent'"),
    ],
)
def test_impossible_tokenizer_settings_are_refused(
    config: TokenizerConfig, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build(config, tmp_path)


@pytest.mark.parametrize("config", ["{}", '{"tokenizer_class": "PreTrainedTokenizerFast"}'])
@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {}}', '{"added_tokens": []}'])
def test_damaged_tokenizer_file_is_named(tmp_path: Path, content: str, config: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match="copy or download the tokenizer's files again") as caught:
        build(TokenizerConfig(path=str(tmp_path)), tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_damaged_tokenizer_config_is_named(tmp_path: Path) -> None:
    build(TokenizerConfig(kind="word_level"), tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(file.read_text()[:-20])
    with pytest.raises(ConfigError, match="copy or download the tokenizer's files again") as caught:
        load_or_train(TokenizerConfig(path=str(tmp_path)), model_path=None, texts=())
    assert f"{file} is not JSON" in str(caught.value)


@pytest.mark.parametrize("content", ["[]", '"text"'])
def test_tokenizer_settings_that_are_no_object_are_named(tmp_path: Path, content: str) -> None:
    build(TokenizerConfig(kind="word_level"), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match="copy or download the tokenizer's files again") as caught:
        load_or_train(TokenizerConfig(path=str(tmp_path)), model_path=None, texts=())
    assert f"{tmp_path}/tokenizer_config.json is a " in str(caught.value)


@pytest.mark.parametrize("value", ['"320"', "-1"])
def test_invalid_config_of_the_model_of_a_tokenizer_is_named(tmp_path: Path, value: str) -> None:
    build(TokenizerConfig(kind="word_level"), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    layers = '"layer_types": ["full_attention"]'
    config = f'{{"model_type": "qwen2", "num_hidden_layers": {value}, {layers}}}'
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="num_hidden_layers") as caught:
        load_or_train(TokenizerConfig(path=str(tmp_path)), model_path=None, texts=())
    assert f"no tokenizer can be loaded from '{tmp_path}': " in str(caught.value)


def test_training_a_tokenizer_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="learns from the training texts"):
        build(TokenizerConfig(kind="word_level"), tmp_path, [])


def test_bpe_with_fewer_entries_than_bytes_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"vocab_size of TokenizerConfig is 258, but must be at least 259"
    ):
        TokenizerConfig(kind="bpe", vocab_size=258)
