"""Names of an adapter's parameters: Megatron's, where they lie beside their layer, and those of an ``adapter_model.safetensors``."""

from collections.abc import Callable

from temper_engine_megatron.bridge_compat import Recipe

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the name of every tensor of an adapter."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The two files of an adapter."""

BESIDE = "adapter"
"""Submodule of a linear layer that holds what lies beside it, by the last part of Hugging Face's module name."""
TRAINED_WEIGHT, TRAINED_BIAS = "trained_weight", "trained_bias"
"""Parameters of the output layer that are trained in the place of its own."""
ATTENTION_HOSTS = ("self_attention.linear_qkv", "self_attention.linear_proj")
DENSE_HOSTS = (*ATTENTION_HOSTS, "mlp.linear_fc1", "mlp.linear_fc2")
"""Linear layers of a decoder layer that may have an adapter beside them; experts may not, see decision 19."""


def is_of_adapter(name: str) -> bool:
    """Whether a parameter, by Megatron's name, is an adapter's own."""
    return f".{BESIDE}." in name or name in (f"output_layer.{TRAINED_WEIGHT}", f"output_layer.{TRAINED_BIAS}")


def is_trained_head(name: str) -> bool:
    """Whether it is the head that is trained in the place of the base's."""
    return name == f"output_layer.{TRAINED_WEIGHT}"


def peft_recipe(name: str, *, recipe_of: Callable[[str], Recipe], head: str) -> Recipe:
    """What PEFT's file calls an adapter's parameter.

    Args:
        name: Megatron's, with the layer's global number.
        recipe_of: of the weight of a layer of the base.
        head: Hugging Face's name of the output layer.
    """
    if name.startswith("output_layer."):
        kind = "weight" if name.endswith(TRAINED_WEIGHT) else "bias"
        return Recipe(kind="plain", names=(f"{PEFT_PREFIX}{head}.{kind}",))
    host, _, rest = name.partition(f".{BESIDE}.")
    part, _, parameter = rest.partition(".")
    module = next(module for module in modules_of(recipe_of(f"{host}.weight")) if module.rpartition(".")[2] == part)
    suffix = "" if parameter == "lora_magnitude_vector" else ".weight"
    return Recipe(kind="plain", names=(f"{PEFT_PREFIX}{module}.{parameter}{suffix}",))


def modules_of(recipe: Recipe) -> tuple[str, ...]:
    """Hugging Face modules that one of Megatron's weights is made of."""
    return tuple(name.removesuffix(".weight") for name in recipe.names)
