"""The ``huggingface/`` folder of a checkpoint: config, tokenizer files where the model came with some, and safetensors on request."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from temper_engine_api.weights import NamedWeight

FOLDER = "huggingface"
SHARD_BYTES = 4 << 30
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def write_description(config: PretrainedConfig, *, directory: str, source: str | None, dtype: torch.dtype) -> list[str]:
    """Write config.json and copy the tokenizer beside it; relative paths of the files.

    Args:
        config: the model's.
        directory: of the checkpoint's part.
        source: directory that the model was loaded from; None for a model from scratch.
        dtype: that the weights are exported in.
    """
    folder = Path(directory, FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    fields = config.to_dict()
    fields["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n")
    written = ["config.json"]
    for name in TOKENIZER_FILES:
        if source is not None and Path(source, name).is_file():
            shutil.copyfile(Path(source, name), folder / name)
            written.append(name)
    return [f"{FOLDER}/{name}" for name in written]


def write_weights(stream: Iterable[NamedWeight], *, directory: str, is_writer: bool) -> list[str]:
    """Write a stream of weights as safetensors with their index; relative paths of the files.

    Every rank must consume the stream, and one of them writes. One shard is held in host memory at a time.
    """
    shards = _Shards(Path(directory, FOLDER))
    for name, tensor in stream:
        if is_writer:
            shards.add(name, tensor)
    return [f"{FOLDER}/{name}" for name in shards.finish()] if is_writer else []


class _Shards:
    """Collects tensors and writes a file whenever SHARD_BYTES are reached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._names: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > SHARD_BYTES:
            self._flush()
        self._held[name] = tensor.contiguous().cpu()
        self._held_bytes += size
        self._total_bytes += size

    def finish(self) -> list[str]:
        self._flush()
        count = len(self._names)
        if count == 1:
            (self._folder / _part(0)).rename(self._folder / "model.safetensors")
            return ["model.safetensors"]
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for i, file in enumerate(files):
            (self._folder / _part(i)).rename(self._folder / file)
        places: Mapping[str, str] = {name: files[i] for i, names in enumerate(self._names) for name in names}
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": places}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        return [*files, "model.safetensors.index.json"]

    def _flush(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # transformers refuses a file whose metadata does not say which framework wrote it.
        save_file(self._held, self._folder / _part(len(self._names)), metadata={"format": "pt"})
        self._names.append(list(self._held))
        self._held, self._held_bytes = {}, 0


def _part(index: int) -> str:
    return f"part-{index}.safetensors"
