"""Convert between Megatron's sharded parameters and full tensors under Hugging Face names.

Loading needs no communication: every rank takes its own shard of full tensors. Exporting gathers
the shards over tensor-parallel ranks, then broadcasts them to ranks with other experts and to the
other pipeline stages, so all ranks meet the same names in the same order. For a checkpoint, shards
are gathered only on the rank that writes the tensor.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from temper_engine_api.distributed.process_group import gather_objects
from temper_engine_api.file_names import FileNames
from temper_engine_api.weights import WeightEntry
from temper_engine_megatron.adapter.expert_adapters import join_expert_shards, take_expert_shard
from temper_engine_megatron.bridge_compat import (
    BridgeTranslation,
    MappingKind,
    WeightMapping,
    is_expert_stack,
)
from temper_engine_megatron.huggingface.weight_names import (
    find_peft_mapping,
    is_adapter_parameter,
    is_expert_adapter,
    is_trained_head,
)
from temper_engine_megatron.model.gpt_chunks import ModelChunks
from temper_engine_megatron.runtime.process_groups import Membership
from temper_engine_megatron.weights.parameter_info import (
    EMBEDDING,
    EXPERT_NUMBER,
    ROUTER_BIAS,
    ParameterInfo,
    assign_writers,
    gather_parameter_infos,
    gather_shards,
    global_name,
    sort_key,
)

_SCALAR_HEAD_MAPPINGS = {
    "output_layer.weight": WeightMapping(kind="plain", names=("score.weight",)),
    "output_layer.bias": WeightMapping(kind="plain", names=("score.bias",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedParameter:
    """One of the model's parameters, on this rank or another."""

    info: ParameterInfo
    mapping: WeightMapping
    """Hugging Face weights that it consists of."""
    parameter: Tensor | None
    """This rank's shard; None if the parameter is on other ranks only."""


