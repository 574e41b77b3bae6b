"""Experts under the names that Hugging Face files have, a tensor for each; transformers joins those of a layer in memory, gate above up."""

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from temper_engine_api.errors import CapabilityError
from temper_engine_fsdp.sharding.sharded_parameter import ShardedParameters

_PARTS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Of each expert, one above the other."""
_KNOWN_MODEL_TYPES = ("qwen2_moe", "qwen3_moe")
"""Model types whose files were seen to have these names; others have other ones, such as w1 and w3."""


def split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor by its names in files: what is joined, [experts, rows, columns], as views of its parts, anything else as it is."""
    layer, _, kind = name.rpartition(".experts.")
    if kind not in _PARTS:
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        for part_name, part in zip(_PARTS[kind], expert.chunk(len(_PARTS[kind])), strict=True):
            yield f"{layer}.experts.{number}.{part_name}.weight", part


def list_file_shapes(name: str, shape: torch.Size) -> list[tuple[str, torch.Size]]:
    """Names and shapes of the parts of one tensor."""
    return [
        (part_name, part.shape)
        for part_name, part in split_experts(name, torch.empty(shape, device="meta"))
    ]


def check_expert_names(config: PretrainedConfig, names: Iterable[str]) -> None:
    """Refuse a mixture whose names in files are not known.

    Raises:
        CapabilityError: naming the model type.
    """
    if config.model_type not in _KNOWN_MODEL_TYPES and any(
        name.rpartition(".experts.")[2] in _PARTS for name in names
    ):
        raise CapabilityError(
            "the weights of experts can be exported and loaded for the model types "
            f"{' and '.join(_KNOWN_MODEL_TYPES)}, but this is a "
            f"{config.model_type}, whose files name them otherwise."
        )


class ExpertJoiner:
    """Puts the parts of joined tensors together as they come, in whatever order."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes
        self._tensor_names = {
            part: name
            for name, shape in shapes.items()
            for part, _ in list_file_shapes(name, shape)
        }
        self._incomplete: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}

    def add(self, part: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """The whole tensor under its name in memory, once its last part has come.

        A part with an unknown name or another shape is passed over: the check of all names and shapes will tell of it.
        """
        name = self._tensor_names.get(part)
        if name is None or name == part:
            return (
                (part, tensor) if name is not None and tensor.shape == self._shapes[name] else None
            )
        if name not in self._incomplete:
            full = torch.empty(self._shapes[name], dtype=tensor.dtype, device=tensor.device)
            self._incomplete[name] = full, dict(split_experts(name, full))
        full, missing = self._incomplete[name]
        if part in missing and missing[part].shape == tensor.shape:
            missing.pop(part).copy_(tensor)
        if missing:
            return None
        del self._incomplete[name]
        return name, full


PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the name of every tensor of an adapter."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The two files of an adapter."""
INDEX_NAME = "model.safetensors.index.json"
"""Maps each tensor to its file where a model has several."""

_MODULES_TO_SAVE, _MAGNITUDE = ".modules_to_save.default.", ".lora_magnitude_vector.default.weight"
_ADAPTER_PARTS = (".lora_A.default.", ".lora_B.default.", _MAGNITUDE, _MODULES_TO_SAVE)


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter is an adapter's own."""
    return any(part in name for part in _ADAPTER_PARTS)


def hf_name(name: str) -> str:
    """Hugging Face's name of a weight."""
    # Wrappers of the tensors of one module with experts lie one inside the other.
    return re.sub(r"(\.base_layer)+\.", ".", name).replace(".original_module.", ".")


def peft_name(name: str) -> str:
    """An adapter's parameter as its safetensors file calls it."""
    bare = name.replace(_MODULES_TO_SAVE, ".").replace(_MAGNITUDE, ".lora_magnitude_vector")
    return PEFT_PREFIX + bare.replace(".default.", ".")


def split_adapter_parameters(
    parameters: ShardedParameters,
) -> tuple[ShardedParameters, ShardedParameters]:
    """The model's weights by Hugging Face name, and an adapter's parameters, if there are any, by PEFT name."""
    weights = {
        hf_name(name): parameter
        for name, parameter in parameters.items()
        if not is_adapter_parameter(name)
    }
    return weights, {
        peft_name(name): parameter
        for name, parameter in parameters.items()
        if is_adapter_parameter(name)
    }
