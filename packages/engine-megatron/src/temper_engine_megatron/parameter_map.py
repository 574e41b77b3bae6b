"""Between Megatron's parameters, each a part on some ranks, and full tensors under Hugging Face names.

Going in, every rank cuts its own part out of full tensors, without a collective. Going out, parts are gathered over tensor-parallel
ranks where they lie, and broadcast to the other stages; every rank meets the same names in the same order.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import WeightEntry
from temper_engine_megatron.bridge_compat import Recipe, Translation
from temper_engine_megatron.groups import Membership
from temper_engine_megatron.model import Chunks, PackedGPTModel

SCALAR_RECIPES = {
    "output_layer.weight": Recipe(kind="plain", names=("score.weight",)),
    "output_layer.bias": Recipe(kind="plain", names=("score.bias",)),
}
EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """What the other stages must know about a parameter: everything but its numbers."""

    name: str
    """Megatron's, with the layer's global number."""
    stage: int
    """Rank in the pipeline group that holds it."""
    shape: tuple[int, ...]
    """Of each tensor-parallel part."""
    split_dim: int | None
    """Along which parts lie; None where every rank has all of it."""
    is_embedding: bool
    """Whether its rows are words, padded to equal parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedParameter:
    """One of the model's parameters, somewhere."""

    described: _Described
    recipe: Recipe
    """What it is made of."""
    parameter: nn.Parameter | None
    """This rank's part, where it has one."""


