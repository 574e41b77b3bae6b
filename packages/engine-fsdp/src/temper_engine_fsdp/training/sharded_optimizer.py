"""Optimizers for sharded parameters: AdamW, gradient norm, clipping and skipped updates.

AdamW is elementwise, so it runs torch's fused kernel on the local shards, without the overhead of
DTensor dispatch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw

from temper_engine_api.specs import OptimizerSpec
from temper_engine_fsdp.runtime.process_group import SHARD_AXIS
from temper_engine_fsdp.sharding.sharded_parameter import ShardedParameter, ShardedParameters

GradientShards = Mapping[str, Tensor]
"""This rank's shard of each reduced gradient, by Hugging Face name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """AdamW state for one parameter shard, float32, on the device that runs the update."""

    first: Tensor
    """Exponential average of the gradient, in the shard's shape."""
    second: Tensor
    """Exponential average of the squared gradient."""
    count: Tensor
    """[] number of updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of the training state, as saved in checkpoints."""

    owner: ShardedParameter | None
    """Parameter that the tensor is sharded like; None if every rank has all of it."""
    tensor: Tensor
    """Shard or full tensor; loading fills it in place."""


class AsyncScalar:
    """A scalar that the device is still computing, being copied to the host."""

    def __init__(self, number: Tensor) -> None:
        self._on_host = number
        self._copy_done: torch.cuda.Event | None = None
        if number.is_cuda:
            self._on_host = torch.empty(number.shape, dtype=number.dtype, pin_memory=True).copy_(
                number, non_blocking=True
            )
            self._copy_done = torch.cuda.Event()
            self._copy_done.record()

    def result(self) -> float:
        """Wait for the scalar, but not for kernels launched after it, and return it."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
        return float(self._on_host)


def make_shard_sum(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a tensor over the shards, in place."""
    group = mesh.get_group(SHARD_AXIS)

    def sum_in_place(value: Tensor) -> Tensor:
        if group.size() > 1:
            # Over the shards of one copy only: replicas have the same gradients.
            dist.all_reduce(value, group=group)
        return value

    return sum_in_place


