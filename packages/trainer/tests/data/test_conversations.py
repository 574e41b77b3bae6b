"""Conversations in tokens: whose turns are trained."""

from dataclasses import replace

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from temper_trainer.config.data import DataConfig, JsonlSource
from temper_trainer.data.conversations import encode_conversation
from temper_trainer.data.rows import ChatMessage, DataError, Row, build_row
from temper_trainer.types import Demonstration

WORDS = ["<eos>", "<unk>", "U", "A", "hi", "ho", "he", "!"]
CHAT = (
    "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}{% "
    "if m.role != 'user' %}<eos>!{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)
CONVERSATION = Row(
    row_id=0,
    prompt=tuple(
        ChatMessage(role=r, content=c)
        for r, c in (("user", "hi"), ("assistant", "ho"), ("user", "hi"), ("assistant", "he"))
    ),
    answer="",
    solution="",
    location="conversation 0",
)


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex("U|A|h.|!"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")


def config(**settings: str) -> DataConfig:
    train = JsonlSource(paths=("conversations.jsonl",), messages_key="messages")
    return replace(DataConfig(train=train, chat_template=CHAT), **settings)  # type: ignore[arg-type]


def shown(demonstration: Demonstration) -> tuple[str, str]:
    """(prompt, completion), the completion's untrained tokens in brackets."""
    assert demonstration.loss_mask is not None
    completion = zip(demonstration.tokens, demonstration.loss_mask, strict=True)
    prompt = " ".join(WORDS[i] for i in demonstration.prompt.tokens)
    return prompt, " ".join(
        WORDS[i] if is_trained else f"({WORDS[i]})" for i, is_trained in completion
    )


def test_every_assistant_turn_is_trained_up_to_its_end_token() -> None:
    assert shown(encode_conversation(CONVERSATION, tokenizer(), config())) == (
        "U hi A",
        "ho <eos> (!) (U) (hi) (A) he <eos> (!)",
    )


def test_only_the_last_turn_is_trained_with_train_on_last() -> None:
    assert shown(encode_conversation(CONVERSATION, tokenizer(), config(train_on="last"))) == (
        "U hi A ho <eos> ! U hi A",
        "he <eos> (!)",
    )


def test_template_that_rewrites_earlier_turns_is_refused() -> None:
    rewriting = "{{ 'U' * (messages | length // 2) }}" + CHAT
    with pytest.raises(
        DataError,
        match=(
            r"conversation 0: the chat template rewrites turn 1 when another "
            r"follows.*data\.train_on=last"
        ),
    ):
        encode_conversation(CONVERSATION, tokenizer(), config(chat_template=rewriting))


def test_conversation_without_an_assistant_is_refused() -> None:
    record = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(DataError, match="one of role assistant: there is nothing to imitate"):
        build_row(record, config=config().train, row_id=0, location="conversations.jsonl:1")
