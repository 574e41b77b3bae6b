"""Information about each of Megatron's parameters, and helpers to exchange it."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from temper_engine_api.distributed.process_group import gather_objects
from temper_engine_megatron.model.gpt_chunks import PackedGPTModel

ROUTER_BIAS = "mlp.router.expert_bias"
"""Last part of the Megatron names of buffers that are in files."""
EMBEDDING = "embedding.word_embeddings.weight"
EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+")
"""Number of an expert in a Megatron name."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """Everything about a parameter except its values, known on every rank."""

    name: str
    """Megatron name with global layer and expert numbers."""
    stage: int
    """Pipeline stage that has it."""
    expert_rank: int | None
    """Rank in the expert-parallel group that has it; None if all do."""
    shape: tuple[int, ...]
    """Shape per shard."""
    split_dim: int | None
    """Dimension that is split over tensor-parallel ranks; None if it is replicated."""
    is_vocab_matrix: bool
    """True if its rows are tokens, padded to equal shards."""
    is_buffer: bool
    """True for a tensor of the model's files that is not trained, such as a router's bias."""
    stacks_experts: bool
    """True if the first dimension is experts, in the order of their ranks."""


def global_name(name: str, chunk: PackedGPTModel, *, first_expert: int) -> str:
    """Replace the local layer and expert numbers in a chunk's parameter name.

    Args:
        name: Name in the chunk.
        chunk: The chunk.
        first_expert: Global number of this rank's first expert.
    """
    match = _LAYER.match(name)
    if match is None:
        return name
    # Megatron counts layers from 1.
    layer: int = chunk.decoder.layers[int(match[1])].layer_number - 1
    rest = name[match.end() :]
    if (expert := EXPERT_NUMBER.search(rest)) is not None:
        number = first_expert + int(expert[0])
        rest = f"{rest[: expert.start()]}{number}{rest[expert.end() :]}"
    return f"decoder.layers.{layer}.{rest}"


def sort_key(name: str) -> tuple[int, int, str]:
    """Sort the embedding first, then layer by layer, then the rest."""
    match = _LAYER.match(name)
    if match is not None:
        return 1, int(match[1]), name
    return (0, 0, name) if name.startswith("embedding") else (2, 0, name)


def assign_writers(sizes: Sequence[int], *, holders: Sequence[Sequence[int]]) -> list[int]:
    """Assign each tensor to a rank that writes it, so that ranks write about the same amount.

    Deterministic, so all ranks agree. The largest tensor goes first, each to the rank with the
    least so far; tensors that few ranks have come before those that many have, which fill the gaps.
    Ranks with the same tensors differ by at most the largest tensor.

    Args:
        sizes: Size per tensor, in any unit.
        holders: Ranks with a shard of each tensor.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies" (longest processing time
    first).
    """
    assigned: Counter[int] = Counter()
    writers = dict.fromkeys(range(len(sizes)), 0)
    for i in sorted(writers, key=lambda i: (len(holders[i]), -sizes[i], i)):
        writers[i] = min(holders[i], key=lambda rank: (assigned[rank], rank))
        assigned[writers[i]] += sizes[i]
    return list(writers.values())


def gather_shards(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors from all ranks in a group on each of them."""
    if group.size() == 1:
        return [local.contiguous()]
    # Contiguous: gloo ignores strides.
    shards = [
        torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(shards, local.contiguous(), group=group)
    return shards


def gather_parameter_infos(
    local: Sequence[ParameterInfo], group: dist.ProcessGroup
) -> list[ParameterInfo]:
    """Return the distinct infos from all ranks in a group, in rank order. Collective."""
    names = [field.name for field in fields(ParameterInfo)]
    columns: dict[str, list[Any]] = {
        name: [getattr(info, name) for info in local] for name in names
    }
    # One list per field, and no tuples: a model has thousands of parameters, and class instances or
    # tuples take much longer to decode than numbers and strings.
    columns["shape"] = [list(info.shape) for info in local]
    # Remove duplicates before objects are built: ranks with different experts send equal rows for
    # all other parameters.
    rows: dict[tuple[Any, ...], None] = {}
    for gathered in gather_objects(columns, group=group):
        gathered["shape"] = [tuple(shape) for shape in gathered["shape"]]
        rows |= dict.fromkeys(zip(*(gathered[name] for name in names), strict=True))
    return [ParameterInfo(**dict(zip(names, row, strict=True))) for row in rows]
