"""Megatron-Core on a machine without CUDA: inside ``megatron_on_cpu`` its CUDA calls mean the CPU; nothing outlives the context.

Where CUDA is available the context does nothing. What runs inside is Megatron's own code with gloo; streams, NCCL and kernels are not.
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


class _Nothing:
    """A stream or an event: there is one order of execution, and everything has already happened."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def _pass(self, *_: object, **__: object) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = _pass

    def record_event(self, *_: object) -> "_Nothing":
        return self

    def query(self) -> bool:
        return True


class _OnCpu(TorchFunctionMode):
    """``device="cuda"`` is the CPU, and nothing is pinned."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        chosen = dict(kwargs or {})
        if "device" in chosen and str(chosen["device"]).startswith("cuda"):
            chosen["device"] = _CPU
        if chosen.get("pin_memory"):
            chosen["pin_memory"] = False
        return func(*args, **chosen)


def _type_name(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
    """As ``Tensor.type``; Megatron's optimizers ask for the names of CUDA types and are given them."""
    found = _REAL_TYPE(tensor, *arguments, **keywords)
    is_asked_by_optimizer = _OPTIMIZER_FOLDER in sys._getframe(1).f_code.co_filename
    if isinstance(found, str) and is_asked_by_optimizer:
        return found.replace("torch.", "torch.cuda.", 1)
    return found


_REAL_TYPE = Tensor.type


def _same(this: Any, *_: object, **__: object) -> Any:
    return this


def _on_host(numbers: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Numbers of tokens per rank, as the all-to-all of gloo wants them; Megatron's own leaves alone what is no CUDA tensor."""
    return numbers.numpy() if as_numpy and isinstance(numbers, Tensor) else numbers


def _gather_of_any_sizes(
    parts: list[Tensor],
    mine: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """As ``all_gather``; gloo wants parts of one size, and what ranks have of an expert's tokens is of many."""
    if async_op or len({part.shape for part in parts}) == 1:
        return _REAL_ALL_GATHER(parts, mine, group=group, async_op=async_op)
    longest = max(part.shape[0] for part in parts)
    padded = [mine.new_zeros(longest, *mine.shape[1:]) for _ in parts]
    _REAL_ALL_GATHER(
        padded,
        torch.cat([mine, mine.new_zeros(longest - mine.shape[0], *mine.shape[1:])]),
        group=group,
    )
    for part, found in zip(parts, padded, strict=True):
        part.copy_(found[: part.shape[0]])
    return None


_REAL_ALL_GATHER = dist.all_gather


def _stand_ins() -> Iterator[tuple[object, str, object]]:
    cuda = torch.cuda
    yield cuda, "current_device", lambda: _CPU
    for name in ("synchronize", "empty_cache", "set_device"):
        yield cuda, name, lambda *_, **__: None
    for name in ("current_stream", "default_stream"):
        yield cuda, name, lambda *_, **__: _Nothing()
    yield cuda, "stream", lambda *_: nullcontext()
    yield cuda, "Stream", _Nothing
    yield cuda, "Event", _Nothing
    yield cuda, "manual_seed", torch.manual_seed
    yield cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()
    yield cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)
    yield Tensor, "cuda", _same
    yield torch.nn.Module, "cuda", _same
    yield Tensor, "type", _type_name
    yield dist, "all_gather", _gather_of_any_sizes


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """For the length of every call into Megatron; does nothing where there is CUDA, or inside itself."""
    if torch.cuda.is_available() or Tensor.type is _type_name:
        yield
        return
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    with ExitStack() as stack:
        for owner, name, stand_in in _stand_ins():
            stack.enter_context(patch.object(owner, name, stand_in))
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
        stack.enter_context(patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _on_host))
        # Megatron compiles small functions when it is imported; on a CPU that costs seconds at their first call.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_OnCpu())
        yield
