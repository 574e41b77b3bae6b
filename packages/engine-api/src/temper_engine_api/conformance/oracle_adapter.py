"""The oracle's adapter: peft as its users call it, and seeded adapters as directories in its format."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from temper_engine_api.conformance.models import TinyModel
from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import LoraSpec
from temper_engine_api.weights import WeightEntry, check_complete

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


class OracleAdapter:
    """An adapter inside a model, by the methods of peft alone."""

    def __init__(self, model: PreTrainedModel, spec: LoraSpec) -> None:
        names = [name for name, _ in model.named_parameters()]
        unknown = [
            asked
            for asked in spec.target_parameters
            if not any(f".{name}".endswith(f".{asked}") for name in names)
        ]
        if unknown:
            raise ConfigError(
                f"lora.target_parameters names {unknown[0]}, which the model does not have."
            )
        self.peft = (
            _continued(model, spec)
            if spec.path is not None
            else get_peft_model(model, _config(spec))
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters, by their name in a PEFT file."""
        found = get_peft_model_state_dict(self.peft, state_dict=dict(self.peft.named_parameters()))
        return cast(dict[str, nn.Parameter], found)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of the whole model with the adapter in them, by Hugging Face name."""
        whole = copy.deepcopy(self.peft).merge_and_unload()
        yield from ((name, parameter.detach()) for name, parameter in whole.named_parameters())

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """Frozen weights by Hugging Face name."""
        trained = {id(parameter) for parameter in self.parameters().values()}
        return {
            re.sub(r"(\.base_layer)+\.", ".", name).replace(".original_module.", "."): parameter
            for name, parameter in self.peft.get_base_model().named_parameters()
            if id(parameter) not in trained
        }

    def disabled(self) -> AbstractContextManager[None]:
        """The base alone."""
        off: AbstractContextManager[None] = self.peft.disable_adapter()
        return off

    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Both files' content."""
        tensors = {
            name: parameter.detach().clone() for name, parameter in self.parameters().items()
        }
        return described(self.peft.peft_config["default"]), tensors

    def load(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Strict both ways."""
        ours, trained = described(self.peft.peft_config["default"]), self.parameters()
        for key in ("r", "lora_alpha", "use_rslora", "use_dora"):
            if config.get(key, ours[key]) != ours[key]:
                raise ConfigError(
                    f"the adapter to load has {key} {config[key]}, expected {ours[key]}."
                )
        check_complete(
            [_entry(n, t) for n, t in trained.items()], [_entry(n, t) for n, t in tensors.items()]
        )
        with torch.no_grad():
            for name, tensor in tensors.items():
                trained[name].copy_(tensor)


def described(config: LoraConfig) -> dict[str, object]:
    """What adapter_config.json holds."""
    fields = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    plain: dict[str, object] = json.loads(json.dumps(fields, default=str))
    return plain


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


def _config(spec: LoraSpec) -> LoraConfig:
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=spec.target_modules
        if isinstance(spec.target_modules, str)
        else list(spec.target_modules),
        exclude_modules=spec.exclude_modules or None,
        target_parameters=list(spec.target_parameters) or None,
        modules_to_save=list(spec.modules_to_save) or None,
        use_rslora=spec.rslora,
        use_dora=spec.dora,
    )


def _continued(model: PreTrainedModel, spec: LoraSpec) -> PeftModel:
    assert spec.path is not None
    config = LoraConfig.from_pretrained(spec.path)
    if config.target_parameters and spec.dropout:
        raise ConfigError(
            f"lora.dropout is {spec.dropout}, and PEFT has none on tensors of experts."
        )
    config.lora_dropout = spec.dropout
    return PeftModel.from_pretrained(model, spec.path, config=config, is_trainable=True)


def _entry(name: str, tensor: Tensor) -> WeightEntry:
    return WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
