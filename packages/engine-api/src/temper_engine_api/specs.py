"""Settings of an engine and their defaults. Does not import torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.schedule import ScheduleSpec
from temper_engine_api.settings_check import check_field_types

__all__ = [
    "ADAMW",
    "Compute",
    "Dtype",
    "EngineConfig",
    "LoraSpec",
    "ModelSpec",
    "ModelType",
    "OffloadSpec",
    "OptimizerSpec",
    "PrecisionSpec",
    "Scalar",
    "ScheduleSpec",
]

ModelType = Literal["language_model", "value_model", "reward_model"]
Scalar = str | int | float | bool | None
ConfigValue = Scalar | tuple[Scalar, ...] | Mapping[str, Scalar | Mapping[str, Scalar]]
"""Value of a field of a Hugging Face config."""
Compute = Literal["bf16", "fp16", "fp32"]
Dtype = Literal["bf16", "fp32"]

ADAMW = "adamw"
"""Name of the optimizer that every engine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Model, source of its weights, and head.

    Example:
        A model from the Hub, and the critic that starts from the same weights:

        >>> actor = ModelSpec(path="Qwen/Qwen3-8B")
        >>> critic = ModelSpec(path="Qwen/Qwen3-8B", model_type="value_model", seed=1)
        >>> actor.model_type, critic.model_type
        ('language_model', 'value_model')

        Lists are tuples here, and become lists for transformers:

        >>> kinds = ("full_attention", "sliding_attention")
        >>> tiny = ModelSpec(architecture={"model_type": "gemma3_text", "layer_types": kinds})
        >>> tiny.to_config_fields()["layer_types"]
        ['full_attention', 'sliding_attention']
    """

    path: str | None = None
    """Hugging Face model to load: a local directory or, in `temper-train`, also a name on the Hub
    such as `Qwen/Qwen3-8B`, which huggingface_hub loads. Set exactly one of path and architecture.
    """
    architecture: Mapping[str, ConfigValue] = field(default_factory=dict)
    """Hugging Face config of a model with random initial weights, including `model_type`.

    Lists, such as `layer_types`, are tuples here. `rope_parameters` is a mapping, or one mapping
    per kind of layer."""
    model_type: ModelType = "language_model"
    """Head of the model."""
    trust_remote_code: bool = False
    """Allow code in the model directory to run."""
    seed: int = 0
    """Seed of random weights: a model from scratch, or a new value or reward head."""

    def __post_init__(self) -> None:
        check_field_types(self, prefix="model.")
        if (self.path is None) == (not self.architecture):
            raise ConfigError(
                f"exactly one of model.path (now {self.path!r}) and model.architecture (now "
                f"{dict(self.architecture)!r}) must be set: a directory to load, or the config of "
                "a model with random weights."
            )
        if self.architecture and "model_type" not in self.architecture:
            raise ConfigError(
                "model.architecture has no model_type: add it, for example "
                "{model_type: qwen2, hidden_size: 128, ...}."
            )

    def to_config_fields(self) -> dict[str, Any]:
        """Return the architecture as transformers takes it, with lists and dicts."""
        return {name: _to_plain(value) for name, value in self.architecture.items()}


def _to_plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _to_plain(each) for name, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """LoRA adapter. The base model is frozen; only the adapter is trained and saved.

    Example:
        >>> lora = LoraSpec(rank=16, alpha=32.0, target_modules=("q_proj", "v_proj"))
        >>> lora.is_enabled, LoraSpec().is_enabled
        (True, False)
    """

    rank: int = 0
    """Rank of a new adapter; 0 means no adapter."""
    alpha: float | None = None
    """Numerator of the scale alpha / rank; required if rank > 0."""
    dropout: float = 0.0
    """Dropout probability on the adapter's input."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Last parts of module names, a regular expression for full names, or `all-linear`: all linear
    layers except the head. In a mixture of experts, all three mean layers outside the experts, such
    as attention, dense MLPs and shared experts."""
    exclude_modules: str | tuple[str, ...] = ()
    """Targets to leave without an adapter, in the same notation."""
    target_parameters: tuple[str, ...] = ()
    """Last name parts of fused expert tensors, as in PEFT: `mlp.experts.gate_up_proj` and
    `mlp.experts.down_proj`. If set, target_modules may be empty."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train fully, in addition to a value or reward head."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank; Kalajdzievski 2023, arXiv:2312.03732."""
    dora: bool = False
    """Train magnitudes in addition to low-rank directions; Liu et al. 2024, arXiv:2402.09353."""
    path: str | None = None
    """PEFT adapter to continue from: a local directory or, in `temper-train`, also a name on the
    Hub. All settings above except dropout come from it.
    """

    def __post_init__(self) -> None:
        check_field_types(self, prefix="lora.")
        if self.rank < 0:
            raise ConfigError(f"lora.rank is {self.rank}, but must be at least 0: 0 is no adapter.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout is {self.dropout}, but must be in [0, 1).")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ConfigError(
                f"lora.alpha is {self.alpha}, but must be above 0 and finite, because the update "
                "is scaled by alpha / rank."
            )
        if self.path is not None and self.rank > 0:
            raise ConfigError(
                f"lora.rank has no effect with lora.path {self.path!r}, because that adapter has "
                "its own rank: remove lora.rank."
            )
        if self.rank > 0 and self.alpha is None:
            raise ConfigError(
                f"lora.rank is {self.rank}, but lora.alpha is not set: set it, because the update "
                "is scaled by alpha / rank."
            )
        if not self.target_modules and not self.target_parameters:
            raise ConfigError(
                "lora.target_modules is empty, so there would be no adapter: name modules, or use "
                "all-linear."
            )
        self._check_patterns()
        if self.target_parameters and (self.dropout > 0 or self.dora):
            setting = "dora" if self.dora else "dropout"
            raise ConfigError(
                f"lora.target_parameters is {', '.join(self.target_parameters)} and lora.{setting} "
                f"is {getattr(self, setting)}, which PEFT does not support on expert tensors: "
                f"remove lora.{setting}, or leave lora.target_parameters empty."
            )
        if self.rank == 0:
            self._refuse_settings_without_effect()

    @property
    def is_enabled(self) -> bool:
        """True if there is an adapter, new or loaded."""
        return self.rank > 0 or self.path is not None

    def _check_patterns(self) -> None:
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            try:
                re.compile(value if isinstance(value, str) else "")
            except re.error as error:
                raise ConfigError(
                    f"lora.{name} is {value!r}, which is not a regular expression: {error}."
                ) from error

    def _refuse_settings_without_effect(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if (
                item.name in ("rank", "path")
                or value == item.default
                or (item.name == "dropout" and self.path is not None)
            ):
                continue
            source = (
                "lora.rank is 0"
                if self.path is None
                else f"lora.path is {self.path!r}, whose adapter_config.json decides it"
            )
            remedy = (
                f"set lora.rank or remove lora.{item.name}"
                if self.path is None
                else f"remove lora.{item.name}"
            )
            raise ConfigError(
                f"lora.{item.name} is {value}, but {source}, so it has no effect: {remedy}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Optimizer and gradient clipping.

    Example:
        AdamW with the betas that language models are often trained with, and an optimizer of torch:

        >>> OptimizerSpec(lr=3e-6, betas=(0.9, 0.95)).is_adamw
        True
        >>> sgd = OptimizerSpec(name="torch.optim.SGD", lr=0.01, arguments={"momentum": 0.9})
        >>> sgd.is_adamw, sgd.arguments["momentum"]
        (False, 0.9)
    """

    name: str = ADAMW
    """`adamw` (fused), or the dotted path of a torch optimizer, such as `torch.optim.SGD`."""
    arguments: Mapping[str, Scalar | tuple[float, ...]] = field(default_factory=dict, hash=False)
    """Further arguments of that class, checked against its signature; adamw has betas and eps."""
    lr: float = 1e-6
    """Learning rate after the warmup, the schedule's highest."""
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
        if not 0 <= self.lr < math.inf:
            raise ConfigError(
                f"optimizer.lr is {self.lr}, but must be at least 0 and finite: set a rate such as "
                "1e-6."
            )
        if not 0 < self.eps < math.inf or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(
                f"optimizer.eps is {self.eps} and betas are {self.betas}, but eps must be above 0 "
                "and finite, and betas in [0, 1): use 1e-8 and [0.9, 0.999] if in doubt."
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
        ignored = [
            name
            for name, default in (("betas", (0.9, 0.999)), ("eps", 1e-8))
            if getattr(self, name) != default
        ]
        if ignored:
            raise ConfigError(
                f"optimizer.{ignored[0]} has no effect with optimizer.name {self.name}: give it in "
                "optimizer.arguments."
            )
        if {"lr", "weight_decay", "params"} & self.arguments.keys():
            raise ConfigError(
                "optimizer.arguments must not contain lr, weight_decay or params: the first two "
                "are keys of optimizer itself."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec:
    """Dtypes. Optimizer states, log-probs, losses and gradient norms are always float32."""

    compute: Compute = "bf16"
    """Dtype of matmuls and activations. fp16 uses a dynamic loss scale, saved in checkpoints."""
    parameters: Dtype = "fp32"
    """Dtype of the master weights. In bf16 an update below 0.4 % of a weight is lost."""
    reduce: Dtype = "fp32"
    """Dtype used to sum gradients across ranks."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of every engine; an engine adds fields in a subclass, its `config_class`.

    Example:
        A model with random weights, whose optimizer states are in host memory between updates:

        >>> config = EngineConfig(
        ...     model=ModelSpec(architecture={"model_type": "qwen3", "num_hidden_layers": 2}),
        ...     optimizer=OptimizerSpec(lr=3e-6, clip_grad_norm=0.5),
        ...     schedule=ScheduleSpec(kind="cosine", warmup_steps=10, total_steps=200),
        ...     offload=OffloadSpec(optimizer=True),
        ... )
        >>> config.precision.compute, config.offload.offloads_anything
        ('bf16', True)
    """

    model: ModelSpec
    optimizer: OptimizerSpec | None = field(default_factory=OptimizerSpec)
    """None builds no optimizer, for a frozen model."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    offload: OffloadSpec = field(default_factory=OffloadSpec)
    lora: LoraSpec = field(default_factory=LoraSpec)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses CUDA if it is available."""
    deterministic: bool = False
    """Use deterministic kernels only; raise an error for operations that have none."""
    collective_timeout_s: float = 600.0
    """Timeout of a collective, after which the run stops."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if not 0 < self.collective_timeout_s < math.inf:
            raise ConfigError(
                f"collective_timeout_s is {self.collective_timeout_s}, but must be above 0 and "
                "finite, in seconds."
            )

    def check_folders(self) -> None:
        """Check that the engine can write to its folders, without creating them.

        Raises:
            ConfigError: If one cannot.
        """

    def check_num_ranks(self, num_ranks: int) -> None:
        """Check sizes of the parallel layout, other than `replica_size`, against the world size.

        Raises:
            ConfigError: If a size does not fit.
        """

    @property
    def replica_size(self) -> int:
        """Number of ranks per model replica; divides the world size."""
        return 1
