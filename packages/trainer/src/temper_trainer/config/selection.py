"""Which of the sampled groups and completions are trained on: DAPO's dynamic sampling, PF-PPO's reweighting."""

from dataclasses import dataclass
from typing import Literal

from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingConfig:
    """Groups whose completions all have the same reward teach nothing: they are passed over, whole, and further prompts are drawn."""

    max_rounds: int = 10
    """Rounds of sampling of one step."""
    prompts_per_round: int | None = None
    """Prompts of each round; None takes batching.prompts_per_step."""
    on: Literal["score", "reward"] = "score"
    """What must differ within a group: the reward function's score, or the reward after shaping."""
    shortage: Literal["error", "train"] = "error"
    """After max_rounds with too few groups: stop the run, or train on those there are (at least one is needed)."""

    def __post_init__(self) -> None:
        check_range("algorithm.dynamic_sampling.max_rounds", self.max_rounds, at_least=1)
        check_range(
            "algorithm.dynamic_sampling.prompts_per_round", self.prompts_per_round, at_least=1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReweightConfig:
    """A step's completions drawn again, with replacement, as many as there were."""

    method: Literal["power", "max_min", "max_random"] = "power"
    """power: by |reward| ** exponent; max_min: the best and the worst of each group; max_random: the best and one at random."""
    exponent: float = 2.0
    """Only for power."""

    def __post_init__(self) -> None:
        check_range("algorithm.reweight.exponent", self.exponent, at_least=0)
