"""Names of an adapter's parameters: Megatron's, where they lie beside their layer, and those of an ``adapter_model.safetensors``."""

from collections.abc import Callable, Collection

from temper_engine_megatron.bridge_compat import MappingKind, WeightMapping

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the name of every tensor of an adapter."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The two files of an adapter."""

ADAPTER_MODULE = "adapter"
"""Submodule of a linear layer that holds what lies beside it, by the last part of Hugging Face's module name."""
TRAINED_WEIGHT, TRAINED_BIAS = "trained_weight", "trained_bias"
"""Parameters of the output layer that are trained in the place of its own."""
ATTENTION_LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj")
DENSE_LINEARS = (*ATTENTION_LINEARS, "mlp.linear_fc1", "mlp.linear_fc2")
"""Linear layers of a decoder layer that may have an adapter beside them."""
EXPERTS_PATH = "mlp.experts"
"""A decoder layer's module with its experts."""
EXPERT_LINEARS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
"""By the tensor in which transformers joins the matrices of all experts of a layer, what each expert calls its own. Where both are adapted,
PEFT's wrapper of the first one lies inside that of the second."""


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter, by Megatron's name, is an adapter's own."""
    return f".{ADAPTER_MODULE}." in name or name in (
        f"output_layer.{TRAINED_WEIGHT}",
        f"output_layer.{TRAINED_BIAS}",
    )


def is_expert_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's, and made of a part for each expert."""
    return f".{EXPERTS_PATH}.{ADAPTER_MODULE}." in name


def is_trained_head(name: str) -> bool:
    """Whether it is the head that is trained in the place of the base's."""
    return name == f"output_layer.{TRAINED_WEIGHT}"


def find_peft_mapping(
    name: str, *, find_mapping: Callable[[str], WeightMapping], head: str, names: Collection[str]
) -> WeightMapping:
    """What PEFT's file calls an adapter's parameter.

    Args:
        name: Megatron's, with the layer's global number.
        find_mapping: of the weight of a layer of the base.
        head: Hugging Face's name of the output layer.
        names: of all parameters of the adapter.
    """
    if name.startswith("output_layer."):
        kind = "weight" if name.endswith(TRAINED_WEIGHT) else "bias"
        return WeightMapping(kind="plain", names=(f"{PEFT_PREFIX}{head}.{kind}",))
    host, _, rest = name.partition(f".{ADAPTER_MODULE}.")
    part, _, parameter = rest.partition(".")
    if is_expert_adapter(name):
        module = hf_experts_module(int(name.split(".")[2]), find_mapping=find_mapping)
        stem = peft_expert_prefix(
            module,
            part,
            joined=[
                other
                for other in EXPERT_LINEARS
                if f"{host}.{ADAPTER_MODULE}.{other}.{parameter}" in names
            ],
        )
        kinds: dict[str, MappingKind] = {
            "lora_A": "experts_a",
            "lora_B": "gated_experts_b" if part == "gate_up_proj" else "experts_b",
        }
        return WeightMapping(kind=kinds[parameter], names=(f"{stem}.{parameter}.weight",))
    module = next(
        module
        for module in hf_modules(find_mapping(f"{host}.weight"))
        if module.rpartition(".")[2] == part
    )
    suffix = "" if parameter == "lora_magnitude_vector" else ".weight"
    return WeightMapping(kind="plain", names=(f"{PEFT_PREFIX}{module}.{parameter}{suffix}",))


def hf_experts_module(number: int, *, find_mapping: Callable[[str], WeightMapping]) -> str:
    """The transformers module that holds the joined experts of a layer, by the layer's number."""
    first = find_mapping(
        f"decoder.layers.{number}.{EXPERTS_PATH}.local_experts.0.linear_fc1.weight"
    ).names[0]
    return first.partition(".experts.")[0] + ".experts"


def peft_expert_prefix(module: str, part: str, *, joined: Collection[str]) -> str:
    """What PEFT puts before ``.lora_A`` for one joined tensor of a module with experts.

    Args:
        module: of transformers, as its name ends in experts.
        part: which tensor.
        joined: those of this module that are adapted.
    """
    is_inside = part == "gate_up_proj" and "down_proj" in joined
    return f"{PEFT_PREFIX}{module}.base_layer" if is_inside else f"{PEFT_PREFIX}{module}"


def hf_modules(recipe: WeightMapping) -> tuple[str, ...]:
    """Hugging Face modules that one of Megatron's weights is made of."""
    return tuple(name.removesuffix(".weight") for name in recipe.names)
