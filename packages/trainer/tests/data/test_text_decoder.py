"""The text of a completion: the same as that of the tokenizer, character by character."""

import random
from array import array

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from temper_trainer.config.data import TokenizerConfig
from temper_trainer.data.text_decoder import TextDecoder
from temper_trainer.data.trained_tokenizer import train_tokenizer

TEXTS = [
    "naïve café 12 + 30 = 42",
    "数学の問題 \N{GRINNING FACE}\n\ttabs",
    "plain words, again and again",
]


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    config = (
        TokenizerConfig(kind="bpe", vocab_size=300)
        if kind == "bpe"
        else TokenizerConfig(kind="word_level")
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(config, TEXTS), eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("数", special=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return tokenizer


@pytest.mark.parametrize("kind", ["bpe", "word_level"])
def test_text_of_random_tokens_is_that_of_the_tokenizer(kind: str) -> None:
    """Random tokens have parts of characters, and special and added tokens between them."""
    tokenizer, draw = make_tokenizer(kind), random.Random(0)
    decoder = TextDecoder(tokenizer)
    for _ in range(2000):
        tokens = [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(40))]
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        assert decoder.decode(array("I", tokens)) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(text: str) -> None:
    tokenizer = make_tokenizer("bpe")
    tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert TextDecoder(tokenizer).decode(tokens) == text


def test_bytes_of_every_length_are_decoded_like_those_of_the_tokenizer() -> None:
    tokenizer = make_tokenizer("bpe")
    decoder = TextDecoder(tokenizer)
    of_byte = {
        decoder._table.join(array("I", [i])): i  # type: ignore[union-attr]
        for i in range(len(tokenizer))
    }
    draw = random.Random(1)
    for _ in range(3000):
        data = (
            draw.randbytes(6)
            if draw.random() < 0.5
            else "é数\N{GRINNING FACE}".encode()[draw.randrange(4) : draw.randrange(4, 10)]
        )
        tokens = [of_byte[bytes([byte])] for byte in data]
        assert decoder.decode(tokens) == tokenizer.decode(tokens)


def test_ids_beyond_the_vocabulary_are_left_out_as_by_the_tokenizer() -> None:
    tokenizer = make_tokenizer("bpe")
    tokens = [*tokenizer(TEXTS[2])["input_ids"], len(tokenizer) + 7]
    assert TextDecoder(tokenizer).decode(tokens) == TEXTS[2]


def test_cleaned_text_is_left_to_the_tokenizer() -> None:
    tokenizer = make_tokenizer("bpe")
    tokenizer.clean_up_tokenization_spaces = True
    assert TextDecoder(tokenizer)._table is None
