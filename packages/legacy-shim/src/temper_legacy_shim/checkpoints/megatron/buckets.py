"""Moments of Megatron's distributed checkpoints in buckets (``dp_reshardable``).

Each bucket of a model-parallel rank has one vector.

The checkpoint does not say how many tensor ranks, stages and expert ranks there were, nor which
parameter lies where. Every layout that the
numbers of ranks allow is tried: the weights are cut up as it would have cut them, laid out in the
order of Megatron's modules, and the layout is believed only if all lengths fit and every float32
master, rounded, is its weight.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from temper_legacy_shim.checkpoints.files.archive import Archive
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.dtypes import Block
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, Rows, Unflattened, View
from temper_legacy_shim.checkpoints.megatron import ranks
from temper_legacy_shim.checkpoints.megatron.flat_moments import ALIGNMENT, KINDS, is_master
from temper_legacy_shim.checkpoints.megatron.parameter_names import (
    EXPERT,
    Geometry,
    Order,
    sort_by_order,
)
from temper_legacy_shim.checkpoints.model import OldModel
from temper_legacy_shim.errors import LayoutError

_GROUP = r"(?:chained_(\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,6})\."
_VECTOR = re.compile(
    _GROUP + r"gbuf_idx_(\d{1,4})\.dtype_.+\.bucket_idx_(\d{1,6})\.(param|exp_avg|exp_avg_sq)"
)
_SETTINGS = re.compile(_GROUP + r"optimizer(?:/shard_.*)?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EMBEDDING, _NORM, _HEAD = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)
_HEAD_BIAS = "output_layer.bias"
_TABLES = (_EMBEDDING, _HEAD)
_WHERE = Path("dist_ckpt")
_PADDINGS = (1, 8, 16, 32, 64, 128, 256, 512)
"""make_vocab_size_divisible_by: a multiple of this for every tensor rank."""

Bucket = Mapping[str, LazyTensor]
"""Vectors by kind (param, exp_avg, exp_avg_sq)."""
Ranks = Mapping[int, Mapping[int, Mapping[int, Bucket]]]
"""Buckets by model-parallel rank, buffer and index."""
FullStates = Mapping[str, Mapping[str, LazyTensor]]
"""States of the full model by kind and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Number of ranks of each kind, and the order in which a layer creates its parameters."""

    num_tensor: int
    num_stages: int
    num_virtual: int
    num_expert: int
    num_expert_tensor: int
    num_rows: int
    """Rows of the vocabulary tables with padding."""
    order: Order

    @property
    def num_chunks(self) -> int:
        return self.num_stages * self.num_virtual


class _DoesNotFitError(Exception):
    """The layout does not match; the next is tried."""


def read_buckets(
    model: OldModel, weights: Mapping[str, LazyTensor], geometry: Geometry, *, are_exported: bool
) -> FullStates:
    """Return the masters and moments by kind and Megatron's name with global numbers.

    Args:
        model: with a distributed checkpoint.
        weights: full trained tensors with Megatron's names, layers and experts separate;
            buffers are not among them.
        geometry: of the model's config.
        are_exported: the vocabulary's tables have lost their padding, of which the checkpoint does
            not say how much it was.

    Raises:
        LayoutError: there are no buckets, or no layout fits; for the receipt.
        DamagedFileError: a file is damaged.
    """
    dense, experts = _buckets(model)
    # No file states the parallel sizes. A wrong layout is refused by the first master that does not
    # round to its weight.
    for layout in _layouts(dense, experts, weights, geometry, are_exported=are_exported):
        try:
            return _read(dense, experts, weights, layout, num_layers=geometry.num_layers)
        except _DoesNotFitError:
            continue
    raise LayoutError(
        f"the distributed checkpoint holds buckets of {len(dense)} model-parallel ranks"
        + (f" and of {len(experts)} that hold experts" if experts else "")
        + (
            ", and no way of dividing the weights over tensor ranks, stages and expert ranks "
            "gives masters that round to them"
        )
    )


def bucket_settings(model: OldModel) -> Iterator[object]:
    """Yield the parameter-group settings of each model-parallel rank's optimizer."""
    for folder in model.role.dist_folders:
        checkpoint = DistCheckpoint(folder)
        for (name, _), (relative, offset, length) in checkpoint.positions.items():
            if _SETTINGS.fullmatch(name):
                yield Archive(folder / relative, start=offset, length=length).value()


