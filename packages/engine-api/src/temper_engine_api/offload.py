"""Offload parameters, gradients and optimizer states to host memory, and load them back.

Offloading copies whole storages to the host and then resizes them to zero. All tensors that views,
flat buffers or an optimizer keep on these storages stay valid and have their data again after
loading. On a CPU the same code copies within host memory. On CUDA the copies use pinned memory and
a separate stream: the host continues at once, and prefetching overlaps with compute.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.specs import OffloadSpec

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
Mode = Literal["train", "eval", "update"]
"""Contexts of an engine that need tensors on the device."""
GROUPS_BY_MODE: Mapping[Mode, tuple[str, ...]] = {
    "train": (PARAMETERS, GRADIENTS),
    "eval": (PARAMETERS,),
    "update": (PARAMETERS, GRADIENTS, OPTIMIZER),
}
"""Tensor groups that each context needs on the device."""

ListTensors = Callable[[], Iterable[Tensor]]
"""Returns a group's current tensors."""


@dataclass(slots=True, kw_only=True)
class _OffloadedStorage:
    """An emptied storage and its bytes in host memory."""

    tensor: Tensor
    host: Tensor


@dataclass(slots=True, kw_only=True)
class _Group:
    """Tensors that are offloaded and loaded together."""

    tensors: ListTensors
    offloaded: list[_OffloadedStorage] = field(default_factory=list)
    is_offloaded: bool = False
    copy_done: torch.cuda.Event | None = None
    """Marks the end of a copy to the device that no stream has waited for yet."""


class Offloader:
    """Moves groups of tensors between the device and host memory."""

    def __init__(self, groups: Mapping[str, ListTensors], *, device: torch.device) -> None:
        self._groups = {name: _Group(tensors=tensors) for name, tensors in groups.items()}
        self._copier = _CudaCopier(device) if device.type == "cuda" else _Copier()
        self._device_type = device.type

    def is_offloaded(self, name: str) -> bool:
        """Return True if the group is in host memory."""
        return self._groups[name].is_offloaded

    @contextmanager
    def loaded(self, *names: str) -> Iterator[None]:
        """Load groups inside the context; offload those again that were offloaded before."""
        # On exit, offload only groups that this context has loaded, so that contexts can be nested.
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

    def move(self, device: Literal["cpu", "device"], *, model: bool, optimizer: bool) -> None:
        """Offload or load the groups that `BaseEngine.to` names."""
        move = self.offload if device == "cpu" else self.load
        for name, is_meant in ((PARAMETERS, model), (GRADIENTS, model), (OPTIMIZER, optimizer)):
            if is_meant:
                move(name)

    def offload(self, name: str) -> None:
        """Move a group to host memory and free its device memory; no-op if it is offloaded."""
        group = self._groups[name]
        if group.is_offloaded:
            return
        self._wait_for(name)
        # Optimizer states of an update on the CPU are in host memory already.
        on_device = (each for each in group.tensors() if each.device.type == self._device_type)
        # Tensors that share a storage (views, tied weights) must be moved once.
        group.offloaded = self._copier.offload(_unique_storages(on_device))
        group.is_offloaded = True

    def load(self, name: str) -> None:
        """Move a group to the device and wait for the copy; no-op if it is there."""
        self.prefetch(name)
        self._wait_for(name)

    def prefetch(self, name: str) -> None:
        """Start to move a group to the device; `loaded` waits for the copy."""
        group = self._groups[name]
        if not group.is_offloaded:
            return
        group.copy_done = self._copier.load(group.offloaded)
        group.offloaded = []
        group.is_offloaded = False

    def _wait_for(self, name: str) -> None:
        group = self._groups[name]
        if group.copy_done is not None:
            # The stream waits and not the host, which can go on to launch kernels.
            torch.cuda.current_stream().wait_event(group.copy_done)
            group.copy_done = None


class OffloadPolicy:
    """Loads and offloads groups around the contexts of an engine, as configured."""

    def __init__(
        self, offloader: Offloader, *, spec: OffloadSpec, eval_needs_gradients: bool = False
    ) -> None:
        self._offloader = offloader
        self._groups_by_mode = (
            {**GROUPS_BY_MODE, "eval": GROUPS_BY_MODE["train"]}
            if eval_needs_gradients
            else GROUPS_BY_MODE
        )
        self._loads_ahead = spec.load_optimizer_in == "train_mode"
        groups = (
            (PARAMETERS, spec.parameters),
            (GRADIENTS, spec.offloads_gradients),
            (OPTIMIZER, spec.optimizer),
        )
        for name, is_offloaded in groups:
            if is_offloaded:
                offloader.offload(name)

    @contextmanager
    def load_for_mode(self, mode: Mode) -> Iterator[None]:
        """Load the groups that a mode needs and restore the previous placement afterwards.

        With `load_optimizer_in: train_mode` the optimizer states start to arrive in train mode,
        stay for the optimizer step, and are offloaded after it or before an evaluation.
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
    """Copies within host memory."""

    def offload(self, tensors: list[Tensor]) -> list[_OffloadedStorage]:
        """Copy storages and free them."""
        offloaded = []
        for tensor in tensors:
            offloaded.append(_OffloadedStorage(tensor=tensor, host=_as_bytes(tensor).clone()))
            tensor.untyped_storage().resize_(0)
        return offloaded

    def load(self, offloaded: list[_OffloadedStorage]) -> torch.cuda.Event | None:
        """Fill storages again; return None because the copy is complete on return."""
        for entry in offloaded:
            # In place, so that all views of the storage have their data again.
            entry.tensor.untyped_storage().resize_(entry.host.numel())
            _as_bytes(entry.tensor).copy_(entry.host)
        return None


class _CudaCopier(_Copier):
    """Copies between CUDA and pinned memory.

    A single stream keeps the copies of one storage in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def offload(self, tensors: list[Tensor]) -> list[_OffloadedStorage]:
        """Start to copy storages and free them; the copies may still run on return."""
        # Kernels that write these tensors may still run on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        offloaded = []
        for tensor in tensors:
            content = _as_bytes(tensor)
            host = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(self._stream):
                host.copy_(content, non_blocking=True)
            # record_stream keeps the allocator from reusing the memory before the copy is done.
            content.record_stream(self._stream)
            tensor.untyped_storage().resize_(0)
            offloaded.append(_OffloadedStorage(tensor=tensor, host=host))
        return offloaded

    def load(self, offloaded: list[_OffloadedStorage]) -> torch.cuda.Event | None:
        """Start to fill storages again; return an event that marks when the copies end."""
        for entry in offloaded:
            entry.tensor.untyped_storage().resize_(entry.host.numel())
        # Kernels on the current stream may still use the memory that is reused here.
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
        # Empty storages all have the address 0.
        if tensor.untyped_storage().nbytes() > 0
    }
    return list(by_address.values())


def _as_bytes(tensor: Tensor) -> Tensor:
    # Byte views copy a storage of any dtype, including the padding between shards.
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
