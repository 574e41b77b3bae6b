"""Where parameters, gradients and optimiser states live: on the device, or parked in host memory between an engine's contexts.

Parking copies whole storages to the host and empties them in place, so every tensor that FSDP or the optimiser holds on them stays
valid and is filled again on return. On a CPU the same happens between two places in host memory. On CUDA the host is pinned and the
copies run on a stream of their own: parking lets the host go on at once, and what is brought in ahead overlaps with other work.
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

ListTensors = Callable[[], Iterable[Tensor]]
"""The tensors of one group as they are now."""


@dataclass(slots=True, kw_only=True)
class _OffloadedStorage:
    """A storage that was emptied, and its bytes on the host."""

    tensor: Tensor
    host: Tensor


@dataclass(slots=True, kw_only=True)
class _Group:
    """Tensors that move together."""

    tensors: ListTensors
    offloaded: list[_OffloadedStorage] = field(default_factory=list)
    is_offloaded: bool = False
    copy_done: torch.cuda.Event | None = None
    """Of a copy to the device that nobody has waited for."""


class Offloader:
    """Brings groups of tensors in for the length of a context, and puts back what it brought in."""

    def __init__(self, groups: Mapping[str, ListTensors], *, device: torch.device) -> None:
        self._groups = {name: _Group(tensors=tensors) for name, tensors in groups.items()}
        self._copier = _CudaCopier(device) if device.type == "cuda" else _Copier()

    def is_offloaded(self, name: str) -> bool:
        """Whether a group lies in host memory."""
        return self._groups[name].is_offloaded

    @contextmanager
    def loaded(self, *names: str) -> Iterator[None]:
        """These groups are on the device inside; those that were parked are parked again on leaving, also after an exception."""
        loaded_here = [name for name in names if self._groups[name].is_offloaded]
        for name in loaded_here:
            self.prefetch(name)
        for name in names:
            self._wait_for(name)
        try:
            yield
        finally:
            for name in loaded_here:
                self.offload(name)

    def offload(self, name: str) -> None:
        """Move a group to host memory and free its place; nothing happens where it is parked."""
        group = self._groups[name]
        if group.is_offloaded:
            return
        self._wait_for(name)
        group.offloaded = self._copier.offload(_unique_storages(group.tensors()))
        group.is_offloaded = True

    def load(self, name: str) -> None:
        """Move a group back; nothing happens where it is on the device."""
        self.prefetch(name)
        self._wait_for(name)

    def prefetch(self, name: str) -> None:
        """Begin to move a group back; ``resident`` waits for what it needs."""
        group = self._groups[name]
        if not group.is_offloaded:
            return
        group.copy_done = self._copier.load(group.offloaded)
        group.offloaded = []
        group.is_offloaded = False

    def _wait_for(self, name: str) -> None:
        group = self._groups[name]
        if group.copy_done is not None:
            torch.cuda.current_stream().wait_event(group.copy_done)
            group.copy_done = None


class OffloadPolicy:
    """What a configuration wants parked between which contexts."""

    def __init__(
        self, offloader: Offloader, *, spec: ResidencySpec, eval_needs_gradients: bool = False
    ) -> None:
        self._offloader = offloader
        self._groups_by_mode = (
            {**GROUPS_BY_MODE, "eval": GROUPS_BY_MODE["train"]}
            if eval_needs_gradients
            else GROUPS_BY_MODE
        )
        self._loads_ahead = spec.load_optimizer_in == "train_mode"
        groups = (
            (PARAMETERS, spec.offload_parameters),
            (GRADIENTS, spec.offloads_gradients),
            (OPTIMIZER, spec.offload_optimizer),
        )
        for name, is_offloaded in groups:
            if is_offloaded:
                offloader.offload(name)

    @contextmanager
    def mode_context(self, mode: Mode) -> Iterator[None]:
        """What the mode needs is on the device inside, and as before after it.

        Optimiser states that are loaded in train_mode begin to arrive with it, stay for the step after it, and leave with that step or
        before an evaluation.
        """
        if self._loads_ahead and mode == "eval":
            self._offloader.offload(OPTIMIZER)
        with self._offloader.loaded(*self._groups_by_mode[mode]):
            if self._loads_ahead and mode == "train":
                self._offloader.prefetch(OPTIMIZER)
            try:
                yield
            finally:
                if self._loads_ahead and mode == "update":
                    self._offloader.offload(OPTIMIZER)


class _Copier:
    """Between two places in host memory."""

    def offload(self, tensors: list[Tensor]) -> list[_OffloadedStorage]:
        """Copy storages and free them."""
        offloaded = []
        for tensor in tensors:
            offloaded.append(_OffloadedStorage(tensor=tensor, host=_as_bytes(tensor).clone()))
            tensor.untyped_storage().resize_(0)
        return offloaded

    def load(self, offloaded: list[_OffloadedStorage]) -> torch.cuda.Event | None:
        """Fill storages again; None where they are filled on return."""
        for entry in offloaded:
            entry.tensor.untyped_storage().resize_(entry.host.numel())
            _as_bytes(entry.tensor).copy_(entry.host)
        return None


class _CudaCopier(_Copier):
    """Between CUDA and pinned memory, on one stream of its own, so that copies of a storage there and back keep their order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def offload(self, tensors: list[Tensor]) -> list[_OffloadedStorage]:
        """See _Copier; the copies may still run on return."""
        self._stream.wait_stream(torch.cuda.current_stream())
        offloaded = []
        for tensor in tensors:
            content = _as_bytes(tensor)
            host = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(self._stream):
                host.copy_(content, non_blocking=True)
            # The allocator hands the place to others only once the copy is made.
            content.record_stream(self._stream)
            tensor.untyped_storage().resize_(0)
            offloaded.append(_OffloadedStorage(tensor=tensor, host=host))
        return offloaded

    def load(self, offloaded: list[_OffloadedStorage]) -> torch.cuda.Event | None:
        """See _Copier; an event says when the storages are filled."""
        for entry in offloaded:
            entry.tensor.untyped_storage().resize_(entry.host.numel())
        # What used the memory before must be done with it.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for entry in offloaded:
                content = _as_bytes(entry.tensor)
                content.copy_(entry.host, non_blocking=True)
            copy_done = torch.cuda.Event()
            copy_done.record()
        return copy_done


def _unique_storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    by_address = {
        tensor.untyped_storage().data_ptr(): tensor
        for tensor in tensors
        if tensor.untyped_storage().nbytes() > 0
    }
    return list(by_address.values())


def _as_bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
