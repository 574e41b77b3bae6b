"""The completion is the reference, letter by letter."""

from temper_trainer.types import Prompt


def exact_match(prompt: Prompt, completion_text: str) -> float:
    """1 where completion and reference are equal but for white space around them, else 0."""
    return float(completion_text.strip() == prompt.answer.strip())
