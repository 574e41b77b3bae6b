"""Run Megatron-Core without CUDA: inside `support_missing_cuda` its CUDA calls use the CPU.

Megatron-Core hard-codes CUDA (devices, streams, RNG states, type names) and has no setting for most
of these places, so the calls are patched. The patches last only for the context. If CUDA is
available, the context does nothing. What runs inside is Megatron's own code with gloo, so it says
nothing about CUDA streams, NCCL or GPU kernels.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_OPTIMIZER_FOLDER = "megatron/core/optimizer"


class _NullStream:
    """Stands in for a CUDA stream or event; on a CPU all earlier work has completed."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def _pass(self, *_: object, **__: object) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = _pass

    def record_event(self, *_: object) -> "_NullStream":
        return self

    def query(self) -> bool:
        return True


class _CpuDeviceMode(TorchFunctionMode):
    """Replaces `device="cuda"` by the CPU and ignores `pin_memory`.

    A function mode, because replacing `torch.empty` and the like would break transformers 5, which
    then leaves rotary frequencies uninitialized.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        cpu_kwargs = dict(kwargs or {})
        if "device" in cpu_kwargs and str(cpu_kwargs["device"]).startswith("cuda"):
            cpu_kwargs["device"] = _CPU
        if cpu_kwargs.get("pin_memory"):
            cpu_kwargs["pin_memory"] = False
        return func(*args, **cpu_kwargs)


def _cuda_type_name(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return what `Tensor.type` returns, but CUDA names for Megatron's optimizers.

    They compare type names such as "torch.cuda.FloatTensor", and reject or skip other tensors.
    """
    type_name = _REAL_TYPE(tensor, *args, **kwargs)
    # Only callers in the optimizer get this name. Other callers expect the true one.
    is_called_by_optimizer = _OPTIMIZER_FOLDER in sys._getframe(1).f_code.co_filename
    if isinstance(type_name, str) and is_called_by_optimizer:
        return type_name.replace("torch.", "torch.cuda.", 1)
    return type_name


_REAL_TYPE = Tensor.type


def _return_self(this: Any, *_: object, **__: object) -> Any:
    return this


def _split_sizes_to_numpy(sizes: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert the split sizes of the experts' all-to-all to numpy.

    gloo does not accept a tensor of sizes, and Megatron converts only CUDA tensors.
    """
    return sizes.numpy() if as_numpy and isinstance(sizes, Tensor) else sizes


def _all_gather_uneven(
    outputs: list[Tensor],
    local: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Replace `all_gather` for outputs of different lengths, which gloo does not support.

    Ranks have different token counts for an expert, so shorter tensors are padded.
    """
    if async_op or len({output.shape for output in outputs}) == 1:
        return _REAL_ALL_GATHER(outputs, local, group=group, async_op=async_op)
    longest = max(output.shape[0] for output in outputs)
    padded = [local.new_zeros(longest, *local.shape[1:]) for _ in outputs]
    _REAL_ALL_GATHER(
        padded,
        torch.cat([local, local.new_zeros(longest - local.shape[0], *local.shape[1:])]),
        group=group,
    )
    for output, rows in zip(outputs, padded, strict=True):
        output.copy_(rows[: output.shape[0]])
    return None


_REAL_ALL_GATHER = dist.all_gather


def _replacements() -> Iterator[tuple[object, str, object]]:
    """Yield (owner, attribute, replacement) for each patched attribute."""
    cuda = torch.cuda
    yield cuda, "current_device", lambda: _CPU
    for name in ("synchronize", "empty_cache", "set_device"):
        yield cuda, name, lambda *_, **__: None
    for name in ("current_stream", "default_stream"):
        yield cuda, name, lambda *_, **__: _NullStream()
    yield cuda, "stream", lambda *_: nullcontext()
    yield cuda, "Stream", _NullStream
    yield cuda, "Event", _NullStream
    yield cuda, "manual_seed", torch.manual_seed
    yield cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()
    yield cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)
    yield Tensor, "cuda", _return_self
    yield torch.nn.Module, "cuda", _return_self
    yield Tensor, "type", _cuda_type_name
    yield dist, "all_gather", _all_gather_uneven


@contextmanager
def support_missing_cuda() -> Iterator[None]:
    """Make Megatron-Core use the CPU inside the context; use it around every call into Megatron.

    Does nothing if CUDA is available, or if the context is already active.
    """
    if torch.cuda.is_available() or Tensor.type is _cuda_type_name:
        yield
        return
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    with ExitStack() as stack:
        for owner, name, replacement in _replacements():
            stack.enter_context(patch.object(owner, name, replacement))
        # Megatron's RNG tracker has no public way to use the CPU generator.
        stack.enter_context(
            patch.object(
                megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()
            )
        )
        stack.enter_context(
            patch.object(
                megatron_random,
                "_set_cuda_rng_state",
                lambda state, *_, **__: torch.set_rng_state(state),
            )
        )
        stack.enter_context(
            patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _split_sizes_to_numpy)
        )
        # Megatron decorates small functions with torch.compile when it is imported; on a CPU their
        # first call would take seconds.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_CpuDeviceMode())
        yield
