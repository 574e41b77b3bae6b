"""Experts by the names that files have: transformers joins those of a layer in memory, gate above up-projection."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

_PARTS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}


def by_names_in_files(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their names in files; a joined one as views of its parts, so that writing into those fills it."""
    for name, tensor in tensors:
        layer, _, kind = name.rpartition(".experts.")
        if kind not in _PARTS:
            yield name, tensor
            continue
        for number, expert in enumerate(tensor.detach()):
            for part_name, part in zip(_PARTS[kind], expert.chunk(len(_PARTS[kind])), strict=True):
                yield f"{layer}.experts.{number}.{part_name}.weight", part


def names_in_files(name: str, tensor: Tensor) -> list[str]:
    """Of the parts of one tensor."""
    return [part_name for part_name, _ in by_names_in_files([(name, tensor)])]
