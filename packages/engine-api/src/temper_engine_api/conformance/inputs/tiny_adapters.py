"""Tiny seeded LoRA adapters as directories in PEFT's format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from temper_engine_api.conformance.inputs.tiny_models import TinyModel

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyAdapter:
    """A tiny adapter; no tensor of it is zero, so that losing one shows."""

    name: str
    """Of its directory and of the test that uses it."""
    model: TinyModel
    """Of the base."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Of peft's LoraConfig, where they differ from rank 4, alpha 6 on all linear layers."""
    seed: int = 0
    """Of its values: one with which no token of a mixture stands so nearly between two experts that rounding sends it to the other."""


def write_adapter(
    adapter: TinyAdapter, base: PreTrainedModel, *, folder: Path, seed: int = 0
) -> Path:
    """Write its two files below a folder, once; a pure function of adapter and seed.

    Returns:
        The adapter's directory.
    """
    target = folder / f"adapter-{adapter.name}-{seed}"
    if not (target / CONFIG_FILE).exists():
        is_language_model = adapter.model.model_type == "language_model"
        task = TaskType.CAUSAL_LM if is_language_model else TaskType.TOKEN_CLS
        fields: dict[str, object] = {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": "all-linear",
            **adapter.fields,
        }
        model = get_peft_model(base, LoraConfig(task_type=task, **fields))
        _fill(model, generator=torch.Generator().manual_seed(100 + seed))
        model.save_pretrained(str(target))
    return target


@torch.no_grad()
def _fill(model: nn.Module, *, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            # Factors about as large as a trained adapter's; what has a value of its own (magnitudes, whole modules) moves around it.
            parameter.copy_(
                0.15 * noise
                if ".lora_A." in name or ".lora_B." in name
                else parameter + 0.1 * noise
            )


def read_adapter(folder: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Both files of a directory."""
    config: dict[str, object] = json.loads((folder / CONFIG_FILE).read_text())
    return config, load_file(folder / WEIGHTS_FILE)


def save_adapter(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], *, folder: Path
) -> Path:
    """Both files, as given."""
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS_FILE,
        {"format": "pt"},
    )
    return folder
