"""Write a Hugging Face model directory from a stream of weights, one shard in memory at a time."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForTokenClassification,
    PreTrainedTokenizerBase,
)

from temper_engine_api.checkpoint.transaction import sync_directory
from temper_engine_api.errors import CheckpointError
from temper_engine_api.specs import ModelSpec
from temper_engine_api.vision_language import IMAGE_PROCESSOR_FILES, has_image_encoder
from temper_engine_api.weights import NamedWeight
from temper_trainer.data.tokenizer import save_tokenizer
from temper_trainer.rollout.hf_model import build_model_config, get_language_model_class

SHARD_BYTES = 4 << 30
"""Maximum size of a safetensors file, unless a single tensor is larger."""


def write_model_directory(
    weights: Iterable[NamedWeight],
    *,
    model: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
) -> Path:
    """Write config, weights and tokenizer.

    The directory is written under a temporary name and renamed at the end, so an incomplete one
    never exists.

    Args:
        weights: Full tensors under Hugging Face names. The stream is always read to its end.
        model: Spec used to make the config.
        tokenizer: Saved with the weights.
        directory: Directory to create; must not exist.

    Raises:
        CheckpointError: If the directory exists, or it cannot be written.
    """
    if os.path.lexists(directory):
        raise CheckpointError(
            f"{directory} already exists and is never overwritten: move it away, or choose another "
            "run.dir."
        )
    staging = directory.with_name(f".{directory.name}.partial")
    # A process that was killed while it wrote the model may have left one.
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        dtype = _write_shards(weights, staging)
        config = build_model_config(model)
        head = (
            get_language_model_class(config)
            if model.model_type == "language_model"
            else AutoModelForTokenClassification
        )
        # Transformers has no public function for the class that belongs to a config.
        config.architectures = [head._model_mapping[type(config)].__name__]
        if model.model_type != "language_model":
            config.num_labels = 1  # value and reward models have a scalar head
        config.dtype = dtype
        # Training turns the KV cache off; users of the model generate with it.
        config.use_cache = True
        config.save_pretrained(staging)
        save_tokenizer(tokenizer, staging)
        if model.path is not None and has_image_encoder(config.model_type):
            _copy_files(IMAGE_PROCESSOR_FILES, source=Path(model.path), target=staging)
        _sync_files(staging)
    except CheckpointError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    except (OSError, SafetensorError) as error:  # SafetensorError: how safetensors reports ENOSPC
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(
            f"the model could not be written to {directory}: {error}. Free space and run again."
        ) from error
    os.rename(staging, directory)
    sync_directory(directory.parent)
    return directory


def _copy_files(names: Iterable[str], *, source: Path, target: Path) -> None:
    """Copy files from one folder to another, unless they exist there."""
    for name in names:
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)


def _sync_files(directory: Path) -> None:
    """Fsync all files, so that a crash of the host after the rename cannot leave short ones."""
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        else:
            sync_directory(path)
    sync_directory(directory)


def _write_shards(weights: Iterable[NamedWeight], directory: Path) -> str:
    """Write the shards and, if there are several, their index; return the first weight's dtype."""
    shards: list[list[str]] = []
    buffer: dict[str, Tensor] = {}
    size = total = 0
    dtype = "float32"

    def flush() -> None:
        nonlocal buffer, size
        # The metadata is the same as from `save_pretrained`: Transformers reads the framework from
        # it.
        save_file(buffer, directory / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(buffer))
        buffer, size = {}, 0

    for name, tensor in weights:
        weight_bytes = tensor.numel() * tensor.element_size()
        if buffer and size + weight_bytes > SHARD_BYTES:
            flush()
        if not shards and not buffer:
            dtype = str(tensor.dtype).removeprefix("torch.")
        # safetensors refuses tensors that are not contiguous.
        buffer[name] = tensor.detach().cpu().contiguous()
        size, total = size + weight_bytes, total + weight_bytes
    flush()
    _name_shards(directory, shards, total=total)
    return dtype


def _name_shards(directory: Path, shards: list[list[str]], *, total: int) -> None:
    """Rename the shards as Hugging Face does.

    The names contain the shard count, which is only known after the last one.
    """
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
