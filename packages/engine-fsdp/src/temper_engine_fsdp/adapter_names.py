"""Names of an adapter's parameters, and of the weights around which it lies, from their names in the model's own tree."""

import re

from temper_engine_fsdp.sharded import Parameters

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the name of every tensor of an adapter."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The two files of an adapter."""

_WHOLE, _MAGNITUDE = ".modules_to_save.default.", ".lora_magnitude_vector.default.weight"
_PARTS = (".lora_A.default.", ".lora_B.default.", _MAGNITUDE, _WHOLE)


def is_of_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's own."""
    return any(part in name for part in _PARTS)


def hf_name(name: str) -> str:
    """Hugging Face's name of a weight."""
    # Wrappers of the tensors of one module with experts lie one inside the other.
    return re.sub(r"(\.base_layer)+\.", ".", name).replace(".original_module.", ".")


def peft_name(name: str) -> str:
    """An adapter's parameter as its safetensors file calls it."""
    bare = name.replace(_WHOLE, ".").replace(_MAGNITUDE, ".lora_magnitude_vector")
    return PEFT_PREFIX + bare.replace(".default.", ".")


def weights_and_adapter(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """The model's weights by Hugging Face name, and an adapter's parameters, if there are any, by PEFT name."""
    weights = {hf_name(name): parameter for name, parameter in parameters.items() if not is_of_adapter(name)}
    return weights, {peft_name(name): parameter for name, parameter in parameters.items() if is_of_adapter(name)}
