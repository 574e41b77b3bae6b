"""Megatron's optimizer as the contract wants it: one rate, one norm, one decision of all ranks, and its state by parameter.

A state is three flat-shaped float32 tensors of this rank's part of a parameter and a count, also where the distributed optimizer keeps
only a piece of them here.
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
from temper_engine_megatron.runtime.cpu_device import megatron_on_cpu
from temper_engine_megatron.runtime.known_warnings import ignore_known_warnings
from temper_engine_megatron.runtime.process_groups import Membership


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
        """Over data-parallel ranks, so that reading a state is collective over them."""
        beta1, beta2 = spec.betas
        config = OptimizerConfig(
            optimizer="adam",
            lr=spec.lr,
            min_lr=spec.lr,
            weight_decay=spec.weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_eps=spec.eps,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            # Losses are scaled before they come here, and gradients divided again.
            loss_scale=1.0 if dtype is torch.float16 else None,
            params_dtype=dtype,
            use_distributed_optimizer=is_distributed,
            clip_grad=0.0,
            **overrides,
        )
        # Pieces of parameters that remember where they come from make torch warn whenever their gradient is looked at.
        with megatron_on_cpu(), _adamw_of_torch(), torch.no_grad():
            self._chain = get_megatron_optimizer(
                config, list(chunks), use_gloo_process_groups=False
            )
        # Experts that are divided over ranks have an optimizer of their own.
        self._optimizers: list[Any] = self._chain.chained_optimizers

    @torch.no_grad()
    def step(self, *, lr: float) -> float:
        """Global norm before clipping, the same on every rank; clips and updates only where it is finite."""
        with ignore_known_warnings(), megatron_on_cpu():
            self._chain.prepare_grads()
            norm = float(self._chain.get_grad_norm())
            if not math.isfinite(norm):
                return norm
            if self._spec.clip_grad_norm is not None:
                for optimizer in self._optimizers:
                    clip_grad_by_total_norm_fp32(
                        optimizer.get_parameters(), self._spec.clip_grad_norm, norm
                    )
            for group in self._chain.param_groups:
                group["lr"] = lr
                group["weight_decay"] = self._spec.weight_decay * (
                    1.0 if self._spec.decays_vectors else group["wd_mult"]
                )
            self._chain.step_with_ready_grads()
        return norm

    def zero(self) -> None:
        """Drop the gradients that the last step left in parameters."""
        with megatron_on_cpu():
            self._chain.zero_grad()

    def tensors(self) -> Iterator[Tensor]:
        """Master weights and moments, as they are now; a master weight may be the parameter itself."""
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                for main in group["params"]:
                    yield main
                    # A count is a number on the host.
                    yield from (
                        kept
                        for name, kept in optimizer.optimizer.state.get(main, {}).items()
                        if name != "step"
                    )

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> ParameterState:
        """This rank's part of a parameter's state, whole. Collective over ranks that hold the same weights, if distributed."""
        main, piece = self._main(parameter), self._piece(parameter)
        kept = {} if main is None else self._kept_by(parameter).get(main, {})
        parts = [main, kept.get("exp_avg"), kept.get("exp_avg_sq")]
        master, first, second = (self._whole(part, parameter, piece) for part in parts)
        count = torch.tensor(float(kept.get("step", 0.0)), device=parameter.device)
        if self.is_distributed:
            dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._sharers(parameter))
        return ParameterState(master=master, first=first, second=second, count=int(count))

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, state: ParameterState) -> None:
        """Replace a parameter and its state by these."""
        parameter.data.copy_(state.master)
        main, piece = self._main(parameter), self._piece(parameter)
        if main is None:
            return
        master, first, second = (
            part.reshape(-1)[piece].reshape(main.shape)
            for part in (state.master, state.first, state.second)
        )
        main.data.copy_(master)
        # A step of its own for each: AdamW would count a shared one once per parameter.
        self._kept_by(parameter)[main] = {
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
        if not self.is_distributed:
            return vars(parameter).get("main_param", parameter)
        optimizer = self._optimizer_of(parameter)
        if parameter not in optimizer.model_param_group_index_map:
            return None
        group, place = optimizer.model_param_group_index_map[parameter]
        return optimizer.optimizer.param_groups[group]["params"][place]

    def _optimizer_of(self, parameter: nn.Parameter) -> Any:
        return self._optimizers[-1 if _is_divided_expert(parameter) else 0]

    def _kept_by(self, parameter: nn.Parameter) -> dict[Any, dict[str, Tensor]]:
        """Moments and counts, by the tensors that AdamW updates."""
        kept: dict[Any, dict[str, Tensor]] = self._optimizer_of(parameter).optimizer.state
        return kept

    def _sharers(self, parameter: nn.Parameter) -> dist.ProcessGroup:
        """Ranks that hold the same parameter."""
        return (
            self._membership.expert_dp if _is_divided_expert(parameter) else self._membership.dp_cp
        )

    def _piece(self, parameter: nn.Parameter) -> slice:
        """Which entries of the flat parameter belong to this rank."""
        if not self.is_distributed:
            return slice(0, parameter.numel())
        optimizer = self._optimizer_of(parameter)
        if parameter not in optimizer.model_param_group_index_map:
            return slice(0, 0)
        buffer, dtype, bucket = optimizer.model_param_gbuf_map[parameter]
        found = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
        return slice(found.start, found.end)

    def _whole(self, part: Tensor | None, parameter: nn.Parameter, piece: slice) -> Tensor:
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if part is not None:
            whole[piece] = part.detach().reshape(-1).float()
        if self.is_distributed:
            dist.all_reduce(whole, group=self._sharers(parameter))
        return whole.view(parameter.shape)


@contextmanager
def _adamw_of_torch() -> Iterator[None]:
    """Megatron takes TransformerEngine's or Apex's Adam where one is importable; both count updates elsewhere than torch's, so that the
    state above, and with it a checkpoint, would depend on what is installed.
    """
    before = core_optimizer.USING_PYTORCH_OPTIMIZER
    core_optimizer.USING_PYTORCH_OPTIMIZER = True
    try:
        yield
    finally:
        core_optimizer.USING_PYTORCH_OPTIMIZER = before


def _is_divided_expert(parameter: nn.Parameter) -> bool:
    """Whether Megatron keeps it out of the all-reduce over all data-parallel ranks."""
    marks: Mapping[str, Any] = vars(parameter)
    return not marks.get("allreduce", True)
