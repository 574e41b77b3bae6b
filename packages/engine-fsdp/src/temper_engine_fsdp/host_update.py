"""AdamW in host memory for weights that live on CUDA: gradients and weights come down, updated weights go up, and the copies overlap."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Descent:
    """A weight and its gradient on their way down."""

    weight: Tensor
    gradient: Tensor
    arrival: torch.cuda.Event


def update_on_host(weights: Sequence[Tensor], gradients: Sequence[Tensor], update: Callable[[int, Tensor, Tensor], None]) -> None:
    """Run ``update(i, weight, gradient)`` on float32 host copies, one weight after the other, while others are still copied.

    Args:
        weights: on CUDA; they hold the result once this returns and the current stream has come so far.
        gradients: of them.
        update: changes the weight that it is given in place.
    """
    current, down = torch.cuda.current_stream(), torch.cuda.Stream()
    down.wait_stream(current)
    with torch.cuda.stream(down):
        descents = [_descend(weight, gradient, stream=down) for weight, gradient in zip(weights, gradients, strict=True)]
    for i, descent in enumerate(descents):
        descent.arrival.synchronize()
        raised = descent.weight.float()
        update(i, raised, descent.gradient.float())
        descent.weight.copy_(raised)
        weights[i].copy_(descent.weight, non_blocking=True)


def _descend(weight: Tensor, gradient: Tensor, *, stream: torch.cuda.Stream) -> _Descent:
    copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in (weight, gradient)]
    arrival = torch.cuda.Event()
    arrival.record(stream)
    return _Descent(weight=copies[0], gradient=copies[1], arrival=arrival)
