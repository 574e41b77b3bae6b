"""A reward that a model without training can get, so that advantages are not all zero."""

from temper_trainer.types import Prompt


def fraction_of_even(prompt: Prompt, completion: str) -> float:
    del prompt
    return sum(sign in "02468" for sign in completion) / max(len(completion), 1)
