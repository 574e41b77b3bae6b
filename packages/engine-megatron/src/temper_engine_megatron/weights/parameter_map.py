"""Between Megatron's parameters, each a part on some ranks, and full tensors under Hugging Face names.

Going in, every rank cuts its own part out of full tensors, without a collective. Going out, parts are gathered over tensor-parallel
ranks where they lie, and broadcast to ranks with other experts and to the other stages; every rank meets the same names in the same order.
For a checkpoint they are gathered to the one rank alone that writes them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import WeightEntry
from temper_engine_megatron.adapter import expert_adapters
from temper_engine_megatron.bridge_compat import BridgeTranslation, WeightMapping
from temper_engine_megatron.huggingface.weight_names import (
    find_peft_mapping,
    is_adapter_parameter,
    is_expert_adapter,
    is_trained_head,
)
from temper_engine_megatron.model.gpt_chunks import ModelChunks, PackedGPTModel
from temper_engine_megatron.runtime.process_groups import Membership
from temper_engine_megatron.weights.owners import assign_writers

SCALAR_RECIPES = {
    "output_layer.weight": WeightMapping(kind="plain", names=("score.weight",)),
    "output_layer.bias": WeightMapping(kind="plain", names=("score.bias",)),
}
EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """What the other stages must know about a parameter: everything but its numbers."""

    name: str
    """Megatron's, with the global numbers of layer and expert."""
    stage: int
    """Rank in the pipeline group that holds it."""
    expert_rank: int | None
    """Rank in the group of ranks with other experts that holds it; None where all of them do."""
    shape: tuple[int, ...]
    """Of each tensor-parallel part."""
    split_dim: int | None
    """Along which parts lie; None where every rank has all of it."""
    is_embedding: bool
    """Whether its rows are words, padded to equal parts."""
    is_expert_adapter: bool
    """Whether its first dimension is the experts of a rank; those of the ranks with other experts follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedParameter:
    """One of the model's parameters, somewhere."""

    described: ParameterInfo
    recipe: WeightMapping
    """What it is made of."""
    parameter: nn.Parameter | None
    """This rank's part, where it has one."""


