"""Experts under the names that Hugging Face files have, a tensor for each; transformers joins those of a layer in memory, gate above up.

In: tensors by their names in memory, as fresh models have them and FSDPEngine's checkpoints. Out: the same numbers by their names in files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from temper_engine_api.checkpoint.saved_state import COUNT, SavedState

_PARTS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Of each expert, one above the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlice:
    """Where a tensor of a file is in memory."""

    joined: str
    """The tensor that it is a part of."""
    expert: int
    """Of the first dimension of that."""
    part: int
    """Of its rows."""
    num_parts: int
    """Equal parts that its rows are."""


def find_expert_slice(name: str) -> ExpertSlice | None:
    """Of a tensor by its name in files; None where it is no expert's."""
    layer, _, rest = name.partition(".experts.")
    number, _, kind = rest.removesuffix(".weight").partition(".")
    for joined, parts in _PARTS.items():
        if number.isdecimal() and kind in parts:
            return ExpertSlice(
                joined=f"{layer}.experts.{joined}",
                expert=int(number),
                part=parts.index(kind),
                num_parts=len(parts),
            )
    return None


def split(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor by its names in files: what is joined, [experts, rows, columns], as views of its parts, anything else as it is."""
    layer, _, kind = name.rpartition(".experts.")
    if kind not in _PARTS:
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        for part_name, part in zip(_PARTS[kind], expert.chunk(len(_PARTS[kind])), strict=True):
            yield f"{layer}.experts.{number}.{part_name}.weight", part


def homes(saved: SavedState) -> dict[str, str]:
    """By name in files, the name that a checkpoint has: that of the joined tensor, or the same."""
    return {part: name for name, part, _ in _parts_of(saved)}


def _parts_of(saved: SavedState) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name in the checkpoint, name in files, shape there) of everything in it."""
    for name, shape in saved.weights.items():
        for part, tensor in split(name, torch.empty(shape, device="meta")):
            yield name, part, tuple(tensor.shape)


def split_saved_experts(saved: SavedState) -> SavedState:
    """A checkpoint's state as if nothing were joined. What is, is read once for all of its parts, if these are asked for in a row."""
    home_of = homes(saved)
    shapes = {part: shape for _, part, shape in _parts_of(saved)}
    last_read: dict[str, tuple[str, dict[str, Tensor]]] = {}

    def read(kind: str, part: str) -> Tensor:
        home = home_of[part]
        if home == part or kind == COUNT:
            return saved.read(kind, home)
        name, parts = last_read.get(kind, ("", {}))
        if name != home:
            parts = dict(split(home, saved.read(kind, home)))
            last_read[kind] = home, parts
        return parts[part]

    return replace(saved, weights=shapes, read=read)
