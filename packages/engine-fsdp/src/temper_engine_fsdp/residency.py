"""Where parameters, gradients and optimiser states live: on the device, or parked in host memory between an engine's contexts.

Parking copies whole storages to the host and empties them in place, so every tensor that FSDP or the optimiser holds on them stays
valid and is filled again on return. On a CPU the same happens between two places in host memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

Enumerate = Callable[[], Iterable[Tensor]]
"""The tensors of one group as they are now."""


@dataclass(slots=True, kw_only=True)
class _Parked:
    """A storage that was emptied, and its bytes on the host."""

    tensor: Tensor
    host: Tensor


@dataclass(slots=True, kw_only=True)
class _Group:
    """Tensors that move together."""

    tensors: Enumerate
    parked: list[_Parked] = field(default_factory=list)
    is_parked: bool = False


class Residency:
    """Brings groups of tensors in for the length of a context, and puts back what it brought in."""

    def __init__(self, groups: Mapping[str, Enumerate]) -> None:
        self._groups = {name: _Group(tensors=tensors) for name, tensors in groups.items()}

    def is_parked(self, name: str) -> bool:
        """Whether a group lies in host memory."""
        return self._groups[name].is_parked

    @contextmanager
    def resident(self, *names: str) -> Iterator[None]:
        """These groups are on the device inside; those that were parked are parked again on leaving, also after an exception."""
        brought_in = [name for name in names if self._groups[name].is_parked]
        for name in brought_in:
            self.bring_in(name)
        try:
            yield
        finally:
            for name in brought_in:
                self.park(name)

    def park(self, name: str) -> None:
        """Move a group to host memory and free its place; nothing happens where it is parked."""
        group = self._groups[name]
        if group.is_parked:
            return
        group.parked = [_empty(tensor) for tensor in _one_per_storage(group.tensors())]
        group.is_parked = True

    def bring_in(self, name: str) -> None:
        """Move a group back; nothing happens where it is on the device."""
        group = self._groups[name]
        for parked in group.parked:
            _refill(parked)
        group.parked = []
        group.is_parked = False


def _one_per_storage(tensors: Iterable[Tensor]) -> list[Tensor]:
    found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.untyped_storage().nbytes() > 0}
    return list(found.values())


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _empty(tensor: Tensor) -> _Parked:
    content = _bytes_of(tensor)
    host = torch.empty(content.shape, dtype=torch.uint8, pin_memory=tensor.is_cuda)
    host.copy_(content)
    tensor.untyped_storage().resize_(0)
    return _Parked(tensor=tensor, host=host)


def _refill(parked: _Parked) -> None:
    parked.tensor.untyped_storage().resize_(parked.host.numel())
    _bytes_of(parked.tensor).copy_(parked.host)
