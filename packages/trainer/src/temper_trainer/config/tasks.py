"""Settings that single tasks and the warm start have."""

from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import OptimizerSpec, ScheduleSpec
from temper_trainer.config.data import SourceConfig
from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """The warm start: supervised fine-tuning before RL. Task sft takes its settings from data, batching, run and the actor."""

    data: SourceConfig | None = None
    """Demonstrations; None takes data.train."""
    total_steps: int = 100
    """Updates."""
    batch_size: int = 64
    """Demonstrations of one update."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """Of the warm start; the actor's own begins anew after it."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """Of the warm start."""

    def __post_init__(self) -> None:
        check_range("warm_start.total_steps", self.total_steps, at_least=1)
        check_range("warm_start.batch_size", self.batch_size, at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceConfig:
    """Of task dpo, and of task rm where it says so."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """dpo only: sigmoid is DPO as published."""
    beta: float = 0.1
    """dpo only: strength of the tie to the reference policy."""
    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round; only with the sigmoid loss."""
    reference: Literal["ref", "disabled_adapter", "none"] = "ref"
    """dpo only: the ref role; the actor with its adapter disabled; or no reference at all (log-probs alone)."""
    length_normalized: bool = False
    """dpo only: mean log-prob of a completion in place of the sum."""
    sft_coef: float = 0.0
    """dpo only: weight of the chosen completion's negative log-likelihood per token."""
    center_coef: float = 0.0
    """rm only: weight of the squared sum of a pair's scores, which keeps scores around 0."""

    def __post_init__(self) -> None:
        check_range("preference.beta", self.beta, above=0)
        check_range("preference.label_smoothing", self.label_smoothing, at_least=0, at_most=0.5)
        check_range("preference.sft_coef", self.sft_coef, at_least=0)
        check_range("preference.center_coef", self.center_coef, at_least=0)
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(
                f"preference.label_smoothing has no effect with preference.loss {self.loss}: remove it, or use sigmoid."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Of task generate: prompts of data.eval, or of data.train where it is not set, completed with ``sampling``."""

    num_completions: int = 1
    """Of each prompt; more than 1 needs sampling.temperature above 0."""
    file: str = "completions.jsonl"
    """In the run folder: one line for each completion, with prompt, completion, log-probs and score."""

    def __post_init__(self) -> None:
        check_range("generate.num_completions", self.num_completions, at_least=1)
