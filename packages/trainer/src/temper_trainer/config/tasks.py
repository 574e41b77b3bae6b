"""Settings that only single tasks or the warm start have."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import OptimizerSpec, ScheduleSpec
from temper_trainer.config.data import SourceConfig
from temper_trainer.settings.ranges import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Range,
    check_ranges,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """Supervised fine-tuning of the actor before RL.

    RL starts from its result, also if ``actor.engine.model.path`` is set. So does every role that
    has the same path and architecture, such as ``ref=frozen`` and ``critic=value_model``. Task sft
    does not use it: its settings are data, batching, run and actor.
    """

    data: SourceConfig | None = None
    """Demonstrations; None takes data.train."""
    total_steps: PositiveInt = 100
    """Number of updates of the warm start."""
    batch_size: PositiveInt = 64
    """Number of demonstrations in each update."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """Optimizer of the warm start; the actor's own starts fresh afterwards."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """Learning-rate schedule of the warm start; the actor's own starts at step 0 afterwards."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceConfig:
    """Settings of task dpo, and of task rm for the fields that say so."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """dpo only: sigmoid is DPO as published."""
    beta: PositiveFloat = 0.1
    """dpo only: strength of the regularization toward the reference policy."""
    label_smoothing: Annotated[float, Range(at_least=0, at_most=0.5)] = 0.0
    """dpo with the sigmoid loss, and rm: assumed fraction of pairs with swapped labels, in [0,
    0.5].
    """
    reference: Literal["ref", "disabled_adapter", "none"] = "ref"
    """dpo only. ref: the ref role; disabled_adapter: the actor without its adapter; none: no
    reference.
    """
    length_normalized: bool = False
    """dpo only: use a completion's mean log-prob in place of the sum."""
    sft_coef: NonNegativeFloat = 0.0
    """dpo only: weight of the chosen completion's negative log-likelihood per token."""
    center_coef: NonNegativeFloat = 0.0
    """rm only: weight of the squared sum of a pair's scores, which keeps scores near 0; at least 0.
    """

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(
                f"preference.label_smoothing has no effect with preference.loss {self.loss}: "
                "remove it, or use sigmoid."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Settings of task generate, which completes held-out prompts (else data.train)."""

    num_completions: PositiveInt = 1
    """Completions per prompt; more than 1 needs sampling.temperature above 0."""
    file: str = "completions.jsonl"
    """File in the run folder with one line per completion: prompt, completion, log-probs and score.
    """

    def __post_init__(self) -> None:
        check_ranges(self)
