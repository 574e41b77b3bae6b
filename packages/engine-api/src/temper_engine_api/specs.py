"""Frozen settings of an engine: the only home of their defaults. Importing this needs no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError

Scalar = str | int | float | bool | None
ModelType = Literal["language_model", "value_model", "reward_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Which model, from where, with which head."""

    path: str | None = None
    """Local Hugging Face model directory whose weights and config are loaded; exactly one of path and architecture is set."""
    architecture: Mapping[str, Scalar] = field(default_factory=dict)
    """Hugging Face config fields, ``model_type`` among them, of a model that starts from seeded random weights."""
    model_type: ModelType = "language_model"
    """The head."""
    trust_remote_code: bool = False
    """Whether code that lies beside the weights may run."""
    seed: int = 0
    """Of random weights: a model from scratch, and a new value or reward head."""

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.architecture):
            raise ConfigError(
                f"exactly one of model.path (now {self.path!r}) and model.architecture (now {dict(self.architecture)!r}) must be set: "
                "a directory to load, or the config of a model to start from scratch."
            )
        if self.architecture and "model_type" not in self.architecture:
            raise ConfigError("model.architecture needs model_type, for example {model_type: qwen2, hidden_size: 128, ...}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """AdamW with clipping by the global norm."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled; applied to parameters of two or more dimensions only, unless decays_vectors says otherwise."""
    decays_vectors: bool = False
    """Decay biases and norms too, as torch.optim.AdamW does with one parameter group."""
    clip_grad_norm: float | None = 1.0
    """Largest global gradient norm; None never clips."""
    max_consecutive_skips: int = 10
    """Updates in a row that may be skipped for non-finite gradients before the run stops."""

    def __post_init__(self) -> None:
        if not 0 <= self.lr < math.inf or not 0 < self.eps < math.inf or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"optimizer: lr {self.lr} must be >= 0, eps {self.eps} > 0, betas {self.betas} in [0, 1).")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ConfigError(f"optimizer.clip_grad_norm is {self.clip_grad_norm}, but must be above 0: null turns clipping off.")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optimizer.weight_decay is {self.weight_decay}, but must be at least 0.")
        if self.max_consecutive_skips < 0:
            raise ConfigError(f"optimizer.max_consecutive_skips is {self.max_consecutive_skips}, but must be at least 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """The learning rate as a pure function of a counter; see ``temper_engine_api.schedule``."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up."""
    warmup_steps: int = 0
    """Steps of linear rise; the first of them already has lr / warmup_steps, never 0."""
    total_steps: int | None = None
    """Steps until min_lr_ratio is reached, warm-up included; needed by linear and cosine."""
    min_lr_ratio: float = 0.0
    """Floor, as a share of the peak."""
    advance: Literal["update", "rl_step"] = "update"
    """What counts as a step: an optimiser update, or an RL step of several updates."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"schedule.warmup_steps is {self.warmup_steps}, but must be at least 0.")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"schedule.min_lr_ratio is {self.min_lr_ratio}, but must be in [0, 1]: a share of the peak.")
        if self.kind != "constant" and self.total_steps is None:
            raise ConfigError(f"schedule.kind is {self.kind}, which needs schedule.total_steps: the length of the decay.")
        if self.kind == "constant" and (self.total_steps is not None or self.min_lr_ratio != 0.0):
            raise ConfigError("schedule.total_steps and schedule.min_lr_ratio have no effect with schedule.kind constant: remove them.")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ConfigError(f"schedule.total_steps ({self.total_steps}) must exceed schedule.warmup_steps ({self.warmup_steps}).")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec:
    """Dtypes. Master weights, optimiser states, log-probs and gradient reductions are always float32."""

    compute: Literal["bf16", "fp32"] = "bf16"
    """Of matmuls and activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySpec:
    """What leaves the device between the contexts of an engine."""

    offload_parameters: bool = False
    """Parameters and gradients live in host memory outside ``train_mode`` and ``eval_mode``."""
    offload_optimizer: bool = False
    """Optimiser states live in host memory outside ``optimizer_step``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """One block for every engine; rank 0 is no adapter."""

    rank: int = 0
    """Rank of the adapter."""
    alpha: float | None = None
    """Scale numerator; has no default once rank > 0."""
    dropout: float = 0.0
    """On the adapter's input."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Module names, a regular expression, or ``all-linear``."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"lora.rank is {self.rank}, but must be at least 0: 0 is no adapter.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout is {self.dropout}, but must be in [0, 1).")
        if self.rank > 0 and self.alpha is None:
            raise ConfigError(f"lora.rank is {self.rank}, but lora.alpha is not set: give it; the update is scaled by alpha / rank.")
        if self.rank == 0 and self.alpha is not None:
            raise ConfigError(f"lora.alpha is {self.alpha}, but lora.rank is 0, so it has no effect: set lora.rank or remove lora.alpha.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What every engine is configured with; an engine adds its own fields in a subclass that it names as ``config_class``."""

    model: ModelSpec
    """See ModelSpec."""
    optimizer: OptimizerSpec | None = field(default_factory=OptimizerSpec)
    """None builds no optimiser: a frozen model."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """See ScheduleSpec."""
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    """See PrecisionSpec."""
    residency: ResidencySpec = field(default_factory=ResidencySpec)
    """See ResidencySpec."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    """See LoraSpec."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is CUDA where there is one."""
    deterministic: bool = False
    """Refuse kernels whose result depends on timing."""
    collective_timeout_s: float = 600.0
    """Longest wait of a collective before the run stops."""