class ParameterMap:
    """Every parameter of the model, in one order on every rank; a tied head once, as the embedding."""

    def __init__(
        self,
        chunks: ModelChunks,
        *,
        translation: BridgeTranslation,
        membership: Membership,
        vocabulary: int,
        has_scalar_head: bool,
        of_adapter: bool = False,
    ) -> None:
        """Map the base's parameters, or with ``of_adapter`` those of its adapter alone; collective."""
        self._of_adapter = of_adapter
        self._translation = translation
        self._membership = membership
        self._vocabulary = vocabulary
        self._has_scalar_head = has_scalar_head
        self._tied_copy: nn.Parameter | None = None
        self.compute_dtype: torch.dtype = chunks.settings.params_dtype
        """Of every parameter."""
        here = dict(self._named(chunks))
        described = [self._describe(name, parameter) for name, parameter in here.items()]
        # Ranks with other experts repeat what is no expert.
        of_stage = list(dict.fromkeys(_gathered(described, membership.ep)))
        order = sorted(_gathered(of_stage, membership.pp), key=lambda entry: _place(entry.name))
        self._names = frozenset(entry.name for entry in order)
        self.entries = tuple(
            MappedParameter(
                described=entry, recipe=self._recipe(entry.name), parameter=here.get(entry.name)
            )
            for entry in order
        )
        self._owners = self._divide()

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
        group = self._splitters(entry.described)
        size, rank = group.size(), group.rank()
        if entry.recipe.kind == "gated":
            return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])
        full = self._translation.join_qkv(tensors) if entry.recipe.kind == "qkv" else tensors[0]
        described = entry.described
        if described.is_expert_adapter:
            return self._to_local_experts(entry, full)
        if described.split_dim is None:
            return full
        if described.is_embedding:
            rows = full[rank * described.shape[0] : (rank + 1) * described.shape[0]]
            return torch.cat(
                [rows, rows.new_zeros(described.shape[0] - len(rows), *rows.shape[1:])]
            )
        return full.chunk(size, dim=described.split_dim)[rank]

    def _to_local_experts(self, entry: MappedParameter, full: Tensor) -> Tensor:
        described, ep, group = (
            entry.described,
            self._membership.ep,
            self._splitters(entry.described),
        )
        rank, size = (0, 1) if described.split_dim is None else (group.rank(), group.size())
        count = described.shape[0] * ep.size()
        part = expert_adapters.part_of(
            full, kind=entry.recipe.kind, num_experts=count, rank=rank, size=size
        )
        return part.chunk(ep.size())[ep.rank()]

    def to_full(
        self, entry: MappedParameter, local: Tensor | None, *, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Full tensors by Hugging Face name, on every rank. Collective over tensor-parallel ranks and stages.

        Args:
            entry: of the map.
            local: this rank's part of the parameter or of a quantity of its shape, where ``entry.parameter`` is not None.
            dtype: of what the holders give.
        """
        return self._joined(entry, self._gather(entry.described, local, dtype))

    def gather_to_writer(self, entry: MappedParameter, local: Tensor) -> dict[str, Tensor]:
        """Full tensors by Hugging Face name on the rank that writes them; none elsewhere. Collective over ranks with parts of them.

        Args:
            entry: of the map, one that ``takes_part_in_saving``; elsewhere there is nothing to call.
            local: this rank's part of the parameter or of a quantity of its shape.
        """
        described, group = entry.described, self._splitters(entry.described)
        owner = self._owners[described.name]
        is_owner = owner == self._membership.topology.global_rank
        if described.is_expert_adapter:
            parts = self._of_holders(described, local)
        elif described.split_dim is None:
            parts = [local]
        else:
            parts = [
                torch.empty_like(local, memory_format=torch.contiguous_format)
                for _ in range(group.size() if is_owner else 0)
            ]
            dist.gather(local.contiguous(), parts or None, dst=owner, group=group)
        return self._joined(entry, parts) if is_owner else {}

    def takes_part_in_saving(self, entry: MappedParameter) -> bool:
        """Whether this rank has something to do in ``gather_to_writer``: its part is of the same copy as the owner's."""
        described = entry.described
        if entry.parameter is None or described.is_expert_adapter:
            return entry.parameter is not None
        owner, rank = self._owners[described.name], self._membership.topology.global_rank
        return owner == rank or (
            described.split_dim is not None
            and owner in dist.get_process_group_ranks(self._splitters(described))
        )

    def _joined(self, entry: MappedParameter, parts: list[Tensor]) -> dict[str, Tensor]:
        """Full tensors out of every tensor-parallel part."""
        described = entry.described
        if entry.recipe.kind == "gated":
            halves = [part.chunk(2) for part in parts]
            tensors: Sequence[Tensor] = [torch.cat([half[i] for half in halves]) for i in range(2)]
        elif described.is_expert_adapter:
            tensors = [expert_adapters.joined(parts, kind=entry.recipe.kind)]
        else:
            full = (
                parts[0]
                if described.split_dim is None
                else torch.cat(parts, dim=described.split_dim)
            )
            if described.is_embedding:
                full = full[: self._vocabulary]
            tensors = self._translation.split_qkv(full) if entry.recipe.kind == "qkv" else [full]
        return {
            name: tensor.contiguous()
            for name, tensor in zip(entry.recipe.names, tensors, strict=True)
        }

    def holders(self, entry: MappedParameter) -> list[nn.Parameter]:
        """This rank's parameters that hold a part of an entry: one, none, or the last stage's copy of a tied embedding as well."""
        held = [entry.parameter]
        if entry.described.name == EMBEDDING:
            held.append(self._tied_copy)
        return [parameter for parameter in held if parameter is not None]

    def broadcast_count(self, entry: MappedParameter, count: int) -> int:
        """A number that the holders of an entry know, on every rank. Collective over stages and ranks with other experts."""
        known = torch.tensor(count, device=self._membership.device)
        self._share(entry.described, known)
        return int(known)

    def _gather(
        self, described: ParameterInfo, local: Tensor | None, dtype: torch.dtype
    ) -> list[Tensor]:
        """Every tensor-parallel part, on every rank."""
        if local is None:
            count = 1 if described.split_dim is None else self._splitters(described).size()
            parts = [
                torch.empty(
                    self._shape_of_parts(described), dtype=dtype, device=self._membership.device
                )
                for _ in range(count)
            ]
        else:
            parts = self._of_holders(described, local)
        for part in parts:
            self._share(described, part)
        return parts

    def _of_holders(self, described: ParameterInfo, local: Tensor) -> list[Tensor]:
        """Every tensor-parallel part, on the ranks that hold one."""
        if described.is_expert_adapter:
            local = _concatenated(local, self._membership.ep)
        if described.split_dim is None:
            return [local.contiguous()]
        return _parts_of(local, self._splitters(described))

    def _divide(self) -> dict[str, int]:
        """The rank that writes each parameter, by Megatron's name. Collective over all ranks."""
        membership = self._membership
        places = [(0, 0)] * membership.topology.world_size
        dist.all_gather_object(places, (membership.topology.pp.rank, membership.ep.rank()))
        of_place: defaultdict[tuple[int, int | None], list[int]] = defaultdict(list)
        for rank, (stage, expert_rank) in enumerate(places):
            of_place[stage, expert_rank].append(rank)
            of_place[stage, None].append(rank)
        described = [entry.described for entry in self.entries]
        sizes = [math.prod(self._full_shape(each)) for each in described]
        owners = assign_writers(
            sizes, holders=[of_place[each.stage, each.expert_rank] for each in described]
        )
        return {each.name: owner for each, owner in zip(described, owners, strict=True)}

    def _shape_of_parts(self, described: ParameterInfo) -> tuple[int, ...]:
        """Of what one tensor-parallel rank has together with those that have the same part of other experts."""
        if not described.is_expert_adapter:
            return described.shape
        return (described.shape[0] * self._membership.ep.size(), *described.shape[1:])

    def _share(self, described: ParameterInfo, numbers: Tensor) -> None:
        """From the ranks that hold a parameter to those with other experts, and then to the other stages; in place."""
        membership = self._membership
        sources = ((membership.ep, described.expert_rank), (membership.pp, described.stage))
        for group, source in sources:
            is_there = group is membership.pp or membership.topology.pp.rank == described.stage
            if group.size() > 1 and source is not None and is_there:
                dist.broadcast(numbers, src=dist.get_global_rank(group, source), group=group)

    def _splitters(self, described: ParameterInfo) -> dist.ProcessGroup:
        """Ranks that hold parts of the same matrix."""
        is_expert = described.is_expert_adapter or _EXPERT.search(described.name) is not None
        return self._membership.expert_tp if is_expert else self._membership.tp

    def _named(self, chunks: ModelChunks) -> Iterator[tuple[str, nn.Parameter]]:
        for chunk in chunks.bare:
            for name, parameter in chunk.named_parameters():
                if is_adapter_parameter(name) != self._of_adapter:
                    continue
                if (
                    name == "output_layer.weight"
                    and not self._has_scalar_head
                    and chunk.share_embeddings_and_output_weights
                ):
                    self._tied_copy = parameter
                    continue
                yield self._global_name(name, chunk), parameter

    def _global_name(self, name: str, chunk: PackedGPTModel) -> str:
        match = _LAYER.match(name)
        if match is None:
            return name
        number: int = chunk.decoder.layers[int(match[1])].layer_number - 1
        rest = name[match.end() :]
        if (expert := _EXPERT.search(rest)) is not None:
            first = (
                self._translation.settings.num_moe_experts
                // self._membership.ep.size()
                * self._membership.ep.rank()
            )
            rest = f"{rest[: expert.start()]}{first + int(expert[0])}{rest[expert.end() :]}"
        return f"decoder.layers.{number}.{rest}"

    def _describe(self, name: str, parameter: nn.Parameter) -> ParameterInfo:
        marks: Mapping[str, Any] = vars(parameter)
        is_expert = _EXPERT.search(name) is not None
        splitters = (
            self._membership.expert_tp
            if is_expert or is_expert_adapter(name)
            else self._membership.tp
        )
        is_split = bool(marks.get("tensor_model_parallel")) and splitters.size() > 1
        is_head = name == "output_layer.weight" and not self._has_scalar_head
        return ParameterInfo(
            name=name,
            stage=self._membership.topology.pp.rank,
            expert_rank=self._membership.ep.rank() if is_expert else None,
            shape=tuple(parameter.shape),
            split_dim=int(marks["partition_dim"]) if is_split else None,
            is_embedding=is_head
            or name == EMBEDDING
            or (is_trained_head(name) and not self._has_scalar_head),
            is_expert_adapter=is_expert_adapter(name),
        )

    def _recipe(self, name: str) -> WeightMapping:
        if self._of_adapter:
            head = "score" if self._has_scalar_head else "lm_head"
            return find_peft_mapping(
                name, find_mapping=self._translation.find_mapping, head=head, names=self._names
            )
        if self._has_scalar_head and name in SCALAR_RECIPES:
            return SCALAR_RECIPES[name]
        return self._translation.find_mapping(name)

    def _full_shape(self, described: ParameterInfo) -> tuple[int, ...]:
        shape = list(self._shape_of_parts(described))
        if described.split_dim is not None:
            shape[described.split_dim] *= self._splitters(described).size()
        if described.is_embedding:
            shape[0] = self._vocabulary
        return tuple(shape)

    def _shapes(
        self, entry: MappedParameter, full: Tensor
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        kind, names = entry.recipe.kind, entry.recipe.names
        if kind == "plain":
            yield names[0], tuple(full.shape)
            return
        if entry.described.is_expert_adapter:
            # Without gates: the parts were put together already.
            yield (
                names[0],
                tuple(
                    expert_adapters.joined(
                        [full], kind="experts_a" if kind == "experts_a" else "experts_b"
                    ).shape
                ),
            )
            return
        settings, rest = self._translation.settings, tuple(full.shape[1:])
        key_rows = settings.num_query_groups * settings.kv_channels
        rows = (
            (full.shape[0] - 2 * key_rows, key_rows, key_rows)
            if kind == "qkv"
            else (full.shape[0] // 2,) * 2
        )
        for name, count in zip(names, rows, strict=True):
            yield name, (count, *rest)


def _concatenated(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks of a group, along the first dimension."""
    return local if group.size() == 1 else torch.cat(_parts_of(local, group))


def _parts_of(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Of all ranks of a group, on each of them."""
    if group.size() == 1:
        return [local.contiguous()]
    parts = [
        torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, local.contiguous(), group=group)
    return parts


def _gathered(mine: list[ParameterInfo], group: dist.ProcessGroup) -> list[ParameterInfo]:
    everywhere: list[list[ParameterInfo]] = [mine] * group.size()
    dist.all_gather_object(everywhere, mine, group=group)
    return [entry for of_rank in everywhere for entry in of_rank]


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
        raise WeightError(
            f"master and moments of {name} differ in shape: {sorted(shapes)}. Nothing was loaded."
        )
