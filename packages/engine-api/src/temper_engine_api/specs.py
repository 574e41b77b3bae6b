"""Settings of an engine and their defaults. Does not import torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.settings_check import check_field_types
from temper_engine_api.training_specs import (
    OffloadSpec,
    OptimizerSpec,
    PrecisionSpec,
    Scalar,
    ScheduleSpec,
)

__all__ = [
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Model, source of its weights, and head."""

    path: str | None = None
    """Local Hugging Face model directory to load. Set exactly one of path and architecture."""
    architecture: Mapping[str, Scalar] = field(default_factory=dict)
    """Hugging Face config of a model with random initial weights, including `model_type`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """LoRA adapter. The base model is frozen; only the adapter is trained and saved."""

    rank: int = 0
    """Rank of a new adapter; 0 means no adapter."""
    alpha: float | None = None
    """Numerator of the scale alpha / rank; required if rank > 0."""
    dropout: float = 0.0
    """Dropout probability on the adapter's input."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Last parts of module names, a regular expression for full names, or `all-linear`: all linear
    layers except the head."""
    exclude_modules: str | tuple[str, ...] = ()
    """Targets to leave without an adapter, in the same notation."""
    target_parameters: tuple[str, ...] = ()
    """Last parts of the names of fused expert tensors, as in PEFT: `mlp.experts.gate_up_proj` and
    `mlp.experts.down_proj`. If set, target_modules may be empty, and `all-linear` there means the
    linear layers outside the experts."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train fully, in addition to a value or reward head."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank; Kalajdzievski 2023, arXiv:2312.03732."""
    dora: bool = False
    """Train magnitudes in addition to low-rank directions; Liu et al. 2024, arXiv:2402.09353."""
    path: str | None = None
    """PEFT adapter directory to continue from. All settings above except dropout come from it."""

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
class EngineConfig:
    """Settings of every engine; an engine adds fields in a subclass, its `config_class`."""

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
        """Check that folders to which the engine writes can be written, without creating them.

        Raises:
            ConfigError: If one cannot.
        """

    @property
    def replica_size(self) -> int:
        """Number of ranks with one copy of the model and the same samples; divides world size."""
        return 1
