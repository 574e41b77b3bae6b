"""Checks and settings of LoRA adapters that do not depend on how an engine computes them.

Nothing here imports peft: engines that offer adapters do.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_api.errors import CapabilityError, CheckpointError, ConfigError, WeightError
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_api.weights import WeightEntry, check_weight_entries

PEFT_PREFIX = "base_model.model."
"""Prefix of every tensor name in PEFT's adapter files."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Names of PEFT's two files."""
_COMPARED_FIELDS = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Fields of the config that decide how the adapter's tensors are scaled and combined."""


def build_lora_config(spec: LoraSpec, *, model: ModelSpec) -> dict[str, object]:
    """Return the arguments of PEFT's `LoraConfig` for a new adapter."""
    # The head of a value or reward model is newly initialized, so it must be trained in full.
    fully_trained = (
        {*spec.modules_to_save}
        if model.model_type == "language_model"
        else {*spec.modules_to_save, "score"}
    )
    excluded = (
        spec.exclude_modules
        if isinstance(spec.exclude_modules, str)
        else sorted({*spec.exclude_modules, *fully_trained})
    )
    return {
        "task_type": "CAUSAL_LM" if model.model_type == "language_model" else "TOKEN_CLS",
        "base_model_name_or_path": model.path,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha)
        if spec.alpha is not None and float(spec.alpha).is_integer()
        else spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": spec.target_modules
        if isinstance(spec.target_modules, str)
        else list(spec.target_modules),
        "exclude_modules": excluded or None,
        "target_parameters": list(spec.target_parameters) or None,
        "modules_to_save": sorted(fully_trained) or None,
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
    }


def to_adapter_config(fields: Mapping[str, object]) -> dict[str, object]:
    """Convert PEFT config fields to the contents of adapter_config.json."""
    sorted_fields = {
        key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()
    }
    # Saved adapters are loaded for inference by default.
    content: dict[str, object] = json.loads(
        json.dumps(sorted_fields | {"inference_mode": True}, default=str)
    )
    return content


def check_adapter_directory(path: str) -> None:
    """Check that a directory contains a LoRA adapter in PEFT format.

    Raises:
        ConfigError: If it has no adapter config.
        CapabilityError: If the adapter is of another type.
    """
    file = Path(path, ADAPTER_CONFIG)
    if not file.is_file():
        raise ConfigError(
            f"lora.path is {path!r}, which has no {ADAPTER_CONFIG}: set it to a directory in PEFT "
            "format."
        )
    kind = json.loads(file.read_text()).get("peft_type")
    if kind != "LORA":
        raise CapabilityError(
            f"the adapter in {path} has type {kind}, but only LORA is supported: choose a LoRA "
            "adapter."
        )


def find_adapter_weights(path: str) -> Path:
    """Return the weight file of an adapter directory.

    Raises:
        WeightError: If it has no safetensors file.
    """
    file = Path(path, ADAPTER_WEIGHTS)
    if not file.is_file():
        raise WeightError(
            f"the adapter in {path} has no {ADAPTER_WEIGHTS}: save it as safetensors."
        )
    return file


def check_target_names(spec: LoraSpec, *, module_names: Collection[str]) -> None:
    """Reject names of modules to adapt, to exclude or to train in full that match no module.

    PEFT ignores such a name when another name matches.

    Args:
        spec: Adapter settings.
        module_names: Full names of the model's modules.

    Raises:
        ConfigError: If a name, or a pattern of modules to exclude, matches nothing.
    """
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        requested: str | tuple[str, ...] = getattr(spec, key)
        if isinstance(requested, str):
            # PEFT itself rejects a pattern of targets that matches nothing.
            is_unused = (
                key == "exclude_modules"
                and requested
                and not any(re.fullmatch(requested, name) for name in module_names)
            )
            unmatched = [requested] if is_unused else []
        else:
            unmatched = [
                suffix for suffix in requested if not has_suffix(module_names, suffix=suffix)
            ]
        if unmatched:
            last_parts = {name.rpartition(".")[2] for name in module_names}
            known = sorted(part for part in last_parts if part and not part.isdecimal())
            advice = (
                " Matrices inside experts are named in lora.target_parameters: "
                "mlp.experts.gate_up_proj and mlp.experts.down_proj."
                if key == "target_modules" and "experts" in last_parts
                else ""
            )
            raise ConfigError(
                f"lora.{key} names {', '.join(unmatched)}, but no layer of this model has that "
                f"name: remove it, or use another of {', '.join(known)}.{advice}"
            )


def has_suffix(names: Collection[str], *, suffix: str) -> bool:
    """Return True if a dotted name ends in these full parts, as PEFT matches names."""
    return any(f".{name}".endswith(f".{suffix}") for name in names)


def check_same_adapter(config: Mapping[str, object], *, own_config: Mapping[str, object]) -> None:
    """Check that an adapter to load has the same ranks and scales as this engine's adapter.

    With different ranks or scales, the adapter's effect on the model would differ from its
    training.

    Args:
        config: Contents of the loaded adapter's adapter_config.json.
        own_config: Contents of this engine's own adapter_config.json.

    Raises:
        ConfigError: If a field that scales or combines the tensors differs.
    """
    for key in _COMPARED_FIELDS:
        if config.get(key, own_config[key]) != own_config[key]:
            raise ConfigError(
                f"the adapter to load has {key} {config[key]}, but this engine has "
                f"{own_config[key]}: set the same value in lora."
            )


def check_base_weights(*, has_replaced_base: bool, has_weights: bool, directory: str) -> None:
    """Check before loading a checkpoint that the base weights will match the adapter.

    Args:
        has_replaced_base: Whether load_weights() replaced this engine's base weights.
        has_weights: Whether the checkpoint contains base weights.
        directory: Directory of the checkpoint.

    Raises:
        CheckpointError: If the base was replaced and the checkpoint does not contain it.
    """
    if has_replaced_base and not has_weights:
        raise CheckpointError(
            f"the checkpoint in {directory} contains only an adapter, but load_weights() has "
            "replaced the base weights of this engine: load the checkpoint in a new engine."
        )


def check_adapter_tensors(
    shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]
) -> None:
    """Check that the tensors of an adapter have exactly these names and shapes.

    Raises:
        WeightError: If a name is missing or unexpected, or a shape differs.
    """
    check_weight_entries(
        [
            WeightEntry(name=name, shape=tuple(shape), dtype=torch.float32)
            for name, shape in shapes.items()
        ],
        [
            WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in tensors.items()
        ],
    )


def format_targets(targets: object) -> str:
    """Format target names for an error message; sets in sorted order."""
    return repr(sorted(targets)) if isinstance(targets, set | list | tuple) else repr(targets)
