"""What is kept of a forward pass for the backward pass: everything, what is dear to compute again, or the inputs of layers alone.

Recomputed layers can also leave their inputs in host memory meanwhile.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
"""Parts of the names of attention's operators, of which there is one per device and version of torch."""


def checkpoint_layers(model: PreTrainedModel, *, config: FSDPConfig) -> None:
    """Let each decoder layer be computed again in the backward pass, as configured."""
    options: dict[str, object] = {"use_reentrant": False}
    if config.checkpointing_keeps_products:
        options["context_fn"] = _selective_contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
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
    """A tensor that waits in host memory."""

    host: Tensor
    device: torch.device
    fetched: Tensor | None = None
    """On its device again, or on its way there."""
    copy_done: torch.cuda.Event | None = None
    """Once it is there."""


class ActivationOffloader:
    """Moves what autograd keeps to host memory, and back one tensor ahead of its use; of one forward pass.

    Only what has a gradient moves: of recomputed layers that is their input. On CUDA copies run on a stream of their own through pinned
    memory, and the backward pass of one layer hides the way back of the next one's input.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.offloaded: list[OffloadedActivation] = []
        """Of this pass so far, in the order in which they left."""

    def offload_saved_tensors(self) -> AbstractContextManager[None]:
        """What the forward pass inside keeps is parked."""
        hooks: AbstractContextManager[None] = saved_tensors_hooks(self._offload, self._restore)
        return hooks

    def _offload(self, tensor: Tensor) -> Tensor | int:
        if (
            not tensor.requires_grad
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
        # Its memory is used again only once the copy has been made.
        tensor.record_stream(self._side)
        return OffloadedActivation(host=host, device=tensor.device)

    def _restore(self, saved: Tensor | int) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
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


def maybe_offload_activations(
    device: torch.device, *, enabled: bool
) -> AbstractContextManager[None]:
    """Around one forward pass: what it keeps is parked, or stays where it is."""
    return (
        ActivationOffloader(device).offload_saved_tensors()
        if enabled and torch.is_grad_enabled()
        else nullcontext()
    )
