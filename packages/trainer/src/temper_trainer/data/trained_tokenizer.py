"""Train the run's own tokenizers; needs the tokenizers library, but neither transformers nor torch.

`--check` trains one on the first rows, and must be fast.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from temper_trainer.config.data import TokenizerConfig
from temper_trainer.data.rows import DataError

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"

_WORDS = r"####| ?[^\W\d_]+|\d|\s|_|[^\w\s]"
"""Pieces: the answer marker, a word with its leading space, a digit, white space, any other
character.
"""


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer of kind word_level or bpe.

    Raises:
        DataError: If there are no texts to learn from, or one has a special token or does not
            survive a round trip.
    """
    # dict.fromkeys removes duplicates and keeps the order. The order of a set differs between
    # processes.
    corpus = list(dict.fromkeys(texts))
    if not corpus:
        raise DataError(
            f"tokenizer.kind {config.kind} learns from the training texts, but there are none."
        )
    trained = (
        _word_level(corpus)
        if config.kind == "word_level"
        else _byte_pairs(corpus, vocab_size=config.vocab_size)
    )
    check_round_trip(trained, corpus)
    return trained


def _word_level(corpus: Sequence[str]) -> Tokenizer:
    """Build a word-level tokenizer with one sorted entry per corpus piece.

    All digits, space, line break and the answer marker are entries, seen or not.
    """
    splitter = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    pieces = {piece for text in corpus for piece, _ in splitter.pre_tokenize_str(text)}
    entries = [PAD, END, UNKNOWN, *sorted(pieces | {*"0123456789", " ", "\n", "####"})]
    tokenizer = Tokenizer(
        models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = splitter
    # Without it, decoding would put a space between two pieces.
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _byte_pairs(corpus: Sequence[str], *, vocab_size: int | None) -> Tokenizer:
    """Train byte-level BPE; digits are never merged, so that every number has one spelling."""
    assert vocab_size is not None
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, UNKNOWN],
        # All 256 bytes, so that every text can be encoded. Sorted, because their order decides the
        # token ids and the library returns them in another order in each process.
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    return tokenizer


def check_round_trip(tokenizer: Tokenizer, corpus: Sequence[str]) -> None:
    """Raise unless decoding the encoded texts returns them unchanged.

    Raises:
        DataError: Naming the first text that has a special token or comes back changed.
    """
    check_special_tokens(corpus)
    changed = find_changed_text(tokenizer, corpus)
    if changed is not None:
        raise DataError(
            f"the tokenizer would change a training text: {changed[0]!r:.200} comes back as "
            f"{changed[1]!r:.200}. Use tokenizer.kind bpe."
        )


def check_special_tokens(corpus: Iterable[str]) -> None:
    for text in corpus:
        if any(special in text for special in (PAD, END, UNKNOWN)):
            raise DataError(
                f"a training text contains one of the special tokens {PAD}, {END} and {UNKNOWN}: "
                f"{text!r:.200}. Remove the token from the text."
            )


def find_changed_text(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[str, str] | None:
    """Return the first text that changes when it is encoded and decoded, and the result."""
    corpus = list(texts)
    encoded = tokenizer.encode_batch_fast(corpus, add_special_tokens=False)
    decoded = tokenizer.decode_batch([entry.ids for entry in encoded], skip_special_tokens=False)
    pairs = zip(corpus, decoded, strict=True)
    return next(((text, back) for text, back in pairs if text != back), None)
