"""An optimizer that is not one of torch's, and keeps a Python number next to its tensors."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class CountingSgd(Optimizer):
    """SGD with momentum and a rate that falls with its step count.

    In step n, from 1, with the gradient g: v <- momentum v + g + decay w and w <- w - lr / n v.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        assert closure is None, "no engine recomputes the loss"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                # A new int in each step, as optimizers do that count in Python.
                state["num_steps"] = int(state.get("num_steps", 0)) + 1
                velocity = state.setdefault("velocity", torch.zeros_like(weight))
                velocity.mul_(group["momentum"]).add_(weight.grad)
                velocity.add_(weight, alpha=group["weight_decay"])
                weight.sub_(velocity, alpha=group["lr"] / state["num_steps"])
