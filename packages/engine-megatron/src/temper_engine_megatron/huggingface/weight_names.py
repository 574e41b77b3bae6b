"""Weight names: experts as in Hugging Face files, and adapters as in PEFT files.

Checkpoints of FSDPEngine have joined experts, as transformers has them in memory. In Megatron's
model, adapter parameters are in a submodule of the layer that they adapt.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from temper_engine_api.adapter_checks import PEFT_PREFIX
from temper_engine_api.checkpoint.saved_state import COUNT, SavedState
from temper_engine_api.file_names import FileNames
from temper_engine_megatron.bridge_compat import MappingKind, WeightMapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlice:
    """Location of a file's expert tensor in its layer's joined tensor."""

    joined: str
    """Name of the joined tensor."""
    expert: int
    """Index in its first dimension."""
    index: int
    """Index of its rows among `num_matrices` equal groups."""
    num_matrices: int


def find_expert_slice(name: str, file_names: FileNames) -> ExpertSlice | None:
    """Find the place of an expert's tensor in memory from its name in files.

    Returns:
        None if the tensor does not belong to an expert.
    """
    owner = file_names.find_owner(name)
    if owner is None or owner[1].expert is None:
        return None
    joined, part = owner
    assert part.expert is not None
    return ExpertSlice(
        joined=joined, expert=part.expert, index=part.chunk, num_matrices=part.num_chunks
    )


def map_to_saved_names(saved: SavedState, file_names: FileNames) -> dict[str, str]:
    """Map names in files to names in a checkpoint, which may have joined tensors."""
    return {file_name: name for name, file_name, _ in _iterate_file_tensors(saved, file_names)}


def _iterate_file_tensors(
    saved: SavedState, file_names: FileNames
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (name in the checkpoint, name in files, shape in files)."""
    for name, shape in saved.weights.items():
        for file_name, file_shape in file_names.list_shapes(name, shape):
            yield name, file_name, tuple(file_shape)


def split_saved_experts(saved: SavedState, file_names: FileNames) -> SavedState:
    """Return a view of a saved state under names in files.

    Keeps the last joined tensor, so that its matrices cost one read if they are read in a row.
    """
    saved_name_of = map_to_saved_names(saved, file_names)
    shapes = {file_name: shape for _, file_name, shape in _iterate_file_tensors(saved, file_names)}
    last_read: dict[str, tuple[str, dict[str, Tensor]]] = {}

    def read(kind: str, file_name: str) -> Tensor:
        saved_name = saved_name_of[file_name]
        # All experts of a tensor have the same update count.
        if saved_name == file_name or kind == COUNT:
            return saved.read(kind, saved_name)
        last_name, matrices = last_read.get(kind, ("", {}))
        if last_name != saved_name:
            matrices = dict(file_names.split(saved_name, saved.read(kind, saved_name)))
            last_read[kind] = saved_name, matrices
        return matrices[file_name]

    return replace(saved, weights=shapes, read=read)


ADAPTER_MODULE = "adapter"
"""Submodule with a linear layer's adapters, by the last part of their Hugging Face module name."""
TRAINED_WEIGHT, TRAINED_BIAS = "trained_weight", "trained_bias"
"""Parameters of the output layer that an adapter trains in place of its own."""
ATTENTION_LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj")
LATENT_LINEARS = (
    *("self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj"),
    *("self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj"),
    "self_attention.linear_proj",
)
FULL_RANK_LATENT_LINEARS = ("self_attention.linear_q_proj", *LATENT_LINEARS[2:])
"""Linear layers of latent attention, with compressed queries and without."""
MIXER = "self_attention.mixer."
"""Start of the paths of modules in linear attention and Mamba layers."""
_QWEN3_5_LINEARS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
MIXER_LINEARS: Mapping[str, tuple[str, ...]] = {
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
    "qwen3_5_text": _QWEN3_5_LINEARS,
    "qwen3_5_moe_text": _QWEN3_5_LINEARS,
    "nemotron_h": ("in_proj",),
}
"""Linear layers of linear attention and Mamba layers that can have adapters, by model type.

PEFT refuses `out_proj` of Mamba layers: the fused kernel of mamba-ssm multiplies with its weight
and does not call the module, so an adapter would have no effect in training."""
MLP_LINEARS = ("mlp.linear_fc1", "mlp.linear_fc2")
"""Linear layers of an MLP without experts that can have adapters."""
SHARED_EXPERT_LINEARS = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
"""Linear layers of the experts that process every token; they can have adapters."""
SHARED_EXPERT_GATE = "shared_expert_gate"
"""Last part of the module that weights the output of shared experts, a linear layer with one row.

Megatron has a parameter in its place."""
EXPERTS_PATH = "mlp.experts"
"""Module of a decoder layer with its experts."""
EXPERT_LINEARS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
"""Each expert's linear layer, by the joined tensor that contains it.

If both tensors are adapted, PEFT wraps them in this order, so the first wrapper is inside the
second."""


