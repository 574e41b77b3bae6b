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
    """A tiny adapter; none of its tensors is zero, so that losing one changes the numbers."""

    name: str
    """Name of its directory and id in test names."""
    model: TinyModel
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of PEFT's LoraConfig; defaults are rank 4 and alpha 6 on all linear layers."""
    seed: int = 0
    """Added to the seed of `write_adapter`.

    Some seeds put a token of a MoE model so close to the boundary between two experts that rounding
    changes its expert.
    """


def write_adapter(
    adapter: TinyAdapter, base: PreTrainedModel, *, folder: Path, seed: int = 0
) -> Path:
    """Write an adapter's config and weights, unless an earlier call has written them.

    Args:
        adapter: The adapter.
        base: Its base model, which PEFT changes.
        folder: Folder of the adapters' directories.
        seed: Seed for the values; the adapter's own seed is added.

    Returns:
        The adapter's directory.
    """
    seed += adapter.seed
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
            # LoRA factors get about the magnitude of a trained adapter's. Other parameters, such as
            # DoRA magnitudes and `modules_to_save`, start at a meaningful value and are perturbed.
            parameter.copy_(
                0.15 * noise
                if ".lora_A." in name or ".lora_B." in name
                else parameter + 0.1 * noise
            )


def read_adapter(folder: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return configuration and tensors of an adapter directory."""
    config: dict[str, object] = json.loads((folder / CONFIG_FILE).read_text())
    return config, load_file(folder / WEIGHTS_FILE)


def save_adapter(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], *, folder: Path
) -> Path:
    """Write configuration and tensors to a new directory, and return it."""
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS_FILE,
        {"format": "pt"},
    )
    return folder
