"""Rewards for answers in GSM8K's convention: the last line of a solution is ``#### N``.

Source: Cobbe et al. 2021, arXiv:2110.14168.
"""

import re
from decimal import Decimal

from temper_trainer.types import Prompt

MARK = "####"

_NUMBER = r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\$?\.\d+"
_ANSWER_LINE = re.compile(rf"{MARK}\s*({_NUMBER})\.?")
_ANY_NUMBER = re.compile(_NUMBER)


def gsm8k_strict(prompt: Prompt, completion_text: str) -> float:
    """1 where the completion's last line is ``#### N`` with the reference's number, else 0; $, commas and .0 make no difference.

    Raises:
        ValueError: the reference is not a number.
    """
    lines = completion_text.strip().splitlines()
    found = _ANSWER_LINE.fullmatch(lines[-1].strip()) if lines else None
    reference = _reference_number(prompt)
    return float(found is not None and _number(found[1]) == reference)


def gsm8k_flexible(prompt: Prompt, completion_text: str) -> float:
    """1 where the last number of the completion is the reference's, wherever it stands, else 0.

    Raises:
        ValueError: the reference is not a number.
    """
    found = _ANY_NUMBER.findall(completion_text)
    reference = _reference_number(prompt)
    return float(bool(found) and _number(found[-1]) == reference)


def reference_answer(prompt: Prompt) -> str:
    """What stands after the last ``####`` of the reference, or all of it where there is none."""
    return prompt.answer.rpartition(MARK)[2].strip()


def _reference_number(prompt: Prompt) -> Decimal:
    answer = reference_answer(prompt)
    if not _ANY_NUMBER.fullmatch(answer):
        raise ValueError(
            f"the reference answer of prompt {prompt.prompt_id} ({prompt.source}) is {answer!r}, but must be a number."
        )
    return _number(answer)


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))
