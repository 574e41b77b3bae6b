"""The order in which Megatron's modules make their parameters, which is the order of everything that its optimizers keep without names."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
"""(layer, expert, matrix) of an expert's weight, with global numbers."""
_OF_A_LAYER = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_Names = tuple[str, ...]
_NORM = ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
_ATTENTION: _Names = ("linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")
_MLP: _Names = ("linear_fc1", "linear_fc2", "router", "experts", "shared_experts")
_SHARED_EXPERTS: _Names = ("gate_weight", "linear_fc1", "linear_fc2")
_PARTS: _Names = ("weight", "bias", "adapter")
_ADAPTERS: _Names = ("adapter_q", "adapter_k", "adapter_v", "adapter_up", "adapter_gate", "linear_in", "linear_out", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What differs between the ways of building the same layer."""

    norm_is_inside: bool
    """The norm before attention is part of TransformerEngine's linear layer, and not the layer's first module."""
    is_grouped: bool
    """All experts' first matrices come before their second ones; otherwise an expert comes after the other."""

    @classmethod
    def every(cls, *, with_experts: bool) -> "Iterator[Order]":
        """All that can be told apart."""
        for is_grouped in (True, False) if with_experts else (False,):
            for norm_is_inside in (True, False):
                yield cls(norm_is_inside=norm_is_inside, is_grouped=is_grouped)


def in_order(names: Iterable[str], order: Order) -> list[str]:
    """A layer's parameters, by their names inside it, in the order of its modules.

    In a layer the norm, attention (where the output projection is made before that of queries, keys and values), another norm, and the MLP.
    """
    return sorted(names, key=lambda name: _place(name, order))


def _place(name: str, order: Order) -> tuple[int, ...]:
    if name in _NORM:
        return (1, _ATTENTION.index("linear_qkv"), -1) if order.norm_is_inside else (0,)
    if name in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
        return (2,)
    if expert := _OF_A_LAYER.fullmatch(name):
        number, matrix = int(expert[1]), int(expert[2] == "linear_fc2")
        return (3, _MLP.index("experts"), *((matrix, number) if order.is_grouped else (number, matrix)))
    part, *rest = name.split(".")
    is_attention = part == "self_attention"
    modules = [_ATTENTION if is_attention else _MLP]
    modules += [_SHARED_EXPERTS] if "shared_experts" in rest else []
    known = (*modules, _PARTS, _ADAPTERS, _ADAPTERS)
    return (1 if is_attention else 3, *(_index(names, piece) for names, piece in zip(known, rest, strict=False)))


def _index(names: _Names, name: str) -> int:
    """Of what is not known behind all others: a layout with it does not fit, which is noticed."""
    return names.index(name) if name in names else len(names)