def is_adapter_parameter(name: str) -> bool:
    """Return True for Megatron names of adapter parameters."""
    return f".{ADAPTER_MODULE}." in name or name in (
        f"output_layer.{TRAINED_WEIGHT}",
        f"output_layer.{TRAINED_BIAS}",
    )


def is_expert_adapter(name: str) -> bool:
    """Return True for Megatron names of adapter parameters with one entry per expert."""
    return f".{EXPERTS_PATH}.{ADAPTER_MODULE}." in name


def is_trained_head(name: str) -> bool:
    """Return True for the head weight that is trained in place of the base model's."""
    return name == f"output_layer.{TRAINED_WEIGHT}"


def find_peft_mapping(
    name: str,
    *,
    find_mapping: Callable[[str], WeightMapping],
    head: str,
    names: Collection[str],
    file_names: FileNames,
) -> WeightMapping:
    """Return the PEFT name of an adapter parameter.

    Args:
        name: Megatron name with the global layer number.
        find_mapping: Returns the mapping of a base weight by Megatron name.
        head: Hugging Face name of the output layer.
        names: Megatron names of all adapter parameters.
        file_names: Names in files of the tensors in memory.
    """
    if name.startswith("output_layer."):
        kind = "weight" if name.endswith(TRAINED_WEIGHT) else "bias"
        return WeightMapping(kind="plain", names=(f"{PEFT_PREFIX}{head}.{kind}",))
    linear, _, rest = name.partition(f".{ADAPTER_MODULE}.")
    target, _, parameter = rest.partition(".")
    if is_expert_adapter(name):
        module = hf_experts_module(
            int(name.split(".")[2]), find_mapping=find_mapping, file_names=file_names
        )
        prefix = peft_expert_prefix(
            module,
            target,
            adapted=[
                other
                for other in EXPERT_LINEARS
                if f"{linear}.{ADAPTER_MODULE}.{other}.{parameter}" in names
            ],
        )
        kinds: dict[str, MappingKind] = {
            "lora_A": "experts_a",
            "lora_B": "gated_experts_b" if target == "gate_up_proj" else "experts_b",
        }
        return WeightMapping(kind=kinds[parameter], names=(f"{prefix}.{parameter}.weight",))
    module = next(
        module
        for module in hf_modules(find_mapping(f"{linear}.weight"), file_names)
        if module.rpartition(".")[2] == target
    )
    suffix = "" if parameter == "lora_magnitude_vector" else ".weight"
    return WeightMapping(kind="plain", names=(f"{PEFT_PREFIX}{module}.{parameter}{suffix}",))


def hf_experts_module(
    layer: int, *, find_mapping: Callable[[str], WeightMapping], file_names: FileNames
) -> str:
    """Return the transformers module with the joined experts of a layer, by its number."""
    first = f"decoder.layers.{layer}.{EXPERTS_PATH}.local_experts.0.linear_fc1.weight"
    owner = file_names.find_owner(find_mapping(first).names[0])
    assert owner is not None, "transformers joins the experts of a layer"
    return owner[0].rpartition(".")[0]


def peft_expert_prefix(module: str, target: str, *, adapted: Collection[str]) -> str:
    """Return the name that PEFT puts before `.lora_A` for all experts' stacked tensor.

    Args:
        module: Transformers module with the experts.
        target: Last part of the tensor's name.
        adapted: Last name parts of all adapted tensors in this module.
    """
    is_inner = target == "gate_up_proj" and "down_proj" in adapted
    return f"{PEFT_PREFIX}{module}.base_layer" if is_inner else f"{PEFT_PREFIX}{module}"


def hf_modules(mapping: WeightMapping, file_names: FileNames) -> tuple[str, ...]:
    """Return the transformers modules of one of Megatron's weights."""
    # Files of some models have other names than the modules in memory.
    owners = [file_names.find_owner(name) for name in mapping.names]
    return tuple(
        (name if owner is None else owner[0]).removesuffix(".weight")
        for name, owner in zip(mapping.names, owners, strict=True)
    )
