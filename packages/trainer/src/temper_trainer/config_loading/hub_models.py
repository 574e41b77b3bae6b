"""Load models and adapters by their names on the Hugging Face Hub, as in `Qwen/Qwen2.5-0.5B`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from temper_engine_api.errors import ConfigError
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.loading import compute_digest
from temper_trainer.config_loading.resolved_config import LoadedConfig

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?")

_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_CODE_FILES = ("*.py",)
_IGNORED = ("*/*",)
"""Subfolders, which have copies of the weights in other formats."""


def load_hub_models(loaded: LoadedConfig) -> LoadedConfig:
    """Replace names on the Hub by local folders, after downloading what is not cached.

    The recorded configuration has the name with the commit, as in `Qwen/Qwen2.5-0.5B@060db6499f32`,
    so that a repeated run loads the same files. A value that is an existing folder stays.

    Raises:
        ConfigError: If a model cannot be loaded; the message has the command that downloads it.
    """
    config, resolved = loaded.config, loaded.resolved
    for key, value, is_tokenizer in _iterate_paths(config):
        match = _HUB_NAME.fullmatch(value)
        if match is None or Path(value).exists():
            continue
        keys = key.split(".")
        folder = _download(
            match["name"], revision=match["revision"], key=key, is_tokenizer=is_tokenizer
        )
        config = _replace_at(config, keys, str(folder))
        # The folder of a snapshot is named after its commit.
        resolved = _replace_at(resolved, keys, f"{match['name']}@{folder.name}")
    if resolved is loaded.resolved:
        return loaded
    return replace(loaded, config=config, resolved=resolved, digest=compute_digest(resolved))


def _iterate_paths(config: TrainerConfig) -> Iterator[tuple[str, str, bool]]:
    """Yield key and value for each path to a model or adapter, and if only a tokenizer is used."""
    for name, engine in config.models.items():
        if engine.model.path is not None:
            yield f"{name}.engine.model.path", engine.model.path, False
        if engine.lora.path is not None:
            yield f"{name}.engine.lora.path", engine.lora.path, False
    if config.data.tokenizer.path is not None:
        yield "data.tokenizer.path", config.data.tokenizer.path, True


def _download(name: str, *, revision: str | None, key: str, is_tokenizer: bool) -> Path:
    """Return the folder of a snapshot, from the cache if it is complete there."""
    # Imported here, because most runs name folders, and it takes half a second.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = [*_TOKENIZER_FILES, *_CODE_FILES]
    try:
        if is_tokenizer:
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        for weights in ("*.safetensors", "*.bin"):
            folder = Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=[*patterns, weights],
                    ignore_patterns=list(_IGNORED),
                )
            )
            if any(folder.glob(weights)):
                break
    # OSError covers a full disk, a failed connection, and files that are not in the cache.
    except (OSError, httpx.HTTPError, HfHubHTTPError, HFValidationError) as error:
        local = f"models/{name.rpartition('/')[2]}"
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{key} is {name}, which is not a folder here, and could not be loaded from the "
            f"Hugging Face Hub ({type(error).__name__}: {reason}). Correct the name, or run hf "
            f"download {name} --local-dir {local} where the network allows it, and set "
            f"{key}={local}."
        ) from error
    return folder


def _replace_at(node: Any, keys: Sequence[str], value: str) -> Any:
    """Return a copy of nested dataclasses and mappings with another value at a key."""
    if not keys:
        return value
    first, *rest = keys
    if isinstance(node, Mapping):
        return {**node, first: _replace_at(node[first], rest, value)}
    return replace(node, **{first: _replace_at(getattr(node, first), rest, value)})