def _buckets(model: OldModel) -> tuple[Ranks, Ranks]:
    """Split buckets into those of all data-parallel ranks and those of distributed experts."""
    result: dict[int, dict[int, dict[int, dict[int, dict[str, LazyTensor]]]]] = {}
    for folder in model.role.dist_folders:
        for name, tensor in DistCheckpoint(folder).tensors.items():
            if match := _VECTOR.fullmatch(name):
                of_rank = result.setdefault(int(match[1] or 0), {}).setdefault(int(match[2]), {})
                of_rank.setdefault(int(match[3]), {}).setdefault(int(match[4]), {})[match[5]] = (
                    tensor
                )
    if not result:
        raise LayoutError(
            "the distributed checkpoint holds none in model space (optimizer.state.exp_avg and "
            "exp_avg_sq by parameter)"
        )
    # Chained optimizers are one for dense parameters and one for distributed experts.
    if not result.keys() <= {0, 1} or 0 not in result:
        raise LayoutError(
            f"the distributed checkpoint holds buckets of {len(result)} optimizers, of which two "
            "at most are known"
        )
    by_rank = (of_rank for optimizer in result.values() for of_rank in optimizer.values())
    for bucket in (
        bucket
        for of_rank in by_rank
        for of_buffer in of_rank.values()
        for bucket in of_buffer.values()
    ):
        shapes = {tensor.shape for tensor in bucket.values()}
        if bucket.keys() != set(KINDS) or len(shapes) != 1 or len(shapes.pop()) != 1:
            raise LayoutError(
                "the distributed checkpoint holds buckets that lack a master or a moment, or in "
                "which they differ in length"
            )
    return result[0], result.get(1, {})


def _layouts(
    dense: Ranks,
    experts: Ranks,
    weights: Mapping[str, LazyTensor],
    geometry: Geometry,
    *,
    are_exported: bool,
) -> Iterator[_Layout]:
    num_experts = len({match[2] for name in weights if (match := EXPERT.fullmatch(name))})
    num_virtual = len(next(iter(dense.values())))
    for num_tensor in _divisors(len(dense)):
        num_stages = len(dense) // num_tensor
        # Only stages with equal numbers of layers are tried.
        if geometry.num_layers % (num_stages * num_virtual) or len(experts) % num_stages:
            continue
        of_a_stage = len(experts) // num_stages or 1
        for num_expert_tensor in _divisors(of_a_stage) if experts else (num_tensor,):
            num_expert = of_a_stage // num_expert_tensor if experts else 1
            rows = _padded(weights, num_tensor=num_tensor, are_exported=are_exported)
            for num_rows, order in product(rows, Order.every(with_experts=num_experts > 0)):
                if num_experts % num_expert == 0:
                    yield _Layout(
                        num_tensor=num_tensor,
                        num_stages=num_stages,
                        num_virtual=num_virtual,
                        num_expert=num_expert,
                        num_expert_tensor=num_expert_tensor,
                        num_rows=num_rows,
                        order=order,
                    )


