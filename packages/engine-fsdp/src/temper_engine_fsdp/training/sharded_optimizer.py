"""AdamW on this rank's shards, and what every optimiser shares: the global gradient norm, the skip of non-finite updates, clipping.

AdamW is elementwise, so it runs on the local tensors with torch's fused kernel and never through DTensor's dispatch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from temper_engine_api.specs import OptimizerSpec
from temper_engine_fsdp.runtime.host_device import LateNumber
from temper_engine_fsdp.sharding.sharded_parameter import Parameters, ShardedParameter

Gradients = Mapping[str, Tensor]
"""This rank's shard of each reduced gradient, by Hugging Face name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Optimiser state of one parameter's shard, float32, on the device where updates are computed."""

    first: Tensor
    """Exponential average of the gradient, in the shape of the local shard."""
    second: Tensor
    """Exponential average of its square."""
    count: Tensor
    """[] updates that this parameter has seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of an optimiser's state, as a checkpoint sees it."""

    owner: ShardedParameter | None
    """The parameter that it is cut like; None where every rank holds all of it."""
    tensor: Tensor
    """The shard, or the whole; loading fills it in place."""


class ShardedOptimizer(ABC):
    """An optimiser of sharded parameters."""

    def __init__(self, parameters: Parameters, *, spec: OptimizerSpec, sum_over_shards: Callable[[Tensor], Tensor]) -> None:
        self._parameters = parameters
        self._spec = spec
        self._sum_over_shards = sum_over_shards

    @torch.no_grad()
    def step(self, *, lr: float, loss_scale: float = 1.0, then: Callable[[], None] | None = None) -> float:
        """Global norm over all shards in float32 before clipping; clips and updates only where it is finite.

        Args:
            lr: the rate of this update.
            loss_scale: what gradients are divided by first.
            then: called once the update is under way; on a device that the host need not wait for, before the norm is known.
        """
        found = ((name, parameter.local_gradient()) for name, parameter in self._parameters.items())
        gradients = {name: gradient for name, gradient in found if gradient is not None}
        if loss_scale != 1.0:
            torch._foreach_mul_(list(gradients.values()), 1.0 / loss_scale)
        norm = self._global_norm(list(gradients.values()))
        late = LateNumber(norm)
        if self._launch_update(gradients, norm=norm, lr=lr):
            if then is not None:
                then()
            return late.result()
        known = late.result()
        if not math.isfinite(known):
            return known
        limit = self._spec.clip_grad_norm
        if limit is not None and known > limit:
            torch._foreach_mul_(list(gradients.values()), limit / known)
        self._update(gradients, lr=lr)
        if then is not None:
            then()
        return known

    @abstractmethod
    def _update(self, gradients: Gradients, *, lr: float) -> None:
        """Change the parameters that have a gradient."""

    @abstractmethod
    def offloadable(self) -> Iterator[Tensor]:
        """State tensors that may leave the device between updates."""

    @abstractmethod
    def pieces(self) -> dict[str, Piece]:
        """The state for a checkpoint, by a name of its own."""

    @abstractmethod
    def prepare_to_load(self, names: list[str]) -> None:
        """Make room for a state that holds these pieces, and no other. Collective."""

    def _decays(self, name: str) -> bool:
        return self._parameters[name].is_matrix or self._spec.decays_vectors

    def _launch_update(self, gradients: Gradients, *, norm: Tensor, lr: float) -> bool:
        """Clip and update in kernels that change nothing where the norm [] is not finite, so that the host need not know it.

        Returns:
            Whether that was done; else nothing has changed.
        """
        return False

    def _global_norm(self, gradients: list[Tensor]) -> Tensor:
        """[] float32, on the device."""
        device = next(iter(self._parameters.values())).local().device
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32) if gradients else [torch.zeros((), device=device)]
        # float64 holds the square of every float32 norm.
        square = torch.stack(norms).double().square().sum()
        return self._sum_over_shards(square).sqrt().float()


