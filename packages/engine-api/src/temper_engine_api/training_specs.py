"""Settings of training: optimizer, schedule, precision and offload. Import them from `specs`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.settings_check import check_field_types

Scalar = str | int | float | bool | None
Compute = Literal["bf16", "fp16", "fp32"]
Dtype = Literal["bf16", "fp32"]

ADAMW = "adamw"
"""Name of the optimizer that every engine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Optimizer and gradient clipping."""

    name: str = ADAMW
    """`adamw` (fused), or the dotted path of a torch optimizer, such as `torch.optim.SGD`."""
    arguments: Mapping[str, Scalar | tuple[float, ...]] = field(default_factory=dict, hash=False)
    """Further arguments of that class, checked against its signature; adamw has betas and eps."""
    lr: float = 1e-6
    """Learning rate after the warmup, the highest of the schedule."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moment."""
    eps: float = 1e-8
    """Added to the square root of AdamW's second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay, for parameters with two or more dimensions; see decays_vectors."""
    decays_vectors: bool = False
    """Also decay biases and norms, as torch.optim.AdamW does with one parameter group."""
    clip_grad_norm: float | None = 1.0
    """Maximum global gradient norm; None disables clipping."""
    max_consecutive_skips: int = 10
    """Consecutive updates that may be skipped for non-finite gradients before the run stops."""

    def __post_init__(self) -> None:
        check_field_types(self, prefix="optimizer.")
        if len(self.betas) != 2:
            raise ConfigError(
                f"optimizer.betas is {self.betas}, but must be two numbers, for the first and the "
                "second moment."
            )
        if (
            not 0 <= self.lr < math.inf
            or not 0 < self.eps < math.inf
            or not all(0 <= b < 1 for b in self.betas)
        ):
            raise ConfigError(
                f"optimizer.lr is {self.lr}, eps {self.eps} and betas {self.betas}, but lr must be "
                ">= 0, eps > 0, and betas in [0, 1)."
            )
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ConfigError(
                f"optimizer.clip_grad_norm is {self.clip_grad_norm}, but must be above 0, or null "
                "to disable clipping."
            )
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(
                f"optimizer.weight_decay is {self.weight_decay}, but must be at least 0."
            )
        if self.max_consecutive_skips < 0:
            raise ConfigError(
                f"optimizer.max_consecutive_skips is {self.max_consecutive_skips}, but must be at "
                "least 0."
            )
        self._check_name()

    @property
    def is_adamw(self) -> bool:
        """True for `adamw`."""
        return self.name == ADAMW

    def _check_name(self) -> None:
        if self.is_adamw:
            if self.arguments:
                raise ConfigError(
                    f"optimizer.arguments {sorted(self.arguments)} have no effect with "
                    "optimizer.name adamw: it has optimizer.betas and optimizer.eps."
                )
            return
        if not all(part.isidentifier() for part in self.name.split(".")) or "." not in self.name:
            raise ConfigError(
                f"optimizer.name is {self.name!r}, but must be adamw, or the dotted path of a "
                "class such as torch.optim.SGD."
            )
        idle = [
            name
            for name, default in (("betas", (0.9, 0.999)), ("eps", 1e-8))
            if getattr(self, name) != default
        ]
        if idle:
            raise ConfigError(
                f"optimizer.{idle[0]} has no effect with optimizer.name {self.name}: give it in "
                "optimizer.arguments."
            )
        if {"lr", "weight_decay", "params"} & self.arguments.keys():
            raise ConfigError(
                "optimizer.arguments must not contain lr, weight_decay or params: the first two "
                "are keys of optimizer itself."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """Learning-rate schedule; see `schedule.compute_learning_rate`."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warmup. wsd (warmup, stable, decay) stays at the peak and decays linearly in
    the last `decay_steps`."""
    warmup_steps: int = 0
    """Steps of linear warmup; the first one has lr / warmup_steps, not 0."""
    warmup_ratio: float = 0.0
    """Warmup as a fraction of total_steps, rounded up; set only one of the two."""
    total_steps: int | None = None
    """Steps until min_lr_ratio is reached, including warmup; required by linear, cosine, wsd and
    warmup_ratio. 0 means the length of the run, which the trainer fills in."""
    decay_steps: int | None = None
    """Steps of decay at the end of wsd, required by it and refused by other kinds; Hu et al. 2024,
    arXiv:2404.06395."""
    min_lr_ratio: float = 0.0
    """Final learning rate as a fraction of the peak."""
    advance: Literal["update", "rl_step"] = "update"
    """Unit of a step: an optimizer update, or an RL step of several updates."""

    @property
    def num_warmup_steps(self) -> int:
        """Number of warmup steps, from warmup_steps or warmup_ratio."""
        if self.total_steps is None or not self.warmup_ratio:
            return self.warmup_steps
        # In floating point 0.07 * 100 is slightly more than 7, which would round up to 8.
        return math.ceil(round(self.warmup_ratio * self.total_steps, 9))

    def __post_init__(self) -> None:
        check_field_types(self, prefix="schedule.")
        if self.warmup_steps < 0:
            raise ConfigError(
                f"schedule.warmup_steps is {self.warmup_steps}, but must be at least 0."
            )
        if not 0 <= self.warmup_ratio < 1:
            raise ConfigError(
                f"schedule.warmup_ratio is {self.warmup_ratio}, but must be in [0, 1): it is a "
                "fraction of schedule.total_steps."
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError(
                "schedule.warmup_steps and schedule.warmup_ratio both set the length of the "
                "warmup: remove one of them."
            )
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(
                f"schedule.min_lr_ratio is {self.min_lr_ratio}, but must be in [0, 1]: it is a "
                "fraction of the peak."
            )
        self._check_length()

    def _check_length(self) -> None:
        needs_total = self.kind != "constant" or self.warmup_ratio > 0
        if needs_total and self.total_steps is None:
            cause = (
                f"schedule.kind is {self.kind}"
                if self.kind != "constant"
                else f"schedule.warmup_ratio is {self.warmup_ratio}"
            )
            raise ConfigError(
                f"{cause}, which needs schedule.total_steps: the length of the schedule."
            )
        if not needs_total and self.total_steps is not None:
            raise ConfigError(
                "schedule.total_steps has no effect with schedule.kind constant: remove it."
            )
        if self.kind == "constant" and self.min_lr_ratio != 0.0:
            raise ConfigError(
                "schedule.min_lr_ratio has no effect with schedule.kind constant: remove it."
            )
        if (self.kind == "wsd") != (self.decay_steps is not None):
            raise ConfigError(
                f"schedule.decay_steps is {self.decay_steps} and schedule.kind {self.kind}: wsd "
                "needs the number of its decay steps, and no other kind has any."
            )
        if not self.total_steps:
            return
        decay, warmup = self.decay_steps or 0, self.num_warmup_steps
        if (
            decay < 0
            or self.total_steps <= warmup
            or self.total_steps < warmup + decay
            or (self.kind == "wsd" and decay < 1)
        ):
            raise ConfigError(
                f"schedule.total_steps ({self.total_steps}) must exceed the warmup ({warmup} steps)"
                + (
                    f" and leave schedule.decay_steps ({decay}), at least 1, after it."
                    if self.kind == "wsd"
                    else "."
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec:
    """Dtypes. Optimizer states, log-probs, losses and gradient norms are always float32."""

    compute: Compute = "bf16"
    """Dtype of matmuls and activations. fp16 uses a dynamic loss scale, saved in checkpoints."""
    parameters: Dtype = "fp32"
    """Dtype of the master weights. In bf16 an update below 0.4 % of a weight is lost."""
    reduce: Dtype = "fp32"
    """Dtype in which gradients are summed over ranks."""
    buffers: Dtype = "fp32"
    """Dtype of the model's buffers, such as rotary frequencies."""
    initial_loss_scale: float | None = None
    """Initial loss scale of fp16; None means 65536."""
    loss_scale_growth_interval: int | None = None
    """Updates without an overflow after which the loss scale doubles; None means 2000."""

    def __post_init__(self) -> None:
        check_field_types(self, prefix="precision.")
        scale, interval = self.initial_loss_scale, self.loss_scale_growth_interval
        if self.compute != "fp16" and (scale is not None or interval is not None):
            raise ConfigError(
                "precision.initial_loss_scale and precision.loss_scale_growth_interval have no "
                f"effect with precision.compute {self.compute}: only fp16 scales its loss."
            )
        if scale is not None and not 0 < scale < math.inf:
            raise ConfigError(f"precision.initial_loss_scale is {scale}, but must be above 0.")
        if interval is not None and interval < 1:
            raise ConfigError(
                f"precision.loss_scale_growth_interval is {interval}, but must be at least 1."
            )
        if self.compute == "fp16" and self.parameters == "bf16":
            raise ConfigError(
                "precision.parameters is bf16, but precision.compute is fp16: use fp32 master "
                "weights with fp16."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSpec:
    """State that is offloaded to host memory when an engine does not need it."""

    parameters: bool = False
    """Offload parameters outside `train_mode` and `eval_mode`."""
    gradients: bool | None = None
    """Offload gradients too; None means the same as `parameters`."""
    optimizer: bool = False
    """Offload optimizer states outside `optimizer_step`."""
    load_optimizer_in: Literal["optimizer_step", "train_mode"] = "optimizer_step"
    """When to load optimizer states: for the step only, or in `train_mode`, so that the copy
    overlaps with the passes."""
    optimizer_on_cpu: bool = False
    """Keep optimizer states in host memory and compute the update on the CPU."""

    @property
    def offloads_gradients(self) -> bool:
        """True if gradients are offloaded between contexts."""
        return self.parameters if self.gradients is None else self.gradients

    @property
    def offloads_anything(self) -> bool:
        """True if any state is offloaded."""
        return self.parameters or self.offloads_gradients or self.optimizer or self.optimizer_on_cpu

    def __post_init__(self) -> None:
        check_field_types(self, prefix="offload.")
        if self.optimizer_on_cpu and self.optimizer:
            raise ConfigError(
                "offload.optimizer has no effect with offload.optimizer_on_cpu, which keeps "
                "optimizer states in host memory all the time: remove one of them."
            )
        if self.load_optimizer_in == "train_mode" and not self.optimizer:
            raise ConfigError(
                "offload.load_optimizer_in has no effect without offload.optimizer: remove it."
            )
