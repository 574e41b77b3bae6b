"""Load or train the run's tokenizer, and save it with the run for use with its model."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from temper_engine_api.errors import CheckpointError, ConfigError, DamagedCheckpointError
from temper_trainer.config.data import TokenizerConfig
from temper_trainer.data.rows import DataError

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"

_WORDS = r"####| ?[^\W\d_]+|\d|\s|_|[^\w\s]"
"""Pieces: the answer marker, a word with its leading space, a digit, white space, any other
character.
"""


def build_tokenizer(
    config: TokenizerConfig, *, model_path: str | None, texts: Iterable[str], directory: Path
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `load_or_train`, after saving it to ``directory``."""
    tokenizer = load_or_train(config, model_path=model_path, texts=texts)
    save_tokenizer(tokenizer, directory)
    return tokenizer


def load_or_train(
    config: TokenizerConfig, *, model_path: str | None, texts: Iterable[str]
) -> PreTrainedTokenizerBase:
    """Return a tokenizer with pad and end tokens.

    Args:
        config: Kind of tokenizer.
        model_path: The actor's model directory, used by kind pretrained if config.path is None.
        texts: Prompts, answers and demonstrations that kinds word_level and bpe learn from.

    Raises:
        ConfigError: If kind pretrained has no readable directory, or its tokenizer has no end
            token.
        DataError: If there are no texts to learn from, or one has a special token or does not
            survive a round trip.
    """
    if config.kind == "pretrained":
        return _load(config.path or model_path)
    # Without duplicates, in order: a set has another order in every process.
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
    return _to_transformers(trained)


def load_saved_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return a tokenizer that `save_tokenizer` wrote.

    Raises:
        DamagedCheckpointError: If it cannot be read.
    """
    try:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            # A slow tokenizer has its own files in place of tokenizer.json.
            if (directory / name).exists() or name == "tokenizer_config.json":
                json.loads((directory / name).read_text(encoding="utf-8"))
        tokenizer = _load(str(directory))
    except Exception as error:
        # The tokenizers library raises a bare Exception for a file that it cannot parse.
        if type(error) is not Exception and not isinstance(
            error, OSError | ValueError | ConfigError
        ):
            raise
        raise DamagedCheckpointError(
            f"the tokenizer in {directory} is damaged ({error})."
        ) from error
    if _is_trained_by_run(tokenizer) and tokenizer.chat_template is None:
        # Loading has added fields to its config, which would be exported with the model.
        return _to_transformers(tokenizer.backend_tokenizer)
    return tokenizer


def compute_tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of what gives token ids their meaning.

    These are the vocabulary, the merges of BPE and the end token. Other fields of tokenizer.json
    are left out, because the libraries write them differently from version to version.
    """
    merges: list[list[str]] = []
    if tokenizer.is_fast:
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        # Older versions write a merge as one string.
        merges = [
            pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", [])
        ]
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    content = json.dumps([vocabulary, merges, tokenizer.eos_token_id])
    return hashlib.sha256(content.encode()).hexdigest()


def _is_trained_by_run(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True for a tokenizer of kind word_level or bpe."""
    special = [tokenizer.get_vocab().get(token) for token in (PAD, END, UNKNOWN)]
    return tokenizer.is_fast and special == [0, 1, 2]


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the files of a tokenizer.

    Raises:
        CheckpointError: If the disk is full, or the folder is not writable.
    """
    try:
        tokenizer.save_pretrained(str(directory))
    except Exception as error:
        # The tokenizers library, which writes one of the files, raises a bare Exception for I/O
        # errors.
        if type(error) is not Exception and not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"the tokenizer could not be written to {directory}: {error}. Free space and run again."
        ) from error


def _load(path: str | None) -> PreTrainedTokenizerBase:
    if path is None:
        raise ConfigError(
            "tokenizer.kind is pretrained, but neither tokenizer.path nor the actor's model.path "
            "is set: set one, or train a tokenizer with tokenizer.kind word_level or bpe."
        )
    if not Path(path).is_dir():
        raise ConfigError(f"no tokenizer can be loaded from {path!r}: there is no such directory.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be loaded from {path!r}: {error}") from error
    # Without vocabulary files, transformers creates a tokenizer that has only special tokens.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise ConfigError(
            f"the tokenizer in {path!r} has no vocabulary: copy its files (such as "
            "tokenizer.json) there, or set data.tokenizer.path to the folder that has them."
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer in {path!r} has no end token, so completions could not end: set "
            "eos_token in its config."
        )
    if tokenizer.pad_token_id is None:
        # Padding is always masked, so any id of the vocabulary will do.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _to_transformers(trained: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        # True would remove spaces before punctuation, so that decoded texts differ from the sampled
        # ones.
        clean_up_tokenization_spaces=False,
    )


def _word_level(corpus: Sequence[str]) -> Tokenizer:
    """Build a word-level tokenizer with one sorted entry per piece of the corpus.

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
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    return tokenizer


def check_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, directory: Path
) -> None:
    """Check that a saved tokenizer of kind word_level or bpe represents new texts.

    Args:
        tokenizer: The tokenizer.
        texts: Texts of this start, which may be others than it was trained on.
        directory: Where it is saved, for the message.

    Raises:
        DataError: If a text has a special token or does not survive a round trip.
    """
    if not _is_trained_by_run(tokenizer):
        return
    corpus = list(dict.fromkeys(texts))
    _check_special_tokens(corpus)
    changed = _find_changed_text(tokenizer.backend_tokenizer, corpus)
    if changed is not None:
        raise DataError(
            f"the tokenizer of the run in {directory} was trained on other texts and would change "
            f"{changed[0]!r:.200} to {changed[1]!r:.200}. The run's weights fit no other "
            "tokenizer: keep the training data, or choose another run.dir."
        )


def check_round_trip(tokenizer: Tokenizer, corpus: Sequence[str]) -> None:
    """Raise unless decoding the encoded texts returns them unchanged.

    Raises:
        DataError: Naming the first text that has a special token or comes back changed.
    """
    _check_special_tokens(corpus)
    changed = _find_changed_text(tokenizer, corpus)
    if changed is not None:
        raise DataError(
            f"the tokenizer would change a training text: {changed[0]!r:.200} comes back as "
            f"{changed[1]!r:.200}. Use tokenizer.kind bpe."
        )


def _check_special_tokens(corpus: Iterable[str]) -> None:
    for text in corpus:
        if any(special in text for special in (PAD, END, UNKNOWN)):
            raise DataError(
                f"a training text contains one of the special tokens {PAD}, {END} and {UNKNOWN}: "
                f"{text!r:.200}. Remove the token from the text."
            )


def _find_changed_text(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[str, str] | None:
    """Return the first text that changes when it is encoded and decoded, and the result."""
    corpus = list(texts)
    encoded = tokenizer.encode_batch_fast(corpus, add_special_tokens=False)
    decoded = tokenizer.decode_batch([entry.ids for entry in encoded], skip_special_tokens=False)
    pairs = zip(corpus, decoded, strict=True)
    return next(((text, back) for text, back in pairs if text != back), None)
