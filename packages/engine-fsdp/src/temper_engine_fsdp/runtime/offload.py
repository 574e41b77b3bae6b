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
NEEDED: Mapping[Mode, tuple[str, ...]] = {
    "train": (PARAMETERS, GRADIENTS),
    "eval": (PARAMETERS,),
    "update": (PARAMETERS, GRADIENTS, OPTIMIZER),
}
"""What each context of an engine works on."""

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
    arrival: torch.cuda.Event | None = None
    """Of a copy to the device that nobody has waited for."""


class Residency:
    """Brings groups of tensors in for the length of a context, and puts back what it brought in."""

    def __init__(self, groups: Mapping[str, Enumerate], *, device: torch.device) -> None:
        self._groups = {name: _Group(tensors=tensors) for name, tensors in groups.items()}
        self._copier = _StreamCopier(device) if device.type == "cuda" else _Copier()

    def is_parked(self, name: str) -> bool:
        """Whether a group lies in host memory."""
        return self._groups[name].is_parked

    @contextmanager
    def resident(self, *names: str) -> Iterator[None]:
        """These groups are on the device inside; those that were parked are parked again on leaving, also after an exception."""
        brought_in = [name for name in names if self._groups[name].is_parked]
        for name in brought_in:
            self.send_for(name)
        for name in names:
            self._await(name)
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
        self._await(name)
        group.parked = self._copier.empty(_one_per_storage(group.tensors()))
        group.is_parked = True

    def bring_in(self, name: str) -> None:
        """Move a group back; nothing happens where it is on the device."""
        self.send_for(name)
        self._await(name)

    def send_for(self, name: str) -> None:
        """Begin to move a group back; ``resident`` waits for what it needs."""
        group = self._groups[name]
        if not group.is_parked:
            return
        group.arrival = self._copier.refill(group.parked)
        group.parked = []
        group.is_parked = False

    def _await(self, name: str) -> None:
        group = self._groups[name]
        if group.arrival is not None:
            torch.cuda.current_stream().wait_event(group.arrival)
            group.arrival = None


class Offloading:
    """What a configuration wants parked between which contexts."""

    def __init__(self, residency: Residency, *, spec: ResidencySpec, evaluation_reads_gradients: bool = False) -> None:
        self._residency = residency
        self._needed = {**NEEDED, "eval": NEEDED["train"]} if evaluation_reads_gradients else NEEDED
        self._loads_ahead = spec.load_optimizer_in == "train_mode"
        wanted = ((PARAMETERS, spec.offload_parameters), (GRADIENTS, spec.offloads_gradients), (OPTIMIZER, spec.offload_optimizer))
        for name, is_offloaded in wanted:
            if is_offloaded:
                residency.park(name)

    @contextmanager
    def around(self, mode: Mode) -> Iterator[None]:
        """What the mode needs is on the device inside, and as before after it.

        Optimiser states that are loaded in train_mode begin to arrive with it, stay for the step after it, and leave with that step or
        before an evaluation.
        """
        if self._loads_ahead and mode == "eval":
            self._residency.park(OPTIMIZER)
        with self._residency.resident(*self._needed[mode]):
            if self._loads_ahead and mode == "train":
                self._residency.send_for(OPTIMIZER)
            try:
                yield
            finally:
                if self._loads_ahead and mode == "update":
                    self._residency.park(OPTIMIZER)


class _Copier:
    """Between two places in host memory."""

    def empty(self, tensors: list[Tensor]) -> list[_Parked]:
        """Copy storages and free them."""
        parked = []
        for tensor in tensors:
            parked.append(_Parked(tensor=tensor, host=_bytes_of(tensor).clone()))
            tensor.untyped_storage().resize_(0)
        return parked

    def refill(self, parked: list[_Parked]) -> torch.cuda.Event | None:
        """Fill storages again; None where they are filled on return."""
        for entry in parked:
            entry.tensor.untyped_storage().resize_(entry.host.numel())
            _bytes_of(entry.tensor).copy_(entry.host)
        return None


class _StreamCopier(_Copier):
    """Between CUDA and pinned memory, on one stream of its own, so that copies of a storage there and back keep their order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def empty(self, tensors: list[Tensor]) -> list[_Parked]:
        """See _Copier; the copies may still run on return."""
        self._stream.wait_stream(torch.cuda.current_stream())
        parked = []
        for tensor in tensors:
            content = _bytes_of(tensor)
            host = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(self._stream):
                host.copy_(content, non_blocking=True)
            # The allocator hands the place to others only once the copy is made.
            content.record_stream(self._stream)
            tensor.untyped_storage().resize_(0)
            parked.append(_Parked(tensor=tensor, host=host))
        return parked

    def refill(self, parked: list[_Parked]) -> torch.cuda.Event | None:
        """See _Copier; an event says when the storages are filled."""
        for entry in parked:
            entry.tensor.untyped_storage().resize_(entry.host.numel())
        # What used the memory before must be done with it.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for entry in parked:
                content = _bytes_of(entry.tensor)
                content.copy_(entry.host, non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record()
        return arrival


def _one_per_storage(tensors: Iterable[Tensor]) -> list[Tensor]:
    found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.untyped_storage().nbytes() > 0}
    return list(found.values())


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
