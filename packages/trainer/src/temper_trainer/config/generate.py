"""Completions for others to use."""

from dataclasses import dataclass

from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Of task generate: prompts of data.eval, or of data.train where it is not set, completed with ``sampling``."""

    num_completions: int = 1
    """Of each prompt; more than 1 needs sampling.temperature above 0."""
    file: str = "completions.jsonl"
    """In the run folder: one line for each completion, with prompt, completion, log-probs and score."""

    def __post_init__(self) -> None:
        check_range("generate.num_completions", self.num_completions, at_least=1)
