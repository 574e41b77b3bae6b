"""Moments of Megatron's distributed checkpoints in buckets (``dp_reshardable``): a vector for each bucket of a model-parallel rank.

The checkpoint does not say how many tensor ranks and stages there were, nor which parameter lies where. Every layout that the number of
ranks allows is tried: the weights are cut up as it would have cut them, laid out in the order of Megatron's modules, and the layout is
believed only if all lengths fit and every float32 master, rounded, is its weight.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from temper_legacy_shim.checkpoints import megatron_names, megatron_ranks
from temper_legacy_shim.checkpoints.archive import Archive
from temper_legacy_shim.checkpoints.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.lazy import LazyTensor, Rows, Unflattened
from temper_legacy_shim.checkpoints.megatron_flat import ALIGNMENT, KINDS, is_master
from temper_legacy_shim.checkpoints.megatron_names import Geometry
from temper_legacy_shim.checkpoints.megatron_ranks import Chunks
from temper_legacy_shim.checkpoints.model import OldModel, model_names
from temper_legacy_shim.checkpoints.moments import is_buffer
from temper_legacy_shim.errors import LayoutError

_GROUP = r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(\d{1,6})\."
_VECTOR = re.compile(_GROUP + r"gbuf_idx_(\d{1,4})\.dtype_.+\.bucket_idx_(\d{1,6})\.(param|exp_avg|exp_avg_sq)")
_SETTINGS = re.compile(_GROUP + r"optimizer(?:/shard_.*)?")
_EMBEDDING, _NORM, _HEAD = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"
_HEAD_BIAS = "output_layer.bias"
_ATTENTION = ("linear_proj.weight", "linear_proj.bias", "linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_qkv.bias")
_FUSED = (
    *(f"self_attention.{name}" for name in (*_ATTENTION, "q_layernorm.weight", "k_layernorm.weight")),
    *(f"mlp.linear_fc1.{name}" for name in ("layer_norm_weight", "weight", "bias")),
    *(f"mlp.linear_fc2.{name}" for name in ("weight", "bias")),
)
"""A layer's parameters in the order of its modules, with TransformerEngine's norms inside the linear layers."""
_NORMS = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")

Bucket = Mapping[str, LazyTensor]
"""Vectors by kind."""
Masters = Mapping[str, Mapping[str, LazyTensor]]
"""By kind (param, exp_avg, exp_avg_sq) and name, or by name and kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    num_tensor: int
    num_stages: int
    num_virtual: int
    order: tuple[str, ...]


class _DoesNotFitError(Exception):
    """A layout is another one; tried and passed over."""


def read_buckets(model: OldModel) -> Masters:
    """Masters and moments by kind and Hugging Face name.

    Raises:
        LayoutError: there are no buckets, or no layout fits; for the receipt.
        DamagedFileError: a file is damaged.
    """
    found = _buckets(model)
    if not found:
        raise LayoutError("the distributed checkpoint holds none in model space (optimizer.state.exp_avg and exp_avg_sq by parameter)")
    assert model.config is not None, "Megatron's weights were read with it"
    geometry = Geometry.of(model.config, source="config.json")
    saved = model_names(DistCheckpoint(model.role.dist_folders[0]).tensors)
    if any(".experts." in name or ".adapter." in name for name in (*saved, *model.weights)):
        raise LayoutError("the distributed checkpoint holds buckets of experts or of an adapter, which can't be told apart")
    # Since 0.7 the weights lie in huggingface/ alone, unless they were asked for.
    whole = dict(megatron_names.unstacked(saved, geometry, where=model.role.path)) or megatron_names.from_hf(model.weights, geometry)
    weights = {name: tensor for name, tensor in whole.items() if not is_buffer(name)}
    for layout in _layouts(found, geometry):
        try:
            named = _named(found, weights, layout, num_layers=geometry.num_layers)
        except _DoesNotFitError:
            continue
        return {kind: _whole(named, kind, geometry, model=model) for kind in KINDS}
    raise LayoutError(
        f"the distributed checkpoint holds buckets of {len(found)} model-parallel ranks, and no way of dividing the weights over tensor "
        "ranks and stages gives masters that round to them"
    )


def bucket_settings(model: OldModel) -> Iterator[object]:
    """What each model-parallel rank's optimizer says of its parameter groups."""
    for folder in model.role.dist_folders:
        checkpoint = DistCheckpoint(folder)
        for (name, _), (relative, offset, length) in checkpoint.places.items():
            if _SETTINGS.fullmatch(name):
                yield Archive(folder / relative, start=offset, length=length).value()


def _buckets(model: OldModel) -> dict[int, dict[int, dict[int, dict[str, LazyTensor]]]]:
    """Vectors by model-parallel rank, buffer, bucket and kind."""
    found: dict[int, dict[int, dict[int, dict[str, LazyTensor]]]] = {}
    for folder in model.role.dist_folders:
        for name, tensor in DistCheckpoint(folder).tensors.items():
            if match := _VECTOR.fullmatch(name):
                of_buffer = found.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})
                of_buffer.setdefault(int(match[3]), {})[match[4]] = tensor
    for bucket in (bucket for of_rank in found.values() for of_buffer in of_rank.values() for bucket in of_buffer.values()):
        shapes = {tensor.shape for tensor in bucket.values()}
        if bucket.keys() != set(KINDS) or len(shapes) != 1 or len(shapes.pop()) != 1:
            raise LayoutError("the distributed checkpoint holds buckets that lack a master or a moment, or in which they differ in length")
    return found


