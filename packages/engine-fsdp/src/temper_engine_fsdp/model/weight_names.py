"""Weight names in Hugging Face files, and adapter names in PEFT files; joins tensors of files."""

import re
from collections.abc import Collection, Mapping
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from temper_engine_api.adapter_checks import PEFT_PREFIX
from temper_engine_api.errors import WeightError
from temper_engine_api.file_names import FileNames, find_file_names
from temper_engine_api.model_files import ModelFiles
from temper_engine_api.specs import ModelSpec

ParameterT = TypeVar("ParameterT")


def find_model_files(spec: ModelSpec) -> ModelFiles | None:
    """Find the safetensors files of a model; return None if there are none.

    Raises:
        CapabilityError: If the quantization of the weights is not supported.
        WeightError: If weights are quantized and in files of another format.
    """
    files = None if spec.path is None else ModelFiles(spec.path, open_file=safe_open)
    if files is not None and files.is_quantized and not files:
        raise WeightError(
            f"{spec.path} has quantized weights, but no safetensors files, the only ones that can "
            "be dequantized: convert the weights to bf16."
        )
    return files or None


def read_file_names(hf: PreTrainedModel, *, files: Collection[str] = ()) -> FileNames:
    """Find out how transformers would save the tensors of a model; see `find_file_names`.

    Args:
        hf: The model, which may be on the meta device.
        files: Tensor names in the model's files.
    """
    return find_file_names(
        {name: tensor.shape for name, tensor in hf.state_dict().items()},
        model_type=hf.config.model_type,
        revert=lambda tensors: _revert_conversions(hf, tensors),
        files=files,
    )


def _revert_conversions(hf: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors from their form in memory to that in files."""
    # Imported here, because it is not part of transformers' documented interface.
    from transformers.core_model_loading import revert_weight_conversion

    # transformers remembers the prefixes of the files that a model was loaded from. The model is
    # exported as the class that was built, without them.
    hf._weight_conversions = None
    reverted: dict[str, Tensor] = revert_weight_conversion(hf, tensors)
    return reverted


class PartJoiner:
    """Joins the parts of tensors, such as experts, which may arrive in any order."""

    def __init__(self, shapes: Mapping[str, torch.Size], *, file_names: FileNames) -> None:
        self._shapes = shapes
        self._file_names = file_names
        self._tensor_names = {
            part: name
            for name, shape in shapes.items()
            for part, _ in file_names.list_shapes(name, shape)
        }
        self._incomplete: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}

    def add(self, part: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Add a part; return the name and full tensor once its last part has arrived.

        Parts with an unknown name or shape are skipped: the caller checks all names and shapes.
        """
        name = self._tensor_names.get(part)
        if name is None:
            return None
        if tensor.shape == self._shapes[name]:  # the tensor is its only part
            return name, tensor
        if name not in self._incomplete:
            full = torch.empty(self._shapes[name], dtype=tensor.dtype, device=tensor.device)
            self._incomplete[name] = full, dict(self._file_names.split(name, full))
        full, missing = self._incomplete[name]
        if part in missing and missing[part].shape == tensor.shape:
            missing.pop(part).copy_(tensor)
        if missing:
            return None
        del self._incomplete[name]
        return name, full


_MODULES_TO_SAVE, _MAGNITUDE = ".modules_to_save.default.", ".lora_magnitude_vector.default.weight"
_ADAPTER_PARTS = (".lora_A.default.", ".lora_B.default.", _MAGNITUDE, _MODULES_TO_SAVE)


def is_adapter_parameter(name: str) -> bool:
    """Return True if a parameter belongs to the adapter."""
    return any(part in name for part in _ADAPTER_PARTS)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a base weight in a model with an adapter."""
    # PEFT nests one wrapper per expert tensor of a module, hence several `.base_layer`.
    return re.sub(r"(\.base_layer)+\.", ".", name).replace(".original_module.", ".")


def peft_name(name: str) -> str:
    """Return the name of an adapter parameter in PEFT files."""
    bare = name.replace(_MODULES_TO_SAVE, ".").replace(_MAGNITUDE, ".lora_magnitude_vector")
    return PEFT_PREFIX + bare.replace(".default.", ".")


def split_adapter_parameters(
    parameters: Mapping[str, ParameterT],
) -> tuple[dict[str, ParameterT], dict[str, ParameterT]]:
    """Split parameters into two dicts: base weights and adapter weights.

    Base weights are keyed by their Hugging Face name, adapter weights by their PEFT name.
    """
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
