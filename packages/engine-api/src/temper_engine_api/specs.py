"""Frozen settings of an engine: the only home of their defaults. Importing this needs no torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.settings_check import check_field_types
from temper_engine_api.training_specs import (
    OptimizerSpec,
    PrecisionSpec,
    ResidencySpec,
    Scalar,
    ScheduleSpec,
)

__all__ = [
    "EngineConfig",
    "LoraSpec",
    "ModelSpec",
    "ModelType",
    "OptimizerSpec",
    "PrecisionSpec",
    "ResidencySpec",
    "Scalar",
    "ScheduleSpec",
]

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
        check_field_types(self, prefix="model.")
        if (self.path is None) == (not self.architecture):
            raise ConfigError(
                f"exactly one of model.path (now {self.path!r}) and model.architecture (now {dict(self.architecture)!r}) must be set: "
                "a directory to load, or the config of a model to start from scratch."
            )
        if self.architecture and "model_type" not in self.architecture:
            raise ConfigError(
                "model.architecture needs model_type, for example {model_type: qwen2, hidden_size: 128, ...}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """A low-rank adapter, one block for every engine: the base stays frozen, and only the adapter is trained and saved."""

    rank: int = 0
    """Rank of a fresh adapter; 0 is none."""
    alpha: float | None = None
    """Scale numerator; has no default once rank > 0."""
    dropout: float = 0.0
    """On the adapter's input."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Last parts of module names, a regular expression for whole names, or ``all-linear``: every linear layer but the head."""
    exclude_modules: str | tuple[str, ...] = ()
    """Modules that stay without an adapter although they are targets, named in the same way."""
    target_parameters: tuple[str, ...] = ()
    """Last parts of the names of tensors in which a layer's experts are joined, such as ``mlp.experts.gate_up_proj`` and
    ``mlp.experts.down_proj``: PEFT's word. With them ``all-linear`` is every linear layer around experts, and target_modules may be empty.
    """
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole; a value or reward head is one of them by itself."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank; Kalajdzievski 2023, arXiv:2312.03732."""
    dora: bool = False
    """Train magnitudes beside the low-rank directions; Liu et al. 2024, arXiv:2402.09353."""
    path: str | None = None
    """Directory in the format of Hugging Face PEFT that training goes on from; all of the above but dropout then comes from there."""

    def __post_init__(self) -> None:
        check_field_types(self, prefix="lora.")
        if self.rank < 0:
            raise ConfigError(f"lora.rank is {self.rank}, but must be at least 0: 0 is no adapter.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout is {self.dropout}, but must be in [0, 1).")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ConfigError(
                f"lora.alpha is {self.alpha}, but must be above 0: the update is scaled by alpha / rank."
            )
        if self.path is not None and self.rank > 0:
            raise ConfigError(
                f"lora.path is {self.path!r}, and that adapter has a rank of its own: remove lora.rank."
            )
        if self.rank > 0 and self.alpha is None:
            raise ConfigError(
                f"lora.rank is {self.rank}, but lora.alpha is not set: give it; the update is scaled by alpha / rank."
            )
        if not self.target_modules and not self.target_parameters:
            raise ConfigError(
                "lora.target_modules is empty, so there would be no adapter: name modules, or take all-linear."
            )
        self._check_patterns()
        if self.target_parameters and (self.dropout > 0 or self.dora):
            setting = "dora" if self.dora else "dropout"
            raise ConfigError(
                f"lora.target_parameters is {', '.join(self.target_parameters)} and lora.{setting} is {getattr(self, setting)}, which PEFT "
                f"does not have for tensors of experts: remove lora.{setting}, or leave lora.target_parameters empty."
            )
        if self.rank == 0:
            self._refuse_what_has_no_effect()

    @property
    def is_enabled(self) -> bool:
        """Whether there is an adapter, fresh or continued."""
        return self.rank > 0 or self.path is not None

    def _check_patterns(self) -> None:
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            try:
                re.compile(value if isinstance(value, str) else "")
            except re.error as error:
                raise ConfigError(
                    f"lora.{name} is {value!r}, which is no regular expression: {error}."
                ) from error

    def _refuse_what_has_no_effect(self) -> None:
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

    def __post_init__(self) -> None:
        check_field_types(self)
        if not 0 < self.collective_timeout_s < math.inf:
            raise ConfigError(
                f"collective_timeout_s is {self.collective_timeout_s}, but must be above 0: seconds."
            )

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model and see the same samples; an engine's ranks are a multiple of it."""
        return 1