class ParameterMap:
    """Every parameter of the model, in one order on every rank; a tied head once, as the embedding."""

    def __init__(self, chunks: Chunks, *, translation: Translation, membership: Membership, vocabulary: int, has_scalar_head: bool) -> None:
        self._translation = translation
        self._membership = membership
        self._vocabulary = vocabulary
        self._has_scalar_head = has_scalar_head
        self._tied_copy: nn.Parameter | None = None
        here = dict(self._named(chunks))
        described = [self._describe(name, parameter) for name, parameter in here.items()]
        everywhere: list[list[_Described]] = [described] * membership.pp.size()
        dist.all_gather_object(everywhere, described, group=membership.pp)
        order = sorted((entry for of_stage in everywhere for entry in of_stage), key=lambda entry: _place(entry.name))
        self.entries = tuple(
            MappedParameter(described=entry, recipe=self._recipe(entry.name), parameter=here.get(entry.name)) for entry in order
        )

    def expected(self) -> list[WeightEntry]:
        """What must arrive: every Hugging Face name with its full shape, in the order of the export."""
        found = []
        for entry in self.entries:
            full = torch.empty(self._full_shape(entry.described), device="meta")
            for name, shape in self._shapes(entry, full):
                found.append(WeightEntry(name=name, shape=shape, dtype=torch.float32))
        return found

    def to_local(self, entry: MappedParameter, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's part out of full tensors, in the order of the recipe's names."""
        size, rank = self._membership.tp.size(), self._membership.tp.rank()
        if entry.recipe.kind == "gated":
            return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])
        full = self._translation.join_heads(tensors) if entry.recipe.kind == "qkv" else tensors[0]
        described = entry.described
        if described.split_dim is None:
            return full
        if described.is_embedding:
            padding = described.shape[0] * size - full.shape[0]
            full = torch.cat([full, full.new_zeros(padding, *full.shape[1:])])
        return full.chunk(size, dim=described.split_dim)[rank]

    def to_full(self, entry: MappedParameter, local: Tensor | None) -> dict[str, Tensor]:
        """Full tensors by Hugging Face name, on every rank. Collective over tensor-parallel ranks and stages.

        Args:
            entry: of the map.
            local: float32, this rank's part of the parameter or of a quantity of its shape, where ``entry.parameter`` is not None.
        """
        described = entry.described
        parts = self._gather(described, local)
        if entry.recipe.kind == "gated":
            halves = [part.chunk(2) for part in parts]
            tensors: Sequence[Tensor] = [torch.cat([half[i] for half in halves]) for i in range(2)]
        else:
            full = parts[0] if described.split_dim is None else torch.cat(parts, dim=described.split_dim)
            if described.is_embedding:
                full = full[: self._vocabulary]
            tensors = self._translation.split_heads(full) if entry.recipe.kind == "qkv" else [full]
        return {name: tensor.contiguous() for name, tensor in zip(entry.recipe.names, tensors, strict=True)}

    def holders(self, entry: MappedParameter) -> list[nn.Parameter]:
        """This rank's parameters that hold a part of an entry: one, none, or the last stage's copy of a tied embedding as well."""
        held = [entry.parameter]
        if entry.described.name == EMBEDDING:
            held.append(self._tied_copy)
        return [parameter for parameter in held if parameter is not None]

    def count_of(self, entry: MappedParameter, count: int) -> int:
        """A number that the stage of an entry knows, on every stage. Collective over stages."""
        group = self._membership.pp
        if group.size() == 1:
            return count
        known = torch.tensor(count, device=self._membership.device)
        dist.broadcast(known, src=dist.get_global_rank(group, entry.described.stage), group=group)
        return int(known)

    def _gather(self, described: _Described, local: Tensor | None) -> list[Tensor]:
        """Every tensor-parallel part, on every stage."""
        membership = self._membership
        count = 1 if described.split_dim is None else membership.tp.size()
        if local is None:
            parts = [torch.empty(described.shape, device=membership.device) for _ in range(count)]
        elif count == 1:
            parts = [local.contiguous()]
        else:
            parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(count)]
            dist.all_gather(parts, local.contiguous(), group=membership.tp)
        if membership.pp.size() > 1:
            source = dist.get_global_rank(membership.pp, described.stage)
            for part in parts:
                dist.broadcast(part, src=source, group=membership.pp)
        return parts

    def _named(self, chunks: Chunks) -> Iterator[tuple[str, nn.Parameter]]:
        for chunk in chunks.bare:
            for name, parameter in chunk.named_parameters():
                if name == "output_layer.weight" and not self._has_scalar_head and chunk.share_embeddings_and_output_weights:
                    self._tied_copy = parameter
                    continue
                yield _global_name(name, chunk), parameter

    def _describe(self, name: str, parameter: nn.Parameter) -> _Described:
        marks: Mapping[str, Any] = vars(parameter)
        is_split = bool(marks.get("tensor_model_parallel")) and self._membership.tp.size() > 1
        is_head = name == "output_layer.weight" and not self._has_scalar_head
        return _Described(
            name=name,
            stage=self._membership.topology.pp.rank,
            shape=tuple(parameter.shape),
            split_dim=int(marks["partition_dim"]) if is_split else None,
            is_embedding=is_head or name == EMBEDDING,
        )

    def _recipe(self, name: str) -> Recipe:
        if self._has_scalar_head and name in SCALAR_RECIPES:
            return SCALAR_RECIPES[name]
        return self._translation.recipe_of(name)

    def _full_shape(self, described: _Described) -> tuple[int, ...]:
        shape = list(described.shape)
        if described.split_dim is not None:
            shape[described.split_dim] *= self._membership.tp.size()
        if described.is_embedding:
            shape[0] = self._vocabulary
        return tuple(shape)

    def _shapes(self, entry: MappedParameter, full: Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
        kind, names = entry.recipe.kind, entry.recipe.names
        if kind == "plain":
            yield names[0], tuple(full.shape)
            return
        settings, rest = self._translation.settings, tuple(full.shape[1:])
        key_rows = settings.num_query_groups * settings.kv_channels
        rows = (full.shape[0] - 2 * key_rows, key_rows, key_rows) if kind == "qkv" else (full.shape[0] // 2,) * 2
        for name, count in zip(names, rows, strict=True):
            yield name, (count, *rest)


def _global_name(name: str, chunk: PackedGPTModel) -> str:
    match = _LAYER.match(name)
    if match is None:
        return name
    number: int = chunk.decoder.layers[int(match[1])].layer_number - 1
    return f"decoder.layers.{number}.{name[match.end() :]}"


def _place(name: str) -> tuple[int, int, str]:
    """The embedding, layer by layer, and what follows them."""
    match = _LAYER.match(name)
    if match is not None:
        return 1, int(match[1]), name
    return (0, 0, name) if name.startswith("embedding") else (2, 0, name)


def check_shapes_agree(name: str, *tensors: Tensor) -> None:
    """Refuse a portable state whose parts differ in shape.

    Raises:
        WeightError: naming it.
    """
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) != 1:
        raise WeightError(f"master and moments of {name} differ in shape: {sorted(shapes)}. Nothing was loaded.")
