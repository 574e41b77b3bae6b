"""Settings that only single tasks or the warm start have."""

from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import OptimizerSpec, ScheduleSpec
from temper_trainer.config.data import SourceConfig
from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """Supervised fine-tuning of the actor before RL.

    RL starts from its result, also if ``actor.engine.model.path`` is set. So does every role that
    has the same path and architecture, such as ``ref=frozen`` and ``critic=value_model``. Task sft
    does not use it: its settings are data, batching, run and actor.
    """

    data: SourceConfig | None = None
    """Demonstrations; None takes data.train."""
    total_steps: int = 100
    """Number of updates of the warm start, at least 1."""
    batch_size: int = 64
    """Number of demonstrations in each update, at least 1."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """Optimizer of the warm start; the actor's own starts fresh afterwards."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """Learning-rate schedule of the warm start; the actor's own starts at step 0 afterwards."""

    def __post_init__(self) -> None:
        check_range("warm_start.total_steps", self.total_steps, at_least=1)
        check_range("warm_start.batch_size", self.batch_size, at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceConfig:
    """Settings of task dpo, and of task rm for the fields that say so."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """dpo only: sigmoid is DPO as published."""
    beta: float = 0.1
    """dpo only: strength of the regularization toward the reference policy, above 0."""
    label_smoothing: float = 0.0
    """dpo with the sigmoid loss, and rm: assumed fraction of pairs with swapped labels, in [0,
    0.5].
    """
    reference: Literal["ref", "disabled_adapter", "none"] = "ref"
    """dpo only. ref: the ref role; disabled_adapter: the actor without its adapter; none: no
    reference.
    """
    length_normalized: bool = False
    """dpo only: use a completion's mean log-prob in place of the sum."""
    sft_coef: float = 0.0
    """dpo only: weight of the chosen completion's negative log-likelihood per token, at least 0."""
    center_coef: float = 0.0
    """rm only: weight of the squared sum of a pair's scores, which keeps scores near 0; at least 0.
    """

    def __post_init__(self) -> None:
        check_range("preference.beta", self.beta, above=0)
        check_range("preference.label_smoothing", self.label_smoothing, at_least=0, at_most=0.5)
        check_range("preference.sft_coef", self.sft_coef, at_least=0)
        check_range("preference.center_coef", self.center_coef, at_least=0)
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(
                f"preference.label_smoothing has no effect with preference.loss {self.loss}: "
                "remove it, or use sigmoid."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Settings of task generate, which completes held-out prompts (else data.train)."""

    num_completions: int = 1
    """Completions per prompt; more than 1 needs sampling.temperature above 0."""
    file: str = "completions.jsonl"
    """File in the run folder with one line per completion: prompt, completion, log-probs and score.
    """

    def __post_init__(self) -> None:
        check_range("generate.num_completions", self.num_completions, at_least=1)
