"""Activation checkpointing: recompute decoder layers, and offload their inputs to host memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from temper_engine_fsdp.config import FSDPConfig

_MATMULS = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
)
_ATTENTION = ("scaled_dot_product", "varlen_attn", "flash_attention")
"""Name parts of attention operators; the names differ by device and torch version."""


def checkpoint_layers(model: PreTrainedModel, *, config: FSDPConfig) -> None:
    """Recompute each decoder layer in the backward pass, as configured.

    With `checkpointing_keeps_products`, keep the outputs of attention and every second matmul.
    """
    # Reentrant checkpointing does not support selective contexts or saved-tensor hooks.
    options: dict[str, object] = {"use_reentrant": False}
    if config.checkpointing_keeps_products:
        options["context_fn"] = _selective_contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    # Forward and recomputation count separately, so that both keep the same matmuls.
    counts = {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext,
        operator: Callable[..., object],
        *_: object,
        **__: object,
    ) -> CheckpointPolicy:
        if any(part in str(operator) for part in _ATTENTION):
            return CheckpointPolicy.MUST_SAVE
        if operator not in _MATMULS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute] += 1
        return (
            CheckpointPolicy.MUST_SAVE
            if counts[context.is_recompute] % 2
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]] = (
        create_selective_checkpoint_contexts(policy)
    )
    return contexts


@dataclass(slots=True, kw_only=True)
class OffloadedActivation:
    """An activation in host memory."""

    host: Tensor
    device: torch.device
    fetched: Tensor | None = None
    """Copy on the device, possibly still in flight."""
    copy_done: torch.cuda.Event | None = None
    """Event after the copy to the device."""


class ActivationOffloader:
    """Offloads the tensors that autograd saves in one forward pass.

    Only tensors that require grad are moved; of a recomputed layer that is its input. On CUDA the
    copies use pinned memory and a separate stream, and each backward step prefetches the next
    tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device_type = device.type
        self.offloaded: list[OffloadedActivation] = []
        """Activations of this pass, in the order in which they were saved."""

    def offload_saved_tensors(self) -> AbstractContextManager[None]:
        """Return a context that offloads the tensors autograd saves inside it."""
        hooks: AbstractContextManager[None] = saved_tensors_hooks(self._offload, self._restore)
        return hooks

    def _offload(self, tensor: Tensor) -> Tensor | int:
        if (
            not tensor.requires_grad
            # torch's checkpoint saves an empty tensor in host memory next to a layer's inputs.
            or tensor.device.type != self._device_type
            # Parameters and their views, such as a transposed weight, stay: FSDP owns their memory.
            or isinstance(tensor, torch.nn.Parameter)
            or isinstance(tensor._base, torch.nn.Parameter)
        ):
            return tensor
        self.offloaded.append(self._copy_to_host(tensor.detach()))
        return len(self.offloaded) - 1

    def _copy_to_host(self, tensor: Tensor) -> OffloadedActivation:
        if self._side is None:
            return OffloadedActivation(host=tensor.clone(), device=tensor.device)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
        # record_stream keeps the allocator from reusing the memory before the copy is done.
        tensor.record_stream(self._side)
        return OffloadedActivation(host=host, device=tensor.device)

    def _restore(self, saved: Tensor | int) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        # The backward pass runs in reverse order, so the previous tensor is needed next.
        for index in (saved, saved - 1):
            if index >= 0:
                self._fetch(self.offloaded[index])
        offloaded = self.offloaded[saved]
        tensor_on_device, offloaded.fetched = offloaded.fetched, None
        assert tensor_on_device is not None
        if offloaded.copy_done is not None:
            torch.cuda.current_stream().wait_event(offloaded.copy_done)
            tensor_on_device.record_stream(torch.cuda.current_stream())
        return tensor_on_device

    def _fetch(self, offloaded: OffloadedActivation) -> None:
        if offloaded.fetched is not None:
            return
        if self._side is None:
            offloaded.fetched = offloaded.host
            return
        with torch.cuda.stream(self._side):
            offloaded.fetched = offloaded.host.to(offloaded.device, non_blocking=True)
            offloaded.copy_done = torch.cuda.Event()
            offloaded.copy_done.record(self._side)
