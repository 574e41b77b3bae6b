"""Megatron's optimizer as the contract wants it: one rate, one norm, one decision of all ranks, and its state by parameter.

A state is three flat-shaped float32 tensors of this rank's part of a parameter and a count, also where the distributed optimizer keeps
only a piece of them here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from temper_engine_api.specs import OptimizerSpec
from temper_engine_megatron.cpu_device import megatron_on_cpu
from temper_engine_megatron.groups import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """Of this rank's part of one parameter: what tensor parallelism leaves of it."""

    master: Tensor
    """Float32, in the parameter's local shape."""
    first: Tensor
    """First moment."""
    second: Tensor
    """Second moment."""
    count: int
    """Updates it has seen."""


class MegatronAdamW:
    """AdamW of Megatron, distributed over data-parallel ranks or not."""

    def __init__(self, chunks: Sequence[nn.Module], *, spec: OptimizerSpec, is_bf16: bool, is_distributed: bool, membership: Membership):
        self._spec = spec
        self._membership = membership
        self._is_distributed = is_distributed
        beta1, beta2 = spec.betas
        config = OptimizerConfig(
            optimizer="adam",
            lr=spec.lr,
            min_lr=spec.lr,
            weight_decay=spec.weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_eps=spec.eps,
            bf16=is_bf16,
            params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
            use_distributed_optimizer=is_distributed,
            clip_grad=0.0,
        )
        with megatron_on_cpu():
            # A chain of one: only experts would get an optimizer of their own.
            (self._optimizer,) = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False).chained_optimizers

    @torch.no_grad()
    def step(self, *, lr: float) -> float:
        """Global norm before clipping, the same on every rank; clips and updates only where it is finite."""
        with megatron_on_cpu():
            optimizer = self._optimizer
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())
            if not math.isfinite(norm):
                return norm
            if self._spec.clip_grad_norm is not None:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self._spec.clip_grad_norm, norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
                group["weight_decay"] = self._spec.weight_decay * (1.0 if self._spec.decays_vectors else group["wd_mult"])
            optimizer.step_with_ready_grads()
        return norm

    def zero(self) -> None:
        """Drop the gradients that the last step left in parameters."""
        with megatron_on_cpu():
            self._optimizer.zero_grad()

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> ParameterState:
        """This rank's part of a parameter's state, whole. Collective over ranks that hold the same weights, if distributed."""
        main, piece = self._main(parameter), self._piece(parameter)
        kept = {} if main is None else self._optimizer.optimizer.state.get(main, {})
        parts = [main, kept.get("exp_avg"), kept.get("exp_avg_sq")]
        master, first, second = (self._whole(part, parameter, piece) for part in parts)
        count = torch.tensor(float(kept.get("step", 0.0)), device=parameter.device)
        if self._is_distributed:
            dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._membership.dp_cp)
        return ParameterState(master=master, first=first, second=second, count=int(count))

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, state: ParameterState) -> None:
        """Replace a parameter and its state by these."""
        parameter.data.copy_(state.master)
        main, piece = self._main(parameter), self._piece(parameter)
        if main is None:
            return
        master, first, second = (part.reshape(-1)[piece].reshape(main.shape) for part in (state.master, state.first, state.second))
        main.data.copy_(master)
        # A step of its own for each: AdamW would count a shared one once per parameter.
        self._optimizer.optimizer.state[main] = {
            "step": torch.tensor(float(state.count)),
            "exp_avg": first.to(main.device, copy=True),
            "exp_avg_sq": second.to(main.device, copy=True),
        }

    @torch.no_grad()
    def write_master(self, parameter: nn.Parameter, master: Tensor) -> None:
        """Replace a parameter and its master weight; moments stay."""
        parameter.data.copy_(master)
        main = self._main(parameter)
        if main is not None:
            main.data.copy_(master.reshape(-1)[self._piece(parameter)].reshape(main.shape))

    def _main(self, parameter: nn.Parameter) -> Any:
        """The tensor that AdamW updates for a parameter: itself, a float32 copy, or this rank's piece of one; None without a piece."""
        optimizer = self._optimizer
        if not self._is_distributed:
            return vars(parameter).get("main_param", parameter)
        if parameter not in optimizer.model_param_group_index_map:
            return None
        group, place = optimizer.model_param_group_index_map[parameter]
        return optimizer.optimizer.param_groups[group]["params"][place]

    def _piece(self, parameter: nn.Parameter) -> slice:
        """Which entries of the flat parameter belong to this rank."""
        if not self._is_distributed:
            return slice(0, parameter.numel())
        if parameter not in self._optimizer.model_param_group_index_map:
            return slice(0, 0)
        found = self._optimizer._get_model_param_range_map(parameter)["param"]
        return slice(found.start, found.end)

    def _whole(self, part: Tensor | None, parameter: nn.Parameter, piece: slice) -> Tensor:
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if part is not None:
            whole[piece] = part.detach().reshape(-1).float()
        if self._is_distributed:
            dist.all_reduce(whole, group=self._membership.dp_cp)
        return whole.view(parameter.shape)
