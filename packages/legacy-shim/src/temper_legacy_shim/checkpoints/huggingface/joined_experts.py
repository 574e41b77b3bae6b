"""Join the experts of a mixture to one tensor [experts, rows, columns] per matrix.

transformers stores them in this way since 5.0.

In: tensors by the names that old models and Hugging Face files have, one for each expert. Out: the
same numbers by the names that an FSDP engine's step directory has, gate above up projection.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from temper_legacy_shim.checkpoints.files.dtypes import Block, Dtype
from temper_legacy_shim.checkpoints.files.lazy import (
    LazyTensor,
    Shape,
    concatenated,
    num_rows,
)
from temper_legacy_shim.errors import DamagedFileError

_PARTS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Matrices of each expert in row order."""
_ALIASES: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """Position of an expert's matrix in a joined tensor."""

    joined: str
    """The tensor it is a part of."""
    expert: int
    """Index in the first dimension."""
    part: int
    """Index among the row blocks."""


def _position_of(name: str) -> _Position | None:
    """Return the expert of a tensor by its name in files; None if it belongs to no expert."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    kind = _ALIASES.get(match[3], match[3])
    joined, parts = next((joined, parts) for joined, parts in _PARTS.items() if kind in parts)
    return _Position(
        joined=f"{to_memory_name(match[1])}.{joined}", expert=int(match[2]), part=parts.index(kind)
    )


def to_memory_name(name: str) -> str:
    """Rename a file's tensor as transformers' model since 5.0: experts get the joined name."""
    position = _position_of(name)
    return name.replace(".block_sparse_moe.", ".mlp.") if position is None else position.joined


def as_mixtral_s_files(name: str) -> str:
    """Rename an expert's weight ``mlp.experts.0.gate_proj.weight`` as Mixtral's files do."""
    match = _EXPERT.fullmatch(name)
    if match is not None:
        kind = next((old for old, kind in _ALIASES.items() if kind == match[3]), match[3])
        name = f"{match[1]}.{match[2]}.{kind}.weight"
    return re.sub(r"\.mlp\.(?=gate\.|experts\.)", ".block_sparse_moe.", name)


def joined(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Join the tensors of a file to those of the model in memory, by name.

    Raises:
        DamagedFileError: an expert is missing, or has a shape that differs from the others.
    """
    result: dict[str, LazyTensor] = {}
    experts: dict[str, dict[tuple[int, int], LazyTensor]] = {}
    for name, tensor in tensors.items():
        position = _position_of(name)
        if position is None:
            result[to_memory_name(name)] = tensor
        else:
            experts.setdefault(position.joined, {})[position.expert, position.part] = tensor
    return result | {name: _stacked(name, parts) for name, parts in experts.items()}


def _stacked(name: str, parts: Mapping[tuple[int, int], LazyTensor]) -> LazyTensor:
    num_experts, num_parts = (
        1 + max(expert for expert, _ in parts),
        len(_PARTS[name.rpartition(".")[2]]),
    )
    missing = [(e, p) for e in range(num_experts) for p in range(num_parts) if (e, p) not in parts]
    shapes = {(tensor.shape, tensor.dtype.name) for tensor in parts.values()}
    if missing or len(shapes) != 1:
        fault = (
            f"none of number {missing[0][0]}"
            if missing
            else f"such of {' and '.join(sorted(map(str, shapes)))}"
        )
        raise DamagedFileError(
            f"of the experts in {name} there are {len(parts)} matrices, but {fault}: copy the "
            "checkpoint again."
        )
    full = [
        _Single(concatenated([parts[expert, part] for part in range(num_parts)], dim=0))
        for expert in range(num_experts)
    ]
    return concatenated(full, dim=0)


def joined_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Update counts by names in memory: the maximum over the experts of a tensor."""
    result: dict[str, int] = {}
    for name, count in counts.items():
        result[to_memory_name(name)] = max(count, result.get(to_memory_name(name), 0))
    return result


@dataclass(frozen=True)
class _Single:
    source: LazyTensor
    """[rows, columns]."""

    @property
    def shape(self) -> Shape:
        """[1, rows, columns]."""
        return (1, *self.source.shape)

    @property
    def dtype(self) -> Dtype:
        return self.source.dtype

    def read(self, start: int, stop: int) -> Block:
        """Return the matrix, or nothing."""
        rows = num_rows(self.source.shape) if start < stop else 0
        return self.source.read(0, rows).reshape(stop - start, *self.source.shape)
