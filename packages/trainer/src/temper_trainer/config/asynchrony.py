"""How far sampling may run ahead of training."""

from dataclasses import dataclass

from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronyConfig:
    """Of loop async; one_step_off has a staleness of one and no other choice."""

    max_staleness: int = 1
    """Updates of the weights between the first token of a completion and the step that trains on it, at most."""
    partial_rollouts: bool = True
    """At a weight sync, stop unfinished completions and let them go on under the new weights, every token with its own version; False
    waits until they are finished."""

    def __post_init__(self) -> None:
        check_range("asynchrony.max_staleness", self.max_staleness, at_least=1)
