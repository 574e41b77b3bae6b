"""Convert Megatron-Core's names and fused matrices to Hugging Face's.

Input and output are full tensors, which are not loaded.

Query, key and value rows are grouped per query group (its queries, then its key, then its value);
``linear_fc1`` is the gate above the up projection. Knows the llama-like decoders: Llama, Mistral,
Qwen 2 and 3, and their mixtures of experts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from temper_legacy_shim.checkpoints.files.lazy import Element, LazyTensor, Rows, concatenated
from temper_legacy_shim.errors import DamagedFileError, LayoutError, UsageError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
_PLAIN = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    # The norm before attention and before the MLP: inside TransformerEngine's fused linear layers,
    # or alone.
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HF_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.down_proj\.weight")
_HF_EXPERT_OF_LAYER = re.compile(r"mlp\.experts\.(\d+)\.down_proj\.weight")
_VALUE_HEAD = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}
_PADDED = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The numbers of a model's config that fix how its matrices are laid out."""

    num_heads: int
    num_groups: int
    head_dim: int
    num_layers: int
    vocab_size: int
    num_experts: int | None
    """Experts per layer; None if the config does not contain it."""

    @classmethod
    def of(cls, config: Mapping[str, object], *, source: str) -> "Geometry":
        """Build the geometry from a Hugging Face config.

        Raises:
            UsageError: a number is missing.
        """

        def number(name: str, default: int | None = None) -> int:
            value = config.get(name, default)
            if value is None and default is not None:
                value = default
            if not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"{source} says {name} = {value!r}, but a positive number is needed: give the "
                    "model's own --hf-config."
                )
            return value

        heads = number("num_attention_heads")
        has_experts = next((name for name in _NUM_EXPERTS if config.get(name) is not None), None)
        return cls(
            num_heads=heads,
            num_groups=number("num_key_value_heads", heads),
            head_dim=number("head_dim", max(1, number("hidden_size") // heads)),
            num_layers=number("num_hidden_layers"),
            vocab_size=number("vocab_size"),
            num_experts=None if has_experts is None else number(has_experts),
        )


def to_hf(
    tensors: Mapping[str, LazyTensor],
    geometry: Geometry,
    *,
    where: Path,
    is_value_model: bool = False,
) -> dict[str, LazyTensor]:
    """Return Hugging Face names and matrices for a whole model.

    Args:
        tensors: under Megatron's names with global layer numbers; layers may also be stacked along
            a first dimension.
        geometry: of the model's config.
        where: for errors.
        is_value_model: the output layer is a value head of one row.

    Raises:
        LayoutError: a name is not known.
        DamagedFileError: a shape does not fit the config.
    """
    converted: dict[str, LazyTensor] = {}
    for name, tensor in unstacked(tensors, geometry, where=where):
        for hf_name, hf_tensor in _convert(
            name, tensor, geometry, where=where, is_value_model=is_value_model
        ):
            if hf_name in converted:
                raise DamagedFileError(
                    f"{where}: {name} becomes {hf_name}, which is there already: both layer-norm "
                    "namings in one model."
                )
            converted[hf_name] = hf_tensor
    _check_experts(converted, geometry, where=where)
    return converted


def from_hf(weights: Mapping[str, LazyTensor], geometry: Geometry) -> dict[str, LazyTensor]:
    """Return full matrices under Megatron's names: the inverse of ``to_hf`` without padding."""
    made = {
        name: weights[hf] for name, hf in (*_TOP.items(), *_VALUE_HEAD.items()) if hf in weights
    }
    plain = {hf: name for name, hf in reversed(_PLAIN.items())}
    for layer in range(geometry.num_layers):
        prefix, to = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        made |= {to + plain[name]: tensor for name, tensor in own.items() if name in plain}
        for end in ("weight", "bias"):
            attention = [
                own[name]
                for name in (f"self_attn.{each}_proj.{end}" for each in "qkv")
                if name in own
            ]
            if len(attention) == 3:
                made[f"{to}self_attention.linear_qkv.{end}"] = _fused_qkv(attention, geometry)
        for other, target in _gated_modules(own):
            for end in ("weight", "bias"):
                gated = [
                    own[name]
                    for name in (f"{other}gate_proj.{end}", f"{other}up_proj.{end}")
                    if name in own
                ]
                if len(gated) == 2:
                    made[f"{to}{target}linear_fc1.{end}"] = concatenated(gated, dim=0)
            if f"{other}down_proj.weight" in own:
                made[f"{to}{target}linear_fc2.weight"] = own[f"{other}down_proj.weight"]
    return made


def _gated_modules(own: Mapping[str, LazyTensor]) -> Iterator[tuple[str, str]]:
    """Yield the (Hugging Face, Megatron) prefixes of a layer's gated MLPs."""
    yield "mlp.", "mlp."
    yield "mlp.shared_expert.", "mlp.shared_experts."
    for match in filter(None, map(_HF_EXPERT_OF_LAYER.fullmatch, own)):
        yield f"mlp.experts.{match[1]}.", f"mlp.experts.local_experts.{match[1]}."


def _fused_qkv(parts: Sequence[LazyTensor], geometry: Geometry) -> LazyTensor:
    """Return the rows of a query group: queries, key, value."""
    d, per_group = geometry.head_dim, geometry.num_heads // geometry.num_groups
    sizes, starts = (
        (per_group * d, d, d),
        (0, parts[0].shape[0], parts[0].shape[0] + parts[1].shape[0]),
    )
    spans = [
        (s + g * n, s + (g + 1) * n)
        for g in range(geometry.num_groups)
        for s, n in zip(starts, sizes, strict=True)
    ]
    return Rows(concatenated(parts, dim=0), tuple(spans))


def _check_experts(converted: Mapping[str, LazyTensor], geometry: Geometry, *, where: Path) -> None:
    of_layer: dict[str, set[int]] = {}
    for match in filter(None, map(_HF_EXPERT.fullmatch, converted)):
        of_layer.setdefault(match[1], set()).add(int(match[2]))
    expected = geometry.num_experts
    for layer, result in of_layer.items():
        if expected is not None and result != set(range(expected)):
            raise DamagedFileError(
                f"{where}: layer {layer} has {len(result)} experts (up to number {max(result)}), "
                f"but the config has {expected}. 0.4.0 saved those of its first data-parallel rank "
                "alone; otherwise copy every rank's folder here."
            )


def unstacked(
    tensors: Mapping[str, LazyTensor], geometry: Geometry, *, where: Path
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield single layers; a stacked name has no number after ``layers``.

    Raises:
        DamagedFileError: a stack has another number of layers than the config.
    """
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers.") and not _LAYER.fullmatch(name):
            if not tensor.shape or tensor.shape[0] != geometry.num_layers:
                raise DamagedFileError(
                    f"{where}: {name} has shape {tensor.shape}, but the config has "
                    f"{geometry.num_layers} layers."
                )
            rest = name.removeprefix("decoder.layers.")
            for layer in range(geometry.num_layers):
                yield from _unstacked_experts(
                    f"decoder.layers.{layer}.{rest}", Element(tensor, layer)
                )
        else:
            yield from _unstacked_experts(name, tensor)


def _unstacked_experts(name: str, tensor: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
    """Split ``mlp.experts.experts.linear_fc1.weight`` [E, ...] into one tensor per expert."""
    result = re.fullmatch(
        r"(decoder\.layers\.\d+\.mlp\.experts)\.experts\.(linear_fc[12])\.weight", name
    )
    if result is None:
        yield name, tensor
        return
    for expert in range(tensor.shape[0]):
        yield f"{result[1]}.local_experts.{expert}.{result[2]}.weight", Element(tensor, expert)


def _convert(
    name: str, tensor: LazyTensor, geometry: Geometry, *, where: Path, is_value_model: bool
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield a parameter under its name in Hugging Face, or the parts that it divides into.

    Query, key and value are one matrix in Megatron, and gate and up another. The output layer of a
    value model is a single row.
    """
    layer = _LAYER.fullmatch(name)
    if layer is None:
        if name == "output_layer.weight" and (is_value_model or tensor.shape[0] == 1):
            yield "score.weight", tensor
        elif name == "output_layer.bias" and tensor.shape == (1,):
            yield "score.bias", tensor
        elif name in _TOP:
            yield _TOP[name], _unpadded(_TOP[name], tensor, geometry, where=where)
        else:
            raise LayoutError(
                f"{where}: {name} is of no model that is known here (Llama, Mistral, Qwen 2 and 3, "
                "and their MoE)."
            )
        return
    prefix, rest = f"model.layers.{layer[1]}.", layer[2]
    if int(layer[1]) >= geometry.num_layers:
        raise DamagedFileError(
            f"{where}: {name} is of a layer that the config ({geometry.num_layers} layers) does "
            "not have."
        )
    if rest in _PLAIN:
        yield prefix + _PLAIN[rest], tensor
    elif rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        end = rest.rpartition(".")[2]
        for projection, part in split_qkv(tensor, geometry, name=name, where=where):
            yield f"{prefix}self_attn.{projection}.{end}", part
    elif rest in ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"):
        yield from _gate_and_up(
            prefix + "mlp.", tensor, end=rest.rpartition(".")[2], name=name, where=where
        )
    elif rest == "mlp.shared_experts.linear_fc1.weight":
        yield from _gate_and_up(
            prefix + "mlp.shared_expert.", tensor, end="weight", name=name, where=where
        )
    elif (expert := _expert_of(rest)) is not None:
        if expert.matrix == "linear_fc2":
            yield f"{prefix}mlp.experts.{expert.number}.down_proj.weight", tensor
        else:
            yield from _gate_and_up(
                f"{prefix}mlp.experts.{expert.number}.",
                tensor,
                end="weight",
                name=name,
                where=where,
            )
    else:
        raise LayoutError(
            f"{where}: {name} is of no model that is known here (Llama, Mistral, Qwen 2 and 3, and "
            "their MoE)."
        )


@dataclass(frozen=True, slots=True)
class _ExpertMatrix:
    number: int
    matrix: str


def _expert_of(rest: str) -> _ExpertMatrix | None:
    """Return an expert's matrix, under either of Megatron's two namings."""
    if match := _EXPERT.fullmatch(rest):
        return _ExpertMatrix(int(match[1]), match[2])
    if match := _GROUPED.fullmatch(rest):
        return _ExpertMatrix(int(match[2]), match[1])
    return None


def _unpadded(name: str, tensor: LazyTensor, geometry: Geometry, *, where: Path) -> LazyTensor:
    if name not in _PADDED or tensor.shape[0] == geometry.vocab_size:
        return tensor
    if tensor.shape[0] < geometry.vocab_size:
        raise DamagedFileError(
            f"{where}: {name} has {tensor.shape[0]} rows, but the config has a vocabulary of "
            f"{geometry.vocab_size}."
        )
    return Rows(tensor, ((0, geometry.vocab_size),))


def split_qkv(
    tensor: LazyTensor, geometry: Geometry, *, name: str, where: Path
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the three projections of rows that are grouped per query group, in full heads."""
    per_group, d = geometry.num_heads // geometry.num_groups, geometry.head_dim
    rows = (per_group + 2) * d
    if tensor.shape[0] != geometry.num_groups * rows:
        raise DamagedFileError(
            f"{where}: {name} has {tensor.shape[0]} rows, but {geometry.num_heads} heads in "
            f"{geometry.num_groups} groups of {d} "
            f"make {geometry.num_groups * rows}: is this the model's config?"
        )
    bounds = {
        "q_proj": (0, per_group * d),
        "k_proj": (per_group * d, (per_group + 1) * d),
        "v_proj": ((per_group + 1) * d, rows),
    }
    for projection, (low, high) in bounds.items():
        yield (
            projection,
            Rows(
                tensor, tuple((g * rows + low, g * rows + high) for g in range(geometry.num_groups))
            ),
        )


def _gate_and_up(
    prefix: str, tensor: LazyTensor, *, end: str, name: str, where: Path
) -> Iterator[tuple[str, LazyTensor]]:
    rows = tensor.shape[0]
    if rows % 2:
        raise DamagedFileError(
            f"{where}: {name} has {rows} rows, but a gate and an up projection of one size are "
            "expected."
        )
    yield f"{prefix}gate_proj.{end}", Rows(tensor, ((0, rows // 2),))
    yield f"{prefix}up_proj.{end}", Rows(tensor, ((rows // 2, rows),))


EXPERT = re.compile(
    r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight"
)
"""(layer, expert, matrix) of an expert's weight, with global numbers."""
_OF_A_LAYER = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_Names = tuple[str, ...]
_NORM = ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
_ATTENTION: _Names = ("linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")
_MLP: _Names = ("linear_fc1", "linear_fc2", "router", "experts", "shared_experts")
_SHARED_EXPERTS: _Names = ("gate_weight", "linear_fc1", "linear_fc2")
_PARTS: _Names = ("weight", "bias", "adapter")
_ADAPTERS: _Names = (
    "adapter_q",
    "adapter_k",
    "adapter_v",
    "adapter_up",
    "adapter_gate",
    "linear_in",
    "linear_out",
    "weight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Differences between the ways to build the same layer."""

    norm_is_inside: bool
    """The norm before attention is part of TransformerEngine's linear layer."""
    is_grouped: bool
    """All experts' first matrices precede their second ones, not expert by expert."""

    @classmethod
    def every(cls, *, with_experts: bool) -> "Iterator[Order]":
        """Yield all that can be told apart."""
        for is_grouped in (True, False) if with_experts else (False,):
            for norm_is_inside in (True, False):
                yield cls(norm_is_inside=norm_is_inside, is_grouped=is_grouped)


def sort_by_order(names: Iterable[str], order: Order) -> list[str]:
    """Return a layer's parameters by relative name, in Megatron's order of modules."""
    return sorted(names, key=lambda name: _position(name, order))


def _position(name: str, order: Order) -> tuple[int, ...]:
    """Return a sort key: the input norm, attention, the norm of the MLP, then the MLP."""
    if name in _NORM:
        return (1, _ATTENTION.index("linear_qkv"), -1) if order.norm_is_inside else (0,)
    if name in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
        return (2,)
    if expert := _OF_A_LAYER.fullmatch(name):
        number, matrix = int(expert[1]), int(expert[2] == "linear_fc2")
        return (
            3,
            _MLP.index("experts"),
            *((matrix, number) if order.is_grouped else (number, matrix)),
        )
    part, *rest = name.split(".")
    is_attention = part == "self_attention"
    modules = [_ATTENTION if is_attention else _MLP]
    modules += [_SHARED_EXPERTS] if "shared_experts" in rest else []
    known = (*modules, _PARTS, _ADAPTERS, _ADAPTERS)
    return (
        1 if is_attention else 3,
        *(_index(names, piece) for names, piece in zip(known, rest, strict=False)),
    )


def _index(names: _Names, name: str) -> int:
    """Return the position of a name; unknown names are last, so that the layout does not fit."""
    return names.index(name) if name in names else len(names)
