"""The oracle's adapter, built with PEFT."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import cast

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn
from transformers import PreTrainedModel

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import LoraSpec
from temper_engine_api.weights import WeightEntry, check_weight_entries


class OracleAdapter:
    """An adapter inside a model, implemented with PEFT's public methods only."""

    def __init__(self, model: PreTrainedModel, spec: LoraSpec) -> None:
        names = [name for name, _ in model.named_parameters()]
        unknown = [
            target
            for target in spec.target_parameters
            if not any(f".{name}".endswith(f".{target}") for name in names)
        ]
        if unknown:
            raise ConfigError(
                f"lora.target_parameters names {unknown[0]}, which the model does not have."
            )
        self.peft = (
            _load_adapter(model, spec)
            if spec.path is not None
            else get_peft_model(model, _config(spec, model))
        )
        named = dict(self.peft.named_parameters())
        # Computed once, because PEFT looks through all modules.
        self._parameters = cast(
            dict[str, nn.Parameter], get_peft_model_state_dict(self.peft, state_dict=named)
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their names in a PEFT file."""
        return dict(self._parameters)

    def iterate_merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full model's weights with the adapter merged, by Hugging Face name."""
        # A copy, because merging changes the model in place and training continues with the
        # adapter.
        merged = copy.deepcopy(self.peft).merge_and_unload()
        yield from ((name, parameter.detach()) for name, parameter in merged.named_parameters())

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """Return the frozen weights by Hugging Face name."""
        trained = {id(parameter) for parameter in self.parameters().values()}
        return {
            re.sub(r"(\.base_layer)+\.", ".", name).replace(".original_module.", "."): parameter
            for name, parameter in self.peft.get_base_model().named_parameters()
            if id(parameter) not in trained
        }

    def disabled(self) -> AbstractContextManager[None]:
        """Return a context that disables the adapter."""
        off: AbstractContextManager[None] = self.peft.disable_adapter()
        return off

    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Return the contents of both files in a PEFT directory."""
        tensors = {
            name: parameter.detach().clone() for name, parameter in self.parameters().items()
        }
        return to_config_dict(self.peft.peft_config["default"]), tensors

    def load(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Load tensors; reject missing and unknown names and other scales."""
        own_config, trained = to_config_dict(self.peft.peft_config["default"]), self.parameters()
        for key in ("r", "lora_alpha", "use_rslora", "use_dora"):
            if config.get(key, own_config[key]) != own_config[key]:
                raise ConfigError(
                    f"the adapter to load has {key} {config[key]}, expected {own_config[key]}."
                )
        check_weight_entries(
            [_entry(n, t) for n, t in trained.items()], [_entry(n, t) for n, t in tensors.items()]
        )
        with torch.no_grad():
            for name, tensor in tensors.items():
                trained[name].copy_(tensor)


def to_config_dict(config: LoraConfig) -> dict[str, object]:
    """Convert a PEFT config to the dictionary that adapter_config.json contains."""
    fields = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    plain: dict[str, object] = json.loads(json.dumps(fields, default=str))
    return plain


def _config(spec: LoraSpec, model: PreTrainedModel) -> LoraConfig:
    linears = _list_linears(model) if spec.target_modules == "all-linear" else []
    config = LoraConfig(
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
    if any(name.endswith(".experts") for name, _ in model.named_modules()) and linears:
        # PEFT applies all-linear to experts as well in many mixtures, and drops dense layers and
        # shared experts. It adapts the weight of a linear layer as it adapts the layer.
        config.target_modules = set(linears)
        matched = [name for name in linears if check_target_module_exists(config, name)]
        config.target_modules = set()
        config.target_parameters = [
            *(f"{name}.weight" for name in matched),
            *spec.target_parameters,
        ]
    return config


def _list_linears(model: PreTrainedModel) -> list[str]:
    """Return the names of all linear layers except the head."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def _load_adapter(model: PreTrainedModel, spec: LoraSpec) -> PeftModel:
    assert spec.path is not None
    config = LoraConfig.from_pretrained(spec.path)
    if config.target_parameters and spec.dropout:
        raise ConfigError(
            f"lora.dropout is {spec.dropout}, but PEFT has no dropout on experts: set it to 0."
        )
    config.lora_dropout = spec.dropout
    return PeftModel.from_pretrained(model, spec.path, config=config, is_trainable=True)


def _entry(name: str, tensor: Tensor) -> WeightEntry:
    return WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