class ParameterMap:
    """All parameters of the model in the same order on every rank.

    A tied head is included once, as the embedding.
    """

    def __init__(
        self,
        chunks: ModelChunks,
        *,
        translation: BridgeTranslation,
        file_names: FileNames,
        membership: Membership,
        vocab_size: int,
        has_scalar_head: bool,
        maps_adapter: bool = False,
    ) -> None:
        """Map the parameters of the base model, or with `maps_adapter` its adapter. Collective."""
        self._maps_adapter = maps_adapter
        self._translation, self._file_names = translation, file_names
        self._membership = membership
        self._vocab_size = vocab_size
        self._has_scalar_head = has_scalar_head
        self._tied_copy: Tensor | None = None
        self.compute_dtype: torch.dtype = chunks.transformer_config.params_dtype
        """Dtype of all parameters."""
        local = dict(self._named_tensors(chunks))
        local_infos = [self._describe(name, parameter) for name, parameter in local.items()]
        stage_infos = gather_parameter_infos(local_infos, membership.ep)
        # Sorted, because gathering parameters is collective and every rank must go through them in
        # the same order.
        infos = sorted(
            gather_parameter_infos(stage_infos, membership.pp), key=lambda info: sort_key(info.name)
        )
        self._names = frozenset(info.name for info in infos)
        self.entries = tuple(
            MappedParameter(
                info=info, mapping=self._find_mapping(info.name), parameter=local.get(info.name)
            )
            for info in infos
        )
        self._writers = self._assign_writers()

    @property
    def trained_entries(self) -> tuple[MappedParameter, ...]:
        """All entries except buffers, which have no optimizer state."""
        return tuple(entry for entry in self.entries if not entry.info.is_buffer)

    def list_weight_entries(self, *, with_buffers: bool = True) -> list[WeightEntry]:
        """List all Hugging Face names with full shapes, in the order of an export."""
        entries = []
        for entry in self.entries if with_buffers else self.trained_entries:
            full = torch.empty(self._full_shape(entry.info), device="meta")
            for name, shape in self._hf_shapes(entry, full):
                entries.append(WeightEntry(name=name, shape=shape, dtype=torch.float32))
        return entries

    def take_shard(self, entry: MappedParameter, tensors: Sequence[Tensor]) -> Tensor:
        """Return this rank's shard of full tensors, given in the order of the mapping's names."""
        info, mapping = entry.info, entry.mapping
        group = self._shard_group(info)
        num_ranks, rank = group.size(), group.rank()
        if mapping.kind == "gated":
            # Split gate and up separately, because each rank needs rows of both.
            return torch.cat([tensor.chunk(num_ranks)[rank] for tensor in tensors])
        full = self._translation.join_qkv(tensors) if mapping.kind == "qkv" else tensors[0]
        if info.stacks_experts:
            return self._take_expert_shard(entry, full)
        if info.split_dim is None:
            return full
        if info.is_vocab_matrix:
            rows = full[rank * info.shape[0] : (rank + 1) * info.shape[0]]
            return torch.cat([rows, rows.new_zeros(info.shape[0] - len(rows), *rows.shape[1:])])
        return full.chunk(num_ranks, dim=info.split_dim)[rank]

    def _take_expert_shard(self, entry: MappedParameter, full: Tensor) -> Tensor:
        info, ep, group = entry.info, self._membership.ep, self._shard_group(entry.info)
        rank, num_ranks = (0, 1) if info.split_dim is None else (group.rank(), group.size())
        shard = take_expert_shard(
            full,
            kind=entry.mapping.kind,
            num_experts=info.shape[0] * ep.size(),
            rank=rank,
            num_ranks=num_ranks,
        )
        return shard.chunk(ep.size())[ep.rank()]

    def gather(
        self, entry: MappedParameter, local: Tensor | None, *, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return full tensors by Hugging Face name on every rank. Collective over all ranks.

        Args:
            entry: The parameter.
            local: This rank's shard of the parameter, or of a tensor with its shape; None if this
                rank has no shard.
            dtype: Dtype of the shards, for the ranks without one.
        """
        info = entry.info
        if local is None:
            num_shards = 1 if info.split_dim is None else self._shard_group(info).size()
            # Buffers of the shapes that the ranks with the shards broadcast.
            shards = [
                torch.empty(self._shard_shape(info), dtype=dtype, device=self._membership.device)
                for _ in range(num_shards)
            ]
        else:
            shards = self._gather_shards(info, local)
        for shard in shards:
            self._broadcast(info, shard)
        return self._join_shards(entry, shards)

    def gather_to_writer(self, entry: MappedParameter, local: Tensor) -> dict[str, Tensor]:
        """Return full tensors by Hugging Face name on the rank that writes them, else none.

        Collective over the ranks where `takes_part_in_saving` is True; call on them only.

        Args:
            entry: The parameter.
            local: This rank's shard of the parameter, or of a tensor with its shape.
        """
        info, group = entry.info, self._shard_group(entry.info)
        writer = self._writers[info.name]
        is_writer = writer == self._membership.topology.global_rank
        if info.stacks_experts:
            # Joined over two groups, experts and shards; small enough to be gathered everywhere.
            shards = self._gather_shards(info, local)
        elif info.split_dim is None:
            shards = [local]
        else:
            shards = [
                torch.empty_like(local, memory_format=torch.contiguous_format)
                for _ in range(group.size() if is_writer else 0)
            ]
            dist.gather(local.contiguous(), shards or None, dst=writer, group=group)
        return self._join_shards(entry, shards) if is_writer else {}

    def takes_part_in_saving(self, entry: MappedParameter) -> bool:
        """Return True if this rank has a shard of the same copy as the writer."""
        info = entry.info
        if entry.parameter is None or info.stacks_experts:
            return entry.parameter is not None
        writer, rank = self._writers[info.name], self._membership.topology.global_rank
        return writer == rank or (
            info.split_dim is not None
            and writer in dist.get_process_group_ranks(self._shard_group(info))
        )

    def _join_shards(self, entry: MappedParameter, shards: list[Tensor]) -> dict[str, Tensor]:
        info, mapping = entry.info, entry.mapping
        if mapping.kind == "gated":
            halves = [shard.chunk(2) for shard in shards]
            tensors: Sequence[Tensor] = [torch.cat([half[i] for half in halves]) for i in range(2)]
        elif info.stacks_experts:
            tensors = [join_expert_shards(shards, kind=mapping.kind)]
        else:
            full = shards[0] if info.split_dim is None else torch.cat(shards, dim=info.split_dim)
            # The last rank has padding rows after the vocabulary.
            if info.is_vocab_matrix:
                full = full[: self._vocab_size]
            tensors = self._translation.split_qkv(full) if mapping.kind == "qkv" else [full]
        return {
            name: tensor.contiguous() for name, tensor in zip(mapping.names, tensors, strict=True)
        }

    def local_parameters(self, entry: MappedParameter) -> list[Tensor]:
        """Return this rank's parameters for an entry.

        None, one, or two: the last stage has its own copy of a tied embedding.
        """
        parameters = [entry.parameter]
        if entry.info.name == EMBEDDING:
            parameters.append(self._tied_copy)
        return [parameter for parameter in parameters if parameter is not None]

    def broadcast_count(self, entry: MappedParameter, count: int) -> int:
        """Return a number of the ranks with a shard on every rank. Collective over all ranks."""
        number = torch.tensor(count, device=self._membership.device)
        self._broadcast(entry.info, number)
        return int(number)

    def _gather_shards(self, info: ParameterInfo, local: Tensor) -> list[Tensor]:
        """Return all tensor-parallel shards. Collective over the ranks with a shard."""
        if info.stacks_experts and self._membership.ep.size() > 1:
            local = torch.cat(gather_shards(local, self._membership.ep))
        if info.split_dim is None:
            return [local.contiguous()]
        return gather_shards(local, self._shard_group(info))

    def _assign_writers(self) -> dict[str, int]:
        """Return the rank that writes each parameter, by Megatron name. Collective."""
        membership = self._membership
        coordinates = gather_objects((membership.topology.pp.rank, membership.ep.rank()))
        # A rank knows only its own parameters, but writers must be the same on all ranks.
        ranks_with: defaultdict[tuple[int, int | None], list[int]] = defaultdict(list)
        for rank, (stage, expert_rank) in enumerate(coordinates):
            ranks_with[stage, expert_rank].append(rank)
            ranks_with[stage, None].append(rank)
        infos = [entry.info for entry in self.entries]
        writers = assign_writers(
            [math.prod(self._full_shape(info)) for info in infos],
            holders=[ranks_with[info.stage, info.expert_rank] for info in infos],
        )
        return {info.name: writer for info, writer in zip(infos, writers, strict=True)}

    def _shard_shape(self, info: ParameterInfo) -> tuple[int, ...]:
        """Return a tensor-parallel shard's shape, with all ranks' experts."""
        if not info.stacks_experts:
            return info.shape
        return (info.shape[0] * self._membership.ep.size(), *info.shape[1:])

    def _broadcast(self, info: ParameterInfo, tensor: Tensor) -> None:
        """Broadcast to ranks with other experts, then to the other stages; in place."""
        membership = self._membership
        # The order matters: all ranks in the stage that has the parameter must have received it
        # before each sends it to the other stages.
        sources = ((membership.ep, info.expert_rank), (membership.pp, info.stage))
        for group, source in sources:
            takes_part = group is membership.pp or membership.topology.pp.rank == info.stage
            if group.size() > 1 and source is not None and takes_part:
                dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)

    def _shard_group(self, info: ParameterInfo) -> dist.ProcessGroup:
        """Return the ranks with shards of the same matrix."""
        is_expert = info.stacks_experts or EXPERT_NUMBER.search(info.name) is not None
        return self._membership.expert_tp if is_expert else self._membership.tp

    def _named_tensors(self, chunks: ModelChunks) -> Iterator[tuple[str, Tensor]]:
        ep = self._membership.ep
        num_experts = self._translation.transformer_config.num_moe_experts
        first_expert = num_experts // ep.size() * ep.rank() if num_experts else 0
        for chunk in chunks.unwrapped:
            buffers = (item for item in chunk.named_buffers() if item[0].endswith(ROUTER_BIAS))
            for name, parameter in itertools.chain(chunk.named_parameters(), buffers):
                if is_adapter_parameter(name) != self._maps_adapter:
                    continue
                if (
                    name == "output_layer.weight"
                    and not self._has_scalar_head
                    and chunk.share_embeddings_and_output_weights
                ):
                    # The last stage's copy of tied embeddings. Only the embedding itself is
                    # exported and saved.
                    self._tied_copy = parameter
                    continue
                yield global_name(name, chunk, first_expert=first_expert), parameter

    def _describe(self, name: str, parameter: Tensor) -> ParameterInfo:
        # Megatron marks parameters with attributes: whether they are split, and along which
        # dimension.
        marks: Mapping[str, Any] = vars(parameter)
        is_expert = EXPERT_NUMBER.search(name) is not None
        stacks_experts = is_expert_adapter(name) or is_expert_stack(name)
        group = self._membership.expert_tp if is_expert or stacks_experts else self._membership.tp
        is_split = bool(marks.get("tensor_model_parallel")) and group.size() > 1
        is_head = name == "output_layer.weight" and not self._has_scalar_head
        return ParameterInfo(
            name=name,
            stage=self._membership.topology.pp.rank,
            expert_rank=self._membership.ep.rank() if is_expert else None,
            shape=tuple(parameter.shape),
            split_dim=int(marks["partition_dim"]) if is_split else None,
            is_vocab_matrix=is_head
            or name == EMBEDDING
            or (is_trained_head(name) and not self._has_scalar_head),
            is_buffer=name.endswith(ROUTER_BIAS),
            stacks_experts=stacks_experts,
        )

    def _find_mapping(self, name: str) -> WeightMapping:
        if self._maps_adapter:
            return find_peft_mapping(
                name,
                find_mapping=self._translation.find_mapping,
                head="score" if self._has_scalar_head else "lm_head",
                names=self._names,
                file_names=self._file_names,
            )
        if self._has_scalar_head and name in _SCALAR_HEAD_MAPPINGS:
            return _SCALAR_HEAD_MAPPINGS[name]
        return self._translation.find_mapping(name)

    def _full_shape(self, info: ParameterInfo) -> tuple[int, ...]:
        shape = list(self._shard_shape(info))
        if info.split_dim is not None:
            shape[info.split_dim] *= self._shard_group(info).size()
        if info.is_vocab_matrix:
            shape[0] = self._vocab_size
        return tuple(shape)

    def _hf_shapes(
        self, entry: MappedParameter, full: Tensor
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the Hugging Face names and shapes of a full tensor."""
        kind, names = entry.mapping.kind, entry.mapping.names
        if kind == "plain":
            yield names[0], tuple(full.shape)
            return
        if entry.info.stacks_experts:
            # The shape is the same with and without gating, because `full` counts as a single
            # shard.
            shape_kind: MappingKind = "experts_b" if kind == "gated_experts_b" else kind
            yield names[0], tuple(join_expert_shards([full], kind=shape_kind).shape)
            return
        config, rest = self._translation.transformer_config, tuple(full.shape[1:])
        key_rows = config.num_query_groups * config.kv_channels
        rows = (
            (full.shape[0] - 2 * key_rows, key_rows, key_rows)
            if kind == "qkv"
            else (full.shape[0] // 2,) * 2
        )
        for name, num_rows in zip(names, rows, strict=True):
            yield name, (num_rows, *rest)
