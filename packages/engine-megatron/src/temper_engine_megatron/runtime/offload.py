"""Where parameters, gradients and optimiser states live: on the device, or parked in host memory between an engine's contexts.

Parking copies whole storages to the host and empties them in place, so that what Megatron's buffers and optimizers hold on them stays valid
and is filled again on return. On a CPU the same happens between two places in host memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.specs import ResidencySpec

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
Mode = Literal["train", "eval", "update"]
GROUPS_BY_MODE: Mapping[Mode, tuple[str, ...]] = {
    "train": (PARAMETERS, GRADIENTS),
    "eval": (PARAMETERS,),
    "update": (PARAMETERS, GRADIENTS, OPTIMIZER),
}
"""What each context of an engine works on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parked:
    """A storage that was emptied, and its bytes on the host."""

    tensor: Tensor
    host: Tensor


@dataclass(slots=True, kw_only=True)
class _Group:
    """Tensors that move together."""

    tensors: Callable[[], Iterable[Tensor]]
    """Those that there are now."""
    parked: list[_Parked] = field(default_factory=list)
    is_offloaded: bool = False


class Offloader:
    """Brings groups of tensors in for the length of a context, and puts back what it brought in."""

    def __init__(
        self, groups: Mapping[str, Callable[[], Iterable[Tensor]]], *, spec: ResidencySpec
    ) -> None:
        self._groups = {name: _Group(tensors=tensors) for name, tensors in groups.items()}
        self._stays_for_update = spec.load_optimizer_in == "train_mode"
        wanted = (
            (PARAMETERS, spec.offload_parameters),
            (GRADIENTS, spec.offloads_gradients),
            (OPTIMIZER, spec.offload_optimizer),
        )
        for name, is_offloaded in wanted:
            if is_offloaded:
                self.offload(name)

    def is_offloaded(self, name: str) -> bool:
        """Whether a group lies in host memory."""
        return self._groups[name].is_offloaded

    def bytes_on_device(self) -> int:
        """What all groups hold now."""
        found = (tensor for group in self._groups.values() for tensor in group.tensors())
        return sum(tensor.untyped_storage().nbytes() for tensor in _one_per_storage(found))

    @contextmanager
    def around(self, mode: Mode) -> Iterator[None]:
        """What the mode needs is on the device inside, and as before after it.

        Optimiser states that are loaded in train_mode arrive with it, stay for the step after it, and leave with that step or before an
        evaluation.
        """
        if self._stays_for_update and mode == "eval":
            self.offload(OPTIMIZER)
        with self.loaded(*GROUPS_BY_MODE[mode]):
            if self._stays_for_update and mode == "train":
                self.load(OPTIMIZER)
            try:
                yield
            finally:
                if self._stays_for_update and mode == "update":
                    self.offload(OPTIMIZER)

    @contextmanager
    def loaded(self, *names: str) -> Iterator[None]:
        """These groups are on the device inside; those that were parked are parked again on leaving, also after an exception."""
        brought_in = [name for name in names if self._groups[name].is_offloaded]
        for name in brought_in:
            self.load(name)
        try:
            yield
        finally:
            for name in brought_in:
                self.offload(name)

    def offload(self, name: str) -> None:
        """Move a group to host memory and free its place; nothing happens where it is parked."""
        group = self._groups[name]
        if group.is_offloaded:
            return
        tensors = _one_per_storage(group.tensors())
        group.parked = [
            _Parked(tensor=tensor, host=_to_host(_bytes_of(tensor))) for tensor in tensors
        ]
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.current_stream().synchronize()
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)
        group.is_offloaded = True

    def load(self, name: str) -> None:
        """Move a group back; nothing happens where it is on the device."""
        group = self._groups[name]
        for entry in group.parked:
            entry.tensor.untyped_storage().resize_(entry.host.numel())
            # On the stream of whatever uses it next, so nobody has to wait.
            _bytes_of(entry.tensor).copy_(entry.host, non_blocking=True)
        group.parked = []
        group.is_offloaded = False


def _one_per_storage(tensors: Iterable[Tensor]) -> list[Tensor]:
    found = {
        tensor.untyped_storage().data_ptr(): tensor
        for tensor in tensors
        if tensor.untyped_storage().nbytes() > 0
    }
    return list(found.values())


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _to_host(content: Tensor) -> Tensor:
    host = torch.empty(content.shape, dtype=torch.uint8, pin_memory=content.is_cuda)
    return host.copy_(content, non_blocking=True)
