"""Loss weights of rows and of the messages of conversations."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from temper_trainer.config.data import DataConfig, JsonlSource
from temper_trainer.data.prompts import encode_demonstrations
from temper_trainer.data.rows import DataError
from temper_trainer.data.sources import load_rows
from temper_trainer.types import Demonstration

WORDS = ["<eos>", "<unk>", "U", "A", "one", "two"]
CHAT = (
    "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }} {{ m.content }} "
    "{% if m.role != 'user' %}<eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A {% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")


def source(path: Path, *records: dict[str, object], key: str | None = None) -> JsonlSource:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return JsonlSource(paths=(str(path),), loss_weight_key="weight", messages_key=key)


def encode(train: JsonlSource, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
    config = DataConfig(train=train, chat_template=CHAT)
    demonstrations, _ = encode_demonstrations(load_rows(train), tokenizer, config)
    return demonstrations


def chat(*weights: object) -> dict[str, object]:
    """Return two user messages with answers; "absent" leaves out the weight of a message."""
    texts = [("user", "one"), ("assistant", "two"), ("user", "one"), ("assistant", "two")]
    messages = [{"role": role, "content": content} for role, content in texts]
    return {
        "messages": [
            message if weight == "absent" else message | {"weight": weight}
            for message, weight in zip(messages, weights, strict=True)
        ]
    }


def test_answer_has_a_weight_per_token_or_one_for_the_row(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    records = [
        {"question": "one", "answer": "two one", "weight": [0, 0.5, 2]},
        {"question": "one", "answer": "two one", "weight": 0.25},
    ]
    by_token, by_row = encode(source(tmp_path / "rows.jsonl", *records), tokenizer)
    assert by_token.loss_weights == (0.0, 0.5, 2.0), "two words and the end token"
    assert by_row.loss_weights == (0.25, 0.25, 0.25)


def test_tokens_of_a_turn_have_the_weight_of_its_message(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    records = [chat("absent", False, None, 0.5), chat(0, "absent", "absent", "absent")]
    train = source(tmp_path / "rows.jsonl", *records, key="messages")
    weighted, with_default = encode(train, tokenizer)
    # The prompt is `U one A`, also before a turn of weight 0. Of `two <eos> U one A two <eos>`
    # after it, the mask leaves out the user's part.
    assert tokenizer.decode(weighted.prompt.tokens) == "U one A"
    assert weighted.loss_weights == (0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5)
    assert with_default.loss_weights == (1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        (-1, "weight', which loss_weight_key names, must be a finite number of at least 0"),
        ("1", "must be a finite number of at least 0, but is '1'"),
        (None, "must be a finite number of at least 0, but is None"),
        (float("nan"), "must be a finite number of at least 0, but is nan"),
        ([1, float("inf"), 1], "token 1 must be a finite number of at least 0, but is inf"),
        ([1, 1], "there are 2 loss weights, but the solution has 3 tokens with its end token"),
        ([0, 0, 0], "all loss weights are 0, so there is nothing to train: remove the row"),
        (0, "all loss weights are 0"),
    ],
)
def test_wrong_weight_is_refused_with_its_row(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, weight: object, sentence: str
) -> None:
    records = [{"question": "one", "answer": "two one", "weight": w} for w in (1, weight)]
    with pytest.raises(DataError) as caught:
        encode(source(tmp_path / "rows.jsonl", *records), tokenizer)
    assert f"{tmp_path}/rows.jsonl:2: " in str(caught.value)
    assert sentence in str(caught.value)


def test_row_without_the_field_is_refused_with_its_fields(tmp_path: Path) -> None:
    train = source(tmp_path / "rows.jsonl", {"question": "one", "answer": "two"})
    with pytest.raises(DataError, match=r"no field 'weight' among \['answer', 'question'\]"):
        load_rows(train)


def test_weight_of_a_users_message_is_refused(tmp_path: Path) -> None:
    train = source(tmp_path / "rows.jsonl", chat(1, 1, 1, 1), key="messages")
    with pytest.raises(DataError, match="message 0 is 1 for role user, but only the assistant's"):
        load_rows(train)


def test_key_that_no_message_has_is_refused(tmp_path: Path) -> None:
    train = source(tmp_path / "rows.jsonl", chat(*("absent",) * 4), key="messages")
    with pytest.raises(DataError, match=r"no message of .*rows.jsonl has the field 'weight'"):
        load_rows(train)


def test_conversation_whose_trained_turns_weigh_nothing_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    train = source(tmp_path / "rows.jsonl", chat(0, 1, 0, 0), key="messages")
    config = DataConfig(train=train, chat_template=CHAT, train_on="last")
    with pytest.raises(DataError, match=r"rows.jsonl:1: all loss weights are 0"):
        encode_demonstrations(load_rows(train), tokenizer, config)
