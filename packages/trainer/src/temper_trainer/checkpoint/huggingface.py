"""A Hugging Face model directory, written from a stream of weights without ever holding more than one shard."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from temper_engine_api.errors import CheckpointError
from temper_engine_api.specs import ModelSpec
from temper_engine_api.weights import NamedWeight
from temper_trainer.data.tokenizer import save_tokenizer

SHARD_BYTES = 4 << 30
"""Largest safetensors file."""


def write_model_directory(
    weights: Iterable[NamedWeight],
    *,
    model: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
) -> Path:
    """Config, safetensors and tokenizer; the directory appears whole or not at all.

    Args:
        weights: full tensors under Hugging Face names; the whole stream is read.
        model: where the config comes from.
        tokenizer: saved beside the weights.
        directory: must not exist.

    Raises:
        CheckpointError: the directory exists, or the disk is full.
    """
    if directory.exists():
        raise CheckpointError(
            f"{directory} already exists and is never overwritten: move it away, or choose another run.dir."
        )
    staging = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        dtype = _write_shards(weights, staging)
        config = model_config(model)
        head = (
            AutoModelForCausalLM
            if model.model_type == "language_model"
            else AutoModelForTokenClassification
        )
        config.architectures = [head._model_mapping[type(config)].__name__]
        if model.model_type != "language_model":
            config.num_labels = 1
        config.dtype = dtype
        config.use_cache = True
        config.save_pretrained(staging)
        save_tokenizer(tokenizer, staging)
    except CheckpointError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    except (
        OSError,
        SafetensorError,
    ) as error:  # the latter is what safetensors makes of a full disk
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(
            f"the model could not be written to {directory}: {error}. Free space and run again."
        ) from error
    os.rename(staging, directory)
    return directory


def model_config(model: ModelSpec) -> PretrainedConfig:
    """The Hugging Face config of a spec, from its directory or its architecture."""
    if model.path is not None:
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    fields = dict(model.architecture)
    return AutoConfig.for_model(str(fields.pop("model_type")), **fields)


def _write_shards(weights: Iterable[NamedWeight], directory: Path) -> str:
    """Write shards and, where there are several, their index; returns the dtype of the first weight."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    dtype = "float32"

    def flush() -> None:
        nonlocal held, size
        save_file(held, directory / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held, size = {}, 0

    for name, tensor in weights:
        weight_bytes = tensor.numel() * tensor.element_size()
        if held and size + weight_bytes > SHARD_BYTES:
            flush()
        if not shards and not held:
            dtype = str(tensor.dtype).removeprefix("torch.")
        held[name] = tensor.detach().cpu().contiguous()
        size, total = size + weight_bytes, total + weight_bytes
    flush()
    _name_shards(directory, shards, total=total)
    return dtype


def _name_shards(directory: Path, shards: list[list[str]], *, total: int) -> None:
    """Hugging Face's names: they hold the number of shards, which is known only at the end."""
    if len(shards) == 1:
        os.rename(directory / "shard-0.safetensors", directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(directory / f"shard-{i}.safetensors", directory / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=1, sort_keys=True)
    )
