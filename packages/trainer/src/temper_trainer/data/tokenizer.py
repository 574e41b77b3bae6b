"""Load or train the run's tokenizer, and save it with the run for use with its model."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from temper_engine_api.errors import CheckpointError, ConfigError, DamagedCheckpointError
from temper_trainer.config.data import TokenizerConfig
from temper_trainer.data.rows import DataError
from temper_trainer.data.trained_tokenizer import (
    END,
    PAD,
    UNKNOWN,
    check_special_tokens,
    find_changed_text,
    train_tokenizer,
)


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
    return _to_transformers(train_tokenizer(config, texts))


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
            error, OSError | ValueError | RecursionError | ConfigError
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
    """Write a tokenizer's files.

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
        # If the folder has a model, AutoTokenizer chooses the class by the model's type. For qwen2
        # that class replaces the rules of tokenizer.json, and words would be lost without an error.
        if _is_trained_by_run(tokenizer):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    except Exception as error:
        # For a damaged tokenizer.json, transformers raises KeyError or TypeError, and the
        # tokenizers library a bare Exception.
        _check_tokenizer_file(Path(path) / "tokenizer.json")
        _check_json_files(Path(path))
        # If the folder has a model, its config.json is read, too, and may have an invalid setting.
        if not isinstance(error, OSError | ValueError | StrictDataclassError):
            raise
        raise ConfigError(f"no tokenizer can be loaded from {path!r}: {error}") from error
    # If vocabulary files are missing, transformers creates a tokenizer that has only special
    # tokens.
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


def _check_tokenizer_file(file: Path) -> None:
    """Raise ConfigError if a file is there but the tokenizers library cannot read it."""
    if not file.is_file():
        return
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(
            f"{file} cannot be read as a tokenizer ({error}): copy or download the tokenizer's "
            "files again."
        ) from error


def _check_json_files(folder: Path) -> None:
    """Raise ConfigError if a JSON file cannot be parsed, or if settings are not an object."""
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{file} is not JSON ({error}): copy or download the tokenizer's files again."
            ) from error
        if file.name == "tokenizer_config.json" and not isinstance(content, dict):
            raise ConfigError(
                f"{file} is a {type(content).__name__}, but must be a JSON object: copy or "
                "download the tokenizer's files again."
            )


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


def check_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, directory: Path
) -> None:
    """Check that a saved tokenizer of kind word_level or bpe represents new texts.

    Args:
        tokenizer: The tokenizer.
        texts: Texts in this start of the run. The tokenizer may have been trained on others.
        directory: Where it is saved, for the message.

    Raises:
        DataError: If a text has a special token or does not survive a round trip.
    """
    if not _is_trained_by_run(tokenizer):
        return
    corpus = list(dict.fromkeys(texts))
    check_special_tokens(corpus)
    changed = find_changed_text(tokenizer.backend_tokenizer, corpus)
    if changed is not None:
        raise DataError(
            f"the tokenizer of the run in {directory} was trained on other texts and would change "
            f"{changed[0]!r:.200} to {changed[1]!r:.200}. The run's weights fit no other "
            "tokenizer: keep the training data, or choose another run.dir."
        )