class ShardedAdamW(ShardedOptimizer):
    """Decoupled weight decay on parameters of two or more dimensions; moments are float32 whatever the parameters are."""

    def __init__(
        self, parameters: Parameters, *, spec: OptimizerSpec, sum_over_shards: Callable[[Tensor], Tensor], on_cpu: bool = False
    ) -> None:
        super().__init__(parameters, spec=spec, sum_over_shards=sum_over_shards)
        self._on_cpu = on_cpu
        self.runs_behind = not on_cpu and any(parameter.local().is_cuda for parameter in parameters.values())
        """Whether updates run on a device that the host does not wait for."""
        devices = {name: torch.device("cpu") if on_cpu else parameter.local().device for name, parameter in parameters.items()}
        self.moments = {name: _fresh_moments(parameters[name].local(), device=device) for name, device in devices.items()}

    def _launch_update(self, gradients: Gradients, *, norm: Tensor, lr: float) -> bool:
        if not self.runs_behind or not all(self._can_update_in_place(name) for name in gradients):
            return False
        is_finite, limit = torch.isfinite(norm), self._spec.clip_grad_norm
        if limit is not None:
            factor = torch.where(norm > limit, limit / norm.double(), 1.0).float()
            torch._foreach_mul_(list(gradients.values()), torch.where(is_finite, factor, 1.0))
        skips = (~is_finite).float()
        for name in gradients:
            if gradients[name].numel() == 0:
                self.moments[name].count.add_(1 - skips)
        for names, weight_decay in self._kinds(gradients):
            weights = [self._parameters[name].local() for name in names]
            self._adamw(names, weights, [gradients[name] for name in names], lr=lr, weight_decay=weight_decay, skips=skips)
        return True

    def _kinds(self, gradients: Gradients) -> Iterator[tuple[list[str], float]]:
        """Parameters of which this rank holds something, with their weight decay."""
        for decays, weight_decay in ((True, self._spec.weight_decay), (False, 0.0)):
            yield [name for name in gradients if gradients[name].numel() > 0 and self._decays(name) == decays], weight_decay

    def _update(self, gradients: Gradients, *, lr: float) -> None:
        for name in gradients:
            if gradients[name].numel() == 0:
                # This rank holds none of it; the count goes on for checkpoints at another world size.
                self.moments[name].count.add_(1)
        for names, weight_decay in self._kinds(gradients):
            weights = [self._parameters[name].local() for name in names]
            if all(self._can_update_in_place(name) for name in names):
                self._adamw(names, weights, [gradients[name] for name in names], lr=lr, weight_decay=weight_decay)
                continue

            def update(i: int, weight: Tensor, gradient: Tensor, names: list[str] = names, weight_decay: float = weight_decay) -> None:
                self._adamw([names[i]], [weight], [gradient], lr=lr, weight_decay=weight_decay)

            raised = [gradients[name] for name in names]
            if self._on_cpu and weights[0].is_cuda:
                update_on_host(weights, raised, update)
                continue
            for i, weight in enumerate(weights):
                update(i, master := weight.float(), raised[i].float())
                weight.copy_(master)

    def _can_update_in_place(self, name: str) -> bool:
        weight = self._parameters[name].local()
        return weight.dtype == torch.float32 and weight.device == self.moments[name].first.device

    def _adamw(
        self,
        names: list[str],
        weights: list[Tensor],
        gradients: list[Tensor],
        *,
        lr: float,
        weight_decay: float,
        skips: Tensor | None = None,
    ) -> None:
        """Torch's kernel; ``skips`` [] float32 is 1 where it shall change nothing."""
        if not names:
            return
        beta1, beta2 = self._spec.betas
        adamw(
            weights,
            gradients,
            [self.moments[name].first for name in names],
            [self.moments[name].second for name in names],
            [],
            [self.moments[name].count for name in names],
            fused=True,
            found_inf=skips,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self._spec.eps,
            maximize=False,
        )

    def offloadable(self) -> Iterator[Tensor]:
        """See ShardedOptimizer."""
        for moments in self.moments.values():
            yield from (moments.first, moments.second)

    def pieces(self) -> dict[str, Piece]:
        """See ShardedOptimizer."""
        found = {}
        for name, kept in self.moments.items():
            owner = self._parameters[name]
            found[f"first_moment.{name}"] = Piece(owner=owner, tensor=kept.first)
            found[f"second_moment.{name}"] = Piece(owner=owner, tensor=kept.second)
            found[f"update_count.{name}"] = Piece(owner=None, tensor=kept.count)
        return found

    def prepare_to_load(self, names: list[str]) -> None:
        """See ShardedOptimizer: moments are there from the beginning."""


def _fresh_moments(shard: Tensor, *, device: torch.device) -> Moments:
    return Moments(
        first=torch.zeros_like(shard, dtype=torch.float32, device=device),
        second=torch.zeros_like(shard, dtype=torch.float32, device=device),
        count=torch.zeros((), dtype=torch.float32, device=device),
    )


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