class ShardedOptimizer(ABC):
    """Base class of optimizers for sharded parameters."""

    def __init__(
        self,
        parameters: ShardedParameters,
        *,
        spec: OptimizerSpec,
        sum_over_shards: Callable[[Tensor], Tensor],
    ) -> None:
        self._parameters = parameters
        self._spec = spec
        self._sum_over_shards = sum_over_shards

    @torch.no_grad()
    def step(
        self,
        *,
        lr: float,
        loss_scale: float = 1.0,
        after_launch: Callable[[], None] | None = None,
        before_relaunch: Callable[[], None] | None = None,
    ) -> float:
        """Clip gradients and update parameters; skip the update if the norm is not finite.

        Args:
            lr: Learning rate for this update.
            loss_scale: Gradients are divided by this first.
            after_launch: Called once the update is launched. On CUDA that may be before the norm is
                known on the host.
            before_relaunch: Undoes `after_launch`. Called before an update is launched again with
                a norm in float64, because the one in float32 overflowed.

        Returns:
            Global gradient norm over all shards before clipping.
        """
        gradients = {
            name: gradient
            for name, parameter in self._parameters.items()
            if (gradient := parameter.local_gradient()) is not None
        }
        if loss_scale != 1.0:
            # Remove the loss scale before the norm: the clip limit refers to unscaled gradients.
            torch._foreach_mul_(list(gradients.values()), 1.0 / loss_scale)
        norm = self._global_norm(list(gradients.values()))
        norm_value = self._clip_and_update(gradients, norm=norm, lr=lr, after_launch=after_launch)
        # The square of a finite gradient may overflow float32. It does so in AdamW as well if the
        # gradient is not clipped: such an update stays skipped.
        if norm_value == math.inf and self._spec.clip_grad_norm is not None:
            norm = self._global_norm(list(gradients.values()), dtype=torch.float64)
            if math.isfinite(float(norm)):
                if before_relaunch is not None:
                    before_relaunch()
                return self._clip_and_update(gradients, norm=norm, lr=lr, after_launch=after_launch)
        return norm_value

    def _clip_and_update(
        self,
        gradients: GradientShards,
        *,
        norm: Tensor,
        lr: float,
        after_launch: Callable[[], None] | None,
    ) -> float:
        """Clip and update unless the norm [] is not finite; return the norm."""
        # Start the copy before the update is launched, so that the host waits for the norm only.
        async_norm = AsyncScalar(norm)
        if self._launch_update(gradients, norm=norm, lr=lr):
            if after_launch is not None:
                after_launch()
            return async_norm.result()
        norm_value = async_norm.result()
        if not math.isfinite(norm_value):
            return norm_value
        limit = self._spec.clip_grad_norm
        if limit is not None and norm_value > limit:
            # No epsilon as in torch's clip_grad_norm_: the norm is above the limit, so it is not 0.
            torch._foreach_mul_(list(gradients.values()), limit / norm_value)
        self._update(gradients, lr=lr)
        if after_launch is not None:
            after_launch()
        return norm_value

    @abstractmethod
    def _update(self, gradients: GradientShards, *, lr: float) -> None:
        """Update the parameters that have a gradient."""

    @abstractmethod
    def offloadable_tensors(self) -> Iterator[Tensor]:
        """Yield the state tensors that may be offloaded between updates."""

    @abstractmethod
    def state_tensors(self) -> dict[str, StateTensor]:
        """Return the state for a checkpoint by name."""

    @abstractmethod
    def allocate_state(self, names: list[str]) -> None:
        """Allocate the state for exactly these names. Collective."""

    def _decays(self, name: str) -> bool:
        return self._parameters[name].is_matrix or self._spec.decays_vectors

    def _launch_update(self, gradients: GradientShards, *, norm: Tensor, lr: float) -> bool:
        """Launch kernels that clip and update; they change nothing if `norm` [] is not finite.

        The host does not need to know the norm.

        Returns:
            False if not supported; nothing has changed then.
        """
        return False

    def _global_norm(
        self, gradients: list[Tensor], *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the [] float32 norm on the device; each tensor's squares are added in `dtype`."""
        device = next(iter(self._parameters.values())).local_shard().device
        norms = (
            torch._foreach_norm(gradients, 2, dtype=dtype)
            if gradients
            else [torch.zeros((), device=device)]
        )
        # float64: the square of a float32 norm may overflow float32.
        square = torch.stack(norms).double().square().sum()
        # Squares and not norms are summed: each rank has other entries of the same vector.
        return self._sum_over_shards(square).sqrt().float()


class ShardedAdamW(ShardedOptimizer):
    """AdamW with float32 state; weight decay applies to parameters of two or more dimensions."""

    def __init__(
        self,
        parameters: ShardedParameters,
        *,
        spec: OptimizerSpec,
        sum_over_shards: Callable[[Tensor], Tensor],
        on_cpu: bool = False,
    ) -> None:
        super().__init__(parameters, spec=spec, sum_over_shards=sum_over_shards)
        self._on_cpu = on_cpu
        self.is_async = not on_cpu and any(
            parameter.local_shard().is_cuda for parameter in parameters.values()
        )
        """True if updates run on CUDA, where the host does not wait for them."""
        devices = {
            name: torch.device("cpu") if on_cpu else parameter.local_shard().device
            for name, parameter in parameters.items()
        }
        self.adam_states = {
            name: _zero_state(parameters[name].local_shard(), device=device)
            for name, device in devices.items()
        }

    def _launch_update(self, gradients: GradientShards, *, norm: Tensor, lr: float) -> bool:
        if not self.is_async or not all(self._can_update_in_place(name) for name in gradients):
            return False
        is_finite, limit = torch.isfinite(norm), self._spec.clip_grad_norm
        if limit is not None:
            # The same float64 division as on the host, so that both paths give the same bits.
            factor = torch.where(norm > limit, limit / norm.double(), 1.0).float()
            torch._foreach_mul_(list(gradients.values()), torch.where(is_finite, factor, 1.0))
        skip = (~is_finite).float()
        for name in gradients:
            if gradients[name].numel() == 0:
                self.adam_states[name].count.add_(1 - skip)
        for names, weight_decay in self._decay_groups(gradients):
            weights = [self._parameters[name].local_shard() for name in names]
            self._adamw(
                names,
                weights,
                [gradients[name] for name in names],
                lr=lr,
                weight_decay=weight_decay,
                skip=skip,
            )
        return True

    def _decay_groups(self, gradients: GradientShards) -> Iterator[tuple[list[str], float]]:
        """Yield names of non-empty shards with their weight decay."""
        for decays, weight_decay in ((True, self._spec.weight_decay), (False, 0.0)):
            yield (
                [
                    name
                    for name in gradients
                    if gradients[name].numel() > 0 and self._decays(name) == decays
                ],
                weight_decay,
            )

    def _update(self, gradients: GradientShards, *, lr: float) -> None:
        for name in gradients:
            if gradients[name].numel() == 0:
                # Empty shard: still count the update, for checkpoints at another world size.
                self.adam_states[name].count.add_(1)
        for names, weight_decay in self._decay_groups(gradients):
            weights = [self._parameters[name].local_shard() for name in names]
            if all(self._can_update_in_place(name) for name in names):
                self._adamw(
                    names,
                    weights,
                    [gradients[name] for name in names],
                    lr=lr,
                    weight_decay=weight_decay,
                )
                continue

            # The defaults bind this iteration's values; a closure would see the last ones.
            def update(
                i: int,
                weight: Tensor,
                gradient: Tensor,
                names: list[str] = names,
                weight_decay: float = weight_decay,
            ) -> None:
                self._adamw([names[i]], [weight], [gradient], lr=lr, weight_decay=weight_decay)

            # Weights in 16 bits or on another device are updated through float32 copies.
            if self._on_cpu and weights[0].is_cuda:
                update_on_cpu(weights, [gradients[name] for name in names], update)
                continue
            for i, (name, weight) in enumerate(zip(names, weights, strict=True)):
                update(i, master := weight.float(), gradients[name].float())
                weight.copy_(master)

    def _can_update_in_place(self, name: str) -> bool:
        weight = self._parameters[name].local_shard()
        return (
            weight.dtype == torch.float32 and weight.device == self.adam_states[name].first.device
        )

    def _adamw(
        self,
        names: list[str],
        weights: list[Tensor],
        gradients: list[Tensor],
        *,
        lr: float,
        weight_decay: float,
        skip: Tensor | None = None,
    ) -> None:
        """Call torch's kernel. It changes nothing if `skip` [] float32 is 1."""
        if not names:
            return
        beta1, beta2 = self._spec.betas
        adamw(
            weights,
            gradients,
            [self.adam_states[name].first for name in names],
            [self.adam_states[name].second for name in names],
            [],
            [self.adam_states[name].count for name in names],
            # One kernel for all parameters. It also skips on the device through found_inf.
            fused=True,
            found_inf=skip,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self._spec.eps,
            maximize=False,
        )

    def offloadable_tensors(self) -> Iterator[Tensor]:
        """See ShardedOptimizer."""
        # The step counts are left out, because copying scalars would save no memory.
        for state in self.adam_states.values():
            yield from (state.first, state.second)

    def state_tensors(self) -> dict[str, StateTensor]:
        """See ShardedOptimizer."""
        tensors = {}
        for name, state in self.adam_states.items():
            owner = self._parameters[name]
            tensors[f"first_moment.{name}"] = StateTensor(owner=owner, tensor=state.first)
            tensors[f"second_moment.{name}"] = StateTensor(owner=owner, tensor=state.second)
            tensors[f"update_count.{name}"] = StateTensor(owner=None, tensor=state.count)
        return tensors

    def allocate_state(self, names: list[str]) -> None:
        """See ShardedOptimizer. No-op: the state always exists."""


def _zero_state(shard: Tensor, *, device: torch.device) -> AdamState:
    return AdamState(
        first=torch.zeros_like(shard, dtype=torch.float32, device=device),
        second=torch.zeros_like(shard, dtype=torch.float32, device=device),
        # float32, as torch's fused kernel expects.
        count=torch.zeros((), dtype=torch.float32, device=device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostCopies:
    """Host copies of a weight and its gradient, possibly in flight."""

    weight: Tensor
    gradient: Tensor
    copy_done: torch.cuda.Event


def update_on_cpu(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    update: Callable[[int, Tensor, Tensor], None],
) -> None:
    """Run `update(i, weight, gradient)` on float32 host copies of CUDA tensors.

    Copying later weights overlaps with updating earlier ones.

    Args:
        weights: CUDA tensors; they have the result once the current stream has reached this point.
        gradients: One per weight.
        update: Changes the given weight in place.
    """
    current, copy_stream = torch.cuda.current_stream(), torch.cuda.Stream()
    # The gradients are still being computed on the current stream.
    copy_stream.wait_stream(current)
    with torch.cuda.stream(copy_stream):
        copies = [
            _copy_to_host_async(weight, gradient, stream=copy_stream)
            for weight, gradient in zip(weights, gradients, strict=True)
        ]
    for i, copy in enumerate(copies):
        copy.copy_done.synchronize()
        master = copy.weight.float()
        update(i, master, copy.gradient.float())
        copy.weight.copy_(master)
        weights[i].copy_(copy.weight, non_blocking=True)


def _copy_to_host_async(
    weight: Tensor, gradient: Tensor, *, stream: torch.cuda.Stream
) -> _HostCopies:
    copies = [
        torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        for x in (weight, gradient)
    ]
    copy_done = torch.cuda.Event()
    copy_done.record(stream)
    return _HostCopies(weight=copies[0], gradient=copies[1], copy_done=copy_done)