def _layouts(found: Mapping[int, Mapping[int, object]], geometry: Geometry) -> Iterator[_Layout]:
    num_ranks, num_virtual = len(found), len(next(iter(found.values())))
    outside = ("input_layernorm.weight", *(name for name in _FUSED if name.startswith("self_") and name not in _NORMS))
    outside = (*outside, "pre_mlp_layernorm.weight", *(name for name in _FUSED if name.startswith("mlp.") and name not in _NORMS))
    for num_tensor in (n for n in range(1, num_ranks + 1) if num_ranks % n == 0):
        num_stages = num_ranks // num_tensor
        if geometry.num_layers % (num_stages * num_virtual) == 0:
            for order in (_FUSED, outside):
                yield _Layout(num_tensor=num_tensor, num_stages=num_stages, num_virtual=num_virtual, order=order)


def _named(
    found: Mapping[int, Mapping[int, Mapping[int, Bucket]]], weights: Mapping[str, LazyTensor], layout: _Layout, *, num_layers: int
) -> dict[tuple[int, int, int], list[dict[str, dict[str, LazyTensor]]]]:
    """By place, chunk, name and kind; ranks are numbered with tensor ranks fastest."""
    named = {}
    for stage in range(layout.num_stages):
        for tensor_rank in range(layout.num_tensor):
            buffers = found.get(stage * layout.num_tensor + tensor_rank, {})
            chunks = []
            for virtual in range(layout.num_virtual):
                chunk = _local(weights, layout, stage=stage, virtual=virtual, tensor_rank=tensor_rank, num_layers=num_layers)
                buckets = buffers.get(virtual, {})
                chunks.append(_cut([buckets[i] for i in sorted(buckets)], chunk))
            named[stage, 0, tensor_rank] = chunks
    return named


def _local(
    weights: Mapping[str, LazyTensor], layout: _Layout, *, stage: int, virtual: int, tensor_rank: int, num_layers: int
) -> dict[str, LazyTensor]:
    """One rank's parameters of one chunk, in the order of its modules, with layer numbers local to it."""
    per_chunk = num_layers // (layout.num_stages * layout.num_virtual)
    first = (virtual * layout.num_stages + stage) * per_chunk
    names = {_EMBEDDING: _EMBEDDING} if first == 0 else {}
    for local in range(per_chunk):
        for rest in layout.order:
            fused = {"input_layernorm.weight": _NORMS[0], "pre_mlp_layernorm.weight": _NORMS[1]}.get(rest, rest)
            if f"decoder.layers.{first + local}.{fused}" in weights:
                names[f"decoder.layers.{local}.{rest}"] = f"decoder.layers.{first + local}.{fused}"
    if first + per_chunk == num_layers:
        names[_NORM] = _NORM
        if _HEAD in weights:
            names |= {name: name for name in (_HEAD, _HEAD_BIAS) if name in weights}
        elif first != 0:
            names[_HEAD] = _EMBEDDING  # tied over two stages, the last one has a copy
    parts = {}
    for name, source in names.items():
        if source not in weights:
            raise _DoesNotFitError
        part = megatron_ranks.part_of(name, weights[source], rank=tensor_rank, num_ranks=layout.num_tensor)
        if part is None:
            raise _DoesNotFitError
        parts[name] = part
    return parts


def _cut(buckets: Sequence[Bucket], chunk: dict[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Parameters from the last to the first, each at a multiple of ALIGNMENT in its bucket, a new bucket where one is full."""
    found: dict[str, dict[str, LazyTensor]] = {}
    number = at = 0
    for name in reversed(chunk):
        weight, count = chunk[name], prod(chunk[name].shape)
        if number < len(buckets) and at == buckets[number]["param"].shape[0]:
            number, at = number + 1, 0
        start = at + -at % ALIGNMENT
        if number >= len(buckets) or start + count > buckets[number]["param"].shape[0]:
            raise _DoesNotFitError
        found[name] = {kind: Unflattened(Rows(buckets[number][kind], ((start, start + count),)), weight.shape) for kind in KINDS}
        if not is_master(found[name]["param"], weight):
            raise _DoesNotFitError
        at = start + count
    if number != len(buckets) - 1 or at != buckets[number]["param"].shape[0]:
        raise _DoesNotFitError
    return found


def _whole(
    named: Mapping[tuple[int, int, int], Sequence[Mapping[str, Mapping[str, LazyTensor]]]],
    kind: str,
    geometry: Geometry,
    *,
    model: OldModel,
) -> dict[str, LazyTensor]:
    of_kind: Chunks = {place: [{n: kinds[kind] for n, kinds in chunk.items()} for chunk in chunks] for place, chunks in named.items()}
    return megatron_names.to_hf(megatron_ranks.merge_chunks(of_kind, where=model.role.path), geometry, where=model.role.path)
