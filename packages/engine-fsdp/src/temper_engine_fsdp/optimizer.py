"""AdamW on this rank's shards, with the global gradient norm.

The update is elementwise, so it runs on the local tensors with torch's fused kernel and never through DTensor's dispatch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from temper_engine_api.specs import OptimizerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Optimiser state of one parameter's shard, float32, on the parameter's device."""

    first: Tensor
    """Exponential average of the gradient, in the shape of the local shard."""
    second: Tensor
    """Exponential average of its square."""
    count: Tensor
    """[] updates that this parameter has seen."""


class ShardedAdamW:
    """Moments of every parameter, clipping by the global norm, and the update."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, spec: OptimizerSpec, sum_over_shards: Callable[[Tensor], Tensor]) -> None:
        self._parameters = parameters
        self._spec = spec
        self._sum_over_shards = sum_over_shards
        self.moments = {name: _fresh_moments(local(parameter)) for name, parameter in parameters.items()}

    @torch.no_grad()
    def step(self, *, lr: float) -> float:
        """Global norm over all shards in float32 before clipping; clips and updates only where it is finite."""
        grads = {name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        norm = self._global_norm(list(grads.values()))
        if not math.isfinite(norm):
            return norm
        limit = self._spec.clip_grad_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_(list(grads.values()), limit / norm)
        decayed = [name for name in grads if self._parameters[name].ndim >= 2 or self._spec.decays_vectors]
        self._update(decayed, grads, lr=lr, weight_decay=self._spec.weight_decay)
        self._update([name for name in grads if name not in set(decayed)], grads, lr=lr, weight_decay=0.0)
        return norm

    def _global_norm(self, grads: list[Tensor]) -> float:
        device = next(iter(self.moments.values())).count.device
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads] or [torch.zeros((), device=device)]
        # float64 holds the square of every float32 norm.
        square = torch.stack(norms).double().square().sum()
        return float(self._sum_over_shards(square).sqrt().float())

    def _update(self, names: list[str], grads: Mapping[str, Tensor], *, lr: float, weight_decay: float) -> None:
        for name in names:
            if grads[name].numel() == 0:
                # This rank holds no row of it; the count goes on for checkpoints at another world size.
                self.moments[name].count.add_(1)
        present = [name for name in names if grads[name].numel() > 0]
        if not present:
            return
        beta1, beta2 = self._spec.betas
        adamw(
            [local(self._parameters[name]) for name in present],
            [grads[name] for name in present],
            [self.moments[name].first for name in present],
            [self.moments[name].second for name in present],
            [],
            [self.moments[name].count for name in present],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self._spec.eps,
            maximize=False,
        )


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def _fresh_moments(shard: Tensor) -> Moments:
    return Moments(
        first=torch.zeros_like(shard),
        second=torch.zeros_like(shard),
        count=torch.zeros((), dtype=torch.float32, device=shard.device),
    )
