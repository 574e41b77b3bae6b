"""Megatron-Bridge's adapters under Hugging Face's module names.

One adapter on a fused matrix becomes one per projection: they share A, and each takes its rows of B. That is the same product.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from temper_legacy_shim.checkpoints.adapters import Adapter, Pair
from temper_legacy_shim.checkpoints.lazy import Element, LazyTensor, Rows
from temper_legacy_shim.checkpoints.megatron_names import Geometry, split_qkv
from temper_legacy_shim.errors import DamagedFileError, LayoutError

MARK = ".adapter."
_NAME = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<module>.+)\.adapter\.(?:adapter_(?P<part>\w+)\.)?linear_(?P<side>in|out)\.weight"
)
_PLAIN = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}
_PARTS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    layer: int
    module: str
    part: str | None


def read_adapter(tensors: Mapping[str, LazyTensor], geometry: Geometry, *, where: Path, accepts_missing_layers: bool) -> Adapter:
    """The adapter of a whole model.

    Args:
        tensors: whole, under Megatron's names; those of the base may be among them.
        geometry: of the model's config.
        where: for errors.
        accepts_missing_layers: convert what is there where later layers have none.

    Raises:
        DamagedFileError: half a pair is missing, or layers have no adapter.
        LayoutError: a module is not known.
    """
    halves: dict[_Place, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if MARK not in name:
            continue
        match = _NAME.fullmatch(name)
        if match is None:
            raise LayoutError(f"{where}: {name} is of no adapter that is known here (LoRA and canonical LoRA of Megatron-Bridge).")
        if match["layer"] is not None:
            place = _Place(layer=int(match["layer"]), module=match["module"], part=match["part"])
            halves.setdefault(place, {})[match["side"]] = tensor
        else:
            for layer in range(tensor.shape[0]):
                halves.setdefault(_Place(layer=layer, module=match["module"], part=match["part"]), {})[match["side"]] = Element(
                    tensor, layer
                )
    _check_layers({place.layer for place in halves}, geometry, where=where, accepts_missing=accepts_missing_layers)
    pairs: dict[str, Pair] = {}
    for place, sides in halves.items():
        if sides.keys() != {"in", "out"}:
            raise DamagedFileError(f"{where}: the adapter of layer {place.layer}'s {place.module} lacks half: a file is of another save.")
        for module, up in _parts(place, sides["out"], geometry, where=where).items():
            pairs[f"model.layers.{place.layer}.{module}"] = Pair(down=sides["in"], up=up)
    return Adapter(pairs=pairs)


def _check_layers(layers: set[int], geometry: Geometry, *, where: Path, accepts_missing: bool) -> None:
    surplus = sorted(layer for layer in layers if layer >= geometry.num_layers)
    if surplus:
        raise DamagedFileError(f"{where}: there is an adapter of layer {surplus[0]}, but the config has {geometry.num_layers} layers.")
    missing = sorted(set(range(geometry.num_layers)) - layers)
    if missing and not accepts_missing:
        raise DamagedFileError(
            f"{where}: layers {missing[0]} to {missing[-1]} ({len(missing)} of {geometry.num_layers}) have no adapter in the files. Under "
            "virtual pipelining 0.7 saved the first chunk's adapters only alone;  --partial-adapter converts what is there."
        )


def _parts(place: _Place, up: LazyTensor, geometry: Geometry, *, where: Path) -> dict[str, LazyTensor]:
    if place.part is not None:
        if place.part not in _PARTS:
            raise LayoutError(f"{where}: adapter_{place.part} of {place.module} is not known here.")
        return {_PARTS[place.part]: up}
    if place.module in _PLAIN:
        return {_PLAIN[place.module]: up}
    if place.module == "self_attention.linear_qkv":
        rows = split_qkv(up, geometry, name=f"the adapter of layer {place.layer}'s linear_qkv", where=where)
        return {f"self_attn.{projection}": part for projection, part in rows}
    if place.module == "mlp.linear_fc1":
        half = up.shape[0] // 2
        return {"mlp.gate_proj": Rows(up, ((0, half),)), "mlp.up_proj": Rows(up, ((half, 2 * half),))}
    raise LayoutError(f"{where}: an adapter on {place.module} is not known here.")