def _padded(weights: Mapping[str, LazyTensor], *, num_tensor: int, are_exported: bool) -> list[int]:
    """Return the possible row counts of the padded vocabulary tables."""
    rows = weights[_EMBEDDING].shape[0] if _EMBEDDING in weights else 0
    multiples = [num_tensor * factor for factor in _PADDINGS] if are_exported else []
    return sorted({rows, *(-(-rows // multiple) * multiple for multiple in multiples)})


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _read(
    dense: Ranks,
    experts: Ranks,
    weights: Mapping[str, LazyTensor],
    layout: _Layout,
    *,
    num_layers: int,
) -> FullStates:
    """Read the buckets of all ranks: tensor ranks fastest, then expert ranks, then stages."""
    result: dict[str, list[Mapping[str, LazyTensor]]] = {}
    of_layer = _group_by_layer(weights)
    for stage in range(layout.num_stages):
        chunks = [
            _names(of_layer, weights, layout, stage=stage, virtual=v, num_layers=num_layers)
            for v in range(layout.num_virtual)
        ]
        shared = [_drop_experts(chunk) for chunk in chunks] if experts else chunks
        for rank in range(layout.num_tensor):
            buffers = dense.get(stage * layout.num_tensor + rank, {})
            _take(result, buffers, shared, weights, layout, rank=rank, num_ranks=layout.num_tensor)
        for expert_rank in range(layout.num_expert) if experts else ():
            own = [_experts_of(chunk, expert_rank, layout) for chunk in chunks]
            for rank in range(layout.num_expert_tensor):
                number = (stage * layout.num_expert + expert_rank) * layout.num_expert_tensor + rank
                with_experts = [chunk for chunk in own if chunk]
                _take(
                    result,
                    experts.get(number, {}),
                    with_experts,
                    weights,
                    layout,
                    rank=rank,
                    num_ranks=layout.num_expert_tensor,
                )
    if not result.keys() >= weights.keys():
        raise _DoesNotFitError
    merge = ranks.merge_tensor_ranks
    return {
        kind: {
            name: merge(name, [kinds[kind] for kinds in result[name]], where=_WHERE)
            for name in weights
        }
        for kind in KINDS
    }


def _take(
    result: dict[str, list[Mapping[str, LazyTensor]]],
    buffers: Mapping[int, Mapping[int, Bucket]],
    chunks: Sequence[Mapping[str, str]],
    weights: Mapping[str, LazyTensor],
    layout: _Layout,
    *,
    rank: int,
    num_ranks: int,
) -> None:
    """Add one rank's parts, by name."""
    if len(buffers) != len(chunks):
        raise _DoesNotFitError
    for number, chunk in zip(sorted(buffers), chunks, strict=True):
        parts, known = {}, {}
        for name, source in chunk.items():
            weight = weights[source]
            padded = (
                layout.num_rows - weight.shape[0]
                if source in _TABLES and weight.shape[0] > 1
                else 0
            )
            part = ranks.part_of(
                name,
                _WithPadding(weight, padded) if padded else weight,
                rank=rank,
                num_ranks=num_ranks,
            )
            if part is None:
                raise _DoesNotFitError
            parts[name] = part
            # The padding of a vocabulary is at the end of the full table, so only the last tensor
            # ranks have it. The weights do not contain it, and there is nothing to compare these
            # rows with.
            known[name] = (
                min(max(weight.shape[0] - rank * part.shape[0], 0), part.shape[0])
                if padded
                else part.shape[0]
            )
        buckets = buffers[number]
        for name, kinds in _cut([buckets[i] for i in sorted(buckets)], parts, known=known).items():
            result.setdefault(name, []).append(kinds)


@dataclass(frozen=True)
class _WithPadding(View):
    """A table with unknown entries at the end."""

    num_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.source.shape[0] + self.num_rows, *self.source.shape[1:])

    def read(self, start: int, stop: int) -> Block:
        """Return the entries of the table alone."""
        assert stop <= self.source.shape[0], "nobody knows what padding held"
        return self.source.read(start, stop)


def _group_by_layer(weights: Mapping[str, LazyTensor]) -> dict[int, list[str]]:
    """Return the names in each layer, without the layer's number."""
    result: dict[int, list[str]] = {}
    for name in weights:
        if match := _LAYER.fullmatch(name):
            result.setdefault(int(match[1]), []).append(match[2])
    return result


def _names(
    of_layer: Mapping[int, Sequence[str]],
    weights: Mapping[str, LazyTensor],
    layout: _Layout,
    *,
    stage: int,
    virtual: int,
    num_layers: int,
) -> dict[str, str]:
    """Return a chunk's parameters in the order of its modules, and the weight that each is."""
    per_chunk = num_layers // layout.num_chunks
    # With virtual stages, layers go round all stages before a stage gets its second chunk.
    first = (virtual * layout.num_stages + stage) * per_chunk
    names = {_EMBEDDING: _EMBEDDING} if first == 0 and _EMBEDDING in weights else {}
    for layer in range(first, first + per_chunk):
        for rest in sort_by_order(of_layer.get(layer, ()), layout.order):
            names[f"decoder.layers.{layer}.{rest}"] = f"decoder.layers.{layer}.{rest}"
    if first + per_chunk == num_layers:
        names |= {name: name for name in (_NORM, _HEAD, _HEAD_BIAS) if name in weights}
        if _EMBEDDING in weights and _HEAD not in weights and first != 0:
            names[_HEAD] = _EMBEDDING  # tied over two stages, the last one has a copy
    return names


def _drop_experts(chunk: Mapping[str, str]) -> dict[str, str]:
    return {name: source for name, source in chunk.items() if not EXPERT.fullmatch(name)}


def _experts_of(chunk: Mapping[str, str], rank: int, layout: _Layout) -> dict[str, str]:
    """Return the experts of one rank: equally many per layer on every rank, in order."""
    numbered = {name: int(match[2]) for name in chunk if (match := EXPERT.fullmatch(name))}
    num_local = (1 + max(numbered.values(), default=-1)) // layout.num_expert
    return {name: name for name, number in numbered.items() if number // max(num_local, 1) == rank}


def _cut(
    buckets: Sequence[Bucket], chunk: Mapping[str, LazyTensor], *, known: Mapping[str, int]
) -> dict[str, dict[str, LazyTensor]]:
    """Lay out the parameters in buckets, from last to first.

    Each starts at a multiple of ALIGNMENT. A full bucket is followed by a new one.

    Args:
        buckets: in their order.
        chunk: the parameters, in the order of the modules.
        known: rows of each that are no padding.
    """
    result: dict[str, dict[str, LazyTensor]] = {}
    number = at = 0
    for name in reversed(list(chunk)):
        weight, count = chunk[name], prod(chunk[name].shape)
        start = at + -at % ALIGNMENT
        if (
            number < len(buckets) and start >= buckets[number]["param"].shape[0]
        ):  # before a tied table a bucket ends at a multiple
            number, start = number + 1, 0
        if number >= len(buckets) or start + count > buckets[number]["param"].shape[0]:
            raise _DoesNotFitError
        result[name] = {
            kind: Unflattened(Rows(buckets[number][kind], ((start, start + count),)), weight.shape)
            for kind in KINDS
        }
        if not is_master(result[name]["param"], weight, num_rows=known[name]):
            raise _DoesNotFitError
        at = start + count
    # The saved layout used all elements of all buckets.
    if number != len(buckets) - 1 or at != buckets[number]["param"].shape[0]:
        raise _DoesNotFitError
    return result
