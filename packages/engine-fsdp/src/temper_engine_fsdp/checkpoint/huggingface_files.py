"""The `huggingface/` and `adapter/` folders in a checkpoint.

Config, tokenizer files if the model came with them, and safetensors on request. Safetensors are
written tensor by tensor, because names, shapes and dtypes are known in advance.

A safetensors file is the header length (8 bytes), a JSON header, and the tensor data. Source:
https://github.com/huggingface/safetensors, README, "Format".
"""

import json
import shutil
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from temper_engine_api.adapter_checks import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from temper_engine_api.errors import CheckpointError
from temper_engine_api.model_files import INDEX_NAME
from temper_engine_api.vision_language import IMAGE_PROCESSOR_FILES
from temper_engine_api.weights import NamedWeight, WeightEntry

FOLDER = "huggingface"
"""Folder of config, tokenizer and weights."""
ADAPTER_FOLDER = "adapter"
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


def write_model_config(
    config: PretrainedConfig, *, directory: str, source: str | None, dtype: torch.dtype
) -> list[str]:
    """Write config.json and copy the tokenizer files.

    Args:
        config: Config of the model.
        directory: Directory for the engine's part of the checkpoint.
        source: Directory from which the model was loaded; None for a model from scratch.
        dtype: Dtype of exported weights.

    Returns:
        Relative file paths.
    """
    folder = Path(directory, FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    fields = config.to_dict()
    fields["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(
        json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n"
    )
    written = ["config.json"]
    for name in (*TOKENIZER_FILES, *IMAGE_PROCESSOR_FILES):
        if source is not None and Path(source, name).is_file():
            shutil.copyfile(Path(source, name), folder / name)
            written.append(name)
    return [f"{FOLDER}/{name}" for name in written]


def write_adapter(
    adapter_config: Mapping[str, object], tensors: Mapping[str, Tensor], *, directory: str
) -> list[str]:
    """Write PEFT's adapter configuration and tensors to `adapter/`; return the relative paths."""
    folder = Path(directory, ADAPTER_FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(adapter_config, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text + "\n")
    entries = [
        WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
        for name, tensor in tensors.items()
    ]
    write_safetensors(
        folder / ADAPTER_WEIGHTS,
        entries,
        (NamedWeight(name, tensor) for name, tensor in tensors.items()),
    )
    return [f"{ADAPTER_FOLDER}/{name}" for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]


def write_weights(
    stream: Iterable[NamedWeight],
    entries: Sequence[WeightEntry],
    *,
    directory: str,
    is_writer: bool,
    shard_bytes: int,
) -> list[str]:
    """Write a stream of weights as safetensors with an index.

    Every rank must consume the stream, since gathering is collective; one rank writes. Only the
    current tensor is in memory.

    Args:
        stream: Full tensors.
        entries: Name, shape and dtype of the tensors in the stream, in order.
        directory: Directory for the engine's part of the checkpoint.
        is_writer: True if this rank writes.
        shard_bytes: Maximum size of a file, unless a single tensor is larger.

    Returns:
        Relative file paths.

    Raises:
        CheckpointError: If a file cannot be written. The stream is consumed nevertheless, so that
            the other ranks do not wait.
    """
    if not is_writer:
        for _ in stream:
            pass
        return []
    folder = Path(directory, FOLDER)
    weights = iter(stream)
    try:
        return _write_shards(
            weights, _split_into_files(entries, shard_bytes=shard_bytes), folder=folder
        )
    except OSError as error:
        # Consume the rest: the other ranks still gather.
        deque(weights, maxlen=0)
        raise CheckpointError(
            f"could not write the weights to {folder} ({error}): free disk space, or save to a "
            "folder that this process may write."
        ) from error


def _write_shards(
    weights: Iterator[NamedWeight], shards: Sequence[Sequence[WeightEntry]], *, folder: Path
) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    count = len(shards)
    names = (
        [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if count > 1
        else ["model.safetensors"]
    )
    for name, shard in zip(names, shards, strict=True):
        # `weights` is one stream for all files. The shards list its tensors in the same order.
        write_safetensors(folder / name, shard, weights)
    if count == 1:
        return [f"{FOLDER}/{names[0]}"]
    file_of_tensor = {
        entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard
    }
    index = {
        "metadata": {"total_size": sum(num_bytes(entry) for shard in shards for entry in shard)},
        "weight_map": file_of_tensor,
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [f"{FOLDER}/{name}" for name in (*names, INDEX_NAME)]


def _split_into_files(
    entries: Sequence[WeightEntry], *, shard_bytes: int
) -> list[list[WeightEntry]]:
    shards: list[list[WeightEntry]] = [[]]
    file_bytes = 0
    for entry in entries:
        if shards[-1] and file_bytes + num_bytes(entry) > shard_bytes:
            shards.append([])
            file_bytes = 0
        shards[-1].append(entry)
        file_bytes += num_bytes(entry)
    return shards


_DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def num_bytes(entry: WeightEntry) -> int:
    """Return the size of a tensor's data."""
    return prod(entry.shape) * entry.dtype.itemsize


def write_safetensors(
    path: Path, entries: Sequence[WeightEntry], weights: Iterator[NamedWeight]
) -> None:
    """Write the next tensors of a stream, which must match `entries`, to one file."""
    with open(path, "wb") as file:
        file.write(_header(entries))
        for entry in entries:
            name, tensor = next(weights)
            assert (name, tuple(tensor.shape), tensor.dtype) == (
                entry.name,
                entry.shape,
                entry.dtype,
            ), "the stream does not match its entries"
            if tensor.numel() > 0:
                # numpy's tofile loses buffered data without an error when the disk is full.
                file.write(
                    tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                )


def _header(entries: Sequence[WeightEntry]) -> bytes:
    # transformers rejects files without the framework in their metadata.
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + num_bytes(entry)
        fields[entry.name] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    # Pad the header with spaces so that the data starts at a multiple of 8 bytes.
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
