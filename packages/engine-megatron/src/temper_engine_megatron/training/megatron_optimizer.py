"""Megatron's AdamW as the engine contract requires it, with its state by parameter.

One learning rate, one gradient norm, and one decision for all ranks whether to update. A
parameter's state is read and written as full float32 tensors for this rank's tensor-parallel shard,
even if the distributed optimizer splits it further over data-parallel ranks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from temper_engine_api.specs import OptimizerSpec
from temper_engine_megatron.runtime.cpu_device import support_missing_cuda
from temper_engine_megatron.runtime.known_warnings import ignore_known_warnings
from temper_engine_megatron.runtime.process_groups import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """Float32 state for this rank's tensor-parallel shard of one parameter, in its shape."""

    master: Tensor
    """Master weight that AdamW updates."""
    first: Tensor
    """Exponential average of the gradient."""
    second: Tensor
    """Exponential average of the squared gradient."""
    count: int
    """Number of updates so far for this parameter."""


class MegatronAdamW:
    """Megatron's AdamW; its state may be distributed across data-parallel ranks."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        *,
        spec: OptimizerSpec,
        dtype: torch.dtype,
        is_distributed: bool,
        overrides: Mapping[str, object],
        membership: Membership,
    ):
        self._spec = spec
        self._membership = membership
        self.is_distributed = is_distributed
        """True if the state is split over data-parallel ranks, so that reading it is collective."""
        beta1, beta2 = spec.betas
        config = OptimizerConfig(
            optimizer="adam",
            lr=spec.lr,
            # `step` sets each update's learning rate; Megatron's scheduler is not used.
            min_lr=spec.lr,
            weight_decay=spec.weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_eps=spec.eps,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            # The engine scales the loss and unscales the gradients itself.
            loss_scale=1.0 if dtype is torch.float16 else None,
            params_dtype=dtype,
            use_distributed_optimizer=is_distributed,
            # Clipping is done in `step`, with the norm across all optimizers.
            clip_grad=0.0,
            **overrides,
        )
        # Without no_grad, the distributed optimizer's views of parameters would remember their
        # origin, and torch warns when such a view's gradient is read.
        with support_missing_cuda(), _use_torch_adamw(), torch.no_grad():
            self._chain = get_megatron_optimizer(
                config, list(chunks), use_gloo_process_groups=False
            )
        # Experts that are divided across ranks have a separate optimizer, the last one.
        self._optimizers: list[Any] = self._chain.chained_optimizers

    @torch.no_grad()
    def step(self, *, lr: float) -> float:
        """Clip gradients and update; skip both if the norm is not finite.

        Returns:
            The global gradient norm before clipping, the same on every rank.
        """
        with ignore_known_warnings(), support_missing_cuda():
            # Call the parts of Megatron's `step` one by one, because `step` checks for infinity
            # only with a loss scaler. The first part copies gradients to the tensors of AdamW,
            # where the norm reads them.
            self._chain.prepare_grads()
            norm = float(self._chain.get_grad_norm())
            if norm == math.inf and self._spec.clip_grad_norm is not None:
                # Megatron squares in float32, so the square of a finite norm may be infinite.
                # Clipping makes the gradients small enough for AdamW, which squares them in
                # float32, too. Without clipping the update is skipped.
                norm = self._norm_in_float64()
            if not math.isfinite(norm):
                return norm
            if self._spec.clip_grad_norm is not None:
                # Compute one norm over all optimizers, so that experts are clipped by the same
                # factor.
                for optimizer in self._optimizers:
                    clip_grad_by_total_norm_fp32(
                        optimizer.get_parameters(), self._spec.clip_grad_norm, norm
                    )
            for group in self._chain.param_groups:
                group["lr"] = lr
                # Megatron marks vectors (norms and biases) with wd_mult 0.
                group["weight_decay"] = self._spec.weight_decay * (
                    1.0 if self._spec.decays_vectors else group["wd_mult"]
                )
            self._chain.step_with_ready_grads()
        return norm

    def _norm_in_float64(self) -> float:
        """Return the global gradient norm. Collective."""
        square = 0.0
        for optimizer in self._optimizers:
            gradients = optimizer.get_main_grads_for_grad_norm()
            own = torch.zeros((), dtype=torch.float64, device=self._membership.device)
            for gradient in gradients:
                own += gradient.double().square().sum()
            dist.all_reduce(own, group=optimizer.get_grad_stats_parallel_group())
            square += float(own)
        return math.sqrt(square)

    def zero_grad(self) -> None:
        """Drop the gradients that the last step left in the parameters."""
        with support_missing_cuda():
            self._chain.zero_grad()

    def offloadable_tensors(self) -> Iterator[Tensor]:
        """Yield master weights and moments; a master weight may be the parameter itself."""
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                for optimizer_tensor in group["params"]:
                    yield optimizer_tensor
                    # The step count is a number on the host.
                    yield from (
                        tensor
                        for name, tensor in optimizer.optimizer.state.get(
                            optimizer_tensor, {}
                        ).items()
                        if name != "step"
                    )

    @torch.no_grad()
    def read_state(self, parameter: Tensor) -> ParameterState:
        """Read the state for this rank's tensor-parallel shard of a parameter.

        With the distributed optimizer this is collective over all ranks with this tensor-parallel
        shard.
        """
        optimizer_tensor = self._optimizer_tensor(parameter)
        local_range = self._local_range(parameter)
        adam_state = (
            {}
            if optimizer_tensor is None
            else self._adam_states(parameter).get(optimizer_tensor, {})
        )
        local = [optimizer_tensor, adam_state.get("exp_avg"), adam_state.get("exp_avg_sq")]
        master, first, second = (
            self._gather_full(tensor, parameter, local_range) for tensor in local
        )
        count = torch.tensor(float(adam_state.get("step", 0.0)), device=parameter.device)
        if self.is_distributed:
            # Ranks without a range of this parameter have no count.
            dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._data_parallel_group(parameter))
        return ParameterState(master=master, first=first, second=second, count=int(count))

    @torch.no_grad()
    def write_state(self, parameter: Tensor, state: ParameterState) -> None:
        """Replace a parameter and its state."""
        # Set the parameter as well as its copy, because the optimizer writes parameters only after
        # an update.
        parameter.data.copy_(state.master)
        optimizer_tensor = self._optimizer_tensor(parameter)
        local_range = self._local_range(parameter)
        if optimizer_tensor is None:
            return
        master, first, second = (
            tensor.reshape(-1)[local_range].reshape(optimizer_tensor.shape)
            for tensor in (state.master, state.first, state.second)
        )
        optimizer_tensor.data.copy_(master)
        self._adam_states(parameter)[optimizer_tensor] = {
            # A step tensor per parameter: AdamW would count a shared one once per parameter.
            "step": torch.tensor(float(state.count)),
            "exp_avg": first.to(optimizer_tensor.device, copy=True),
            "exp_avg_sq": second.to(optimizer_tensor.device, copy=True),
        }

    @torch.no_grad()
    def write_master(self, parameter: Tensor, master: Tensor) -> None:
        """Replace a parameter and its master weight; moments stay."""
        parameter.data.copy_(master)
        optimizer_tensor = self._optimizer_tensor(parameter)
        if optimizer_tensor is not None:
            local = master.reshape(-1)[self._local_range(parameter)]
            optimizer_tensor.data.copy_(local.reshape(optimizer_tensor.shape))

    def _optimizer_tensor(self, parameter: Tensor) -> Any:
        """Return the tensor that AdamW updates for a parameter.

        That is the parameter itself, a float32 copy, or this rank's range of such a copy; None if
        this rank has no range.
        """
        if not self.is_distributed:
            return vars(parameter).get("main_param", parameter)
        optimizer = self._optimizer_for(parameter)
        if parameter not in optimizer.model_param_group_index_map:
            return None
        group, index = optimizer.model_param_group_index_map[parameter]
        return optimizer.optimizer.param_groups[group]["params"][index]

    def _optimizer_for(self, parameter: Tensor) -> Any:
        return self._optimizers[-1 if _is_divided_expert(parameter) else 0]

    def _adam_states(self, parameter: Tensor) -> dict[Any, dict[str, Tensor]]:
        """Return AdamW's moments and counts, by the tensors that it updates."""
        states: dict[Any, dict[str, Tensor]] = self._optimizer_for(parameter).optimizer.state
        return states

    def _data_parallel_group(self, parameter: Tensor) -> dist.ProcessGroup:
        """Return the ranks with the same parameter shard."""
        return (
            self._membership.expert_dp if _is_divided_expert(parameter) else self._membership.dp_cp
        )

    def _local_range(self, parameter: Tensor) -> slice:
        """Return the range in a flattened parameter that this rank has optimizer state for."""
        if not self.is_distributed:
            return slice(0, parameter.numel())
        optimizer = self._optimizer_for(parameter)
        if parameter not in optimizer.model_param_group_index_map:
            return slice(0, 0)
        # Megatron has no accessor for this range; its own checkpoints use the same maps.
        buffer, dtype, bucket = optimizer.model_param_gbuf_map[parameter]
        param_map = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"]
        local_range = param_map[parameter]["param"]
        return slice(local_range.start, local_range.end)

    def _gather_full(self, local: Tensor | None, parameter: Tensor, local_range: slice) -> Tensor:
        """Gather a tensor in the parameter's shape from the ranks with its ranges."""
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if local is not None:
            full[local_range] = local.detach().reshape(-1).float()
        if self.is_distributed:
            # Ranges have different lengths and may be empty, so zeros are summed instead.
            dist.all_reduce(full, group=self._data_parallel_group(parameter))
        return full.view(parameter.shape)


@contextmanager
def _use_torch_adamw() -> Iterator[None]:
    """Make Megatron use torch's AdamW inside the context.

    Megatron prefers the Adam of TransformerEngine or Apex if installed. Both keep the update count
    elsewhere, so the state here, and checkpoints, would depend on installed packages.
    """
    previous = core_optimizer.USING_PYTORCH_OPTIMIZER
    core_optimizer.USING_PYTORCH_OPTIMIZER = True
    try:
        yield
    finally:
        core_optimizer.USING_PYTORCH_OPTIMIZER = previous


def _is_divided_expert(parameter: Tensor) -> bool:
    """Return True if Megatron excludes the parameter from the data-parallel all-reduce."""
    marks: Mapping[str, Any] = vars(parameter)
    return not marks.get("allreduce", True)
