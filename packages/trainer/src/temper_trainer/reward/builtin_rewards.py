"""The built-in reward functions."""

import re
from decimal import Decimal

from temper_trainer.types import Prompt


def exact_match(prompt: Prompt, completion_text: str) -> float:
    """1 where completion and reference are equal but for white space around them, else 0."""
    return float(completion_text.strip() == prompt.answer.strip())


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


def math_verify(prompt: Prompt, completion_text: str) -> float:
    """1 where the completion's answer equals the reference, else 0; an answer that can't be read is a wrong one.

    The library's own time-outs are off: they use signal.alarm, which works in a main thread only, and elsewhere turn every answer
    into a wrong one. The scorer's time-out covers this call.

    Raises:
        ValueError: the reference can't be read as mathematics.
    """
    from math_verify import parse, verify

    reference = reference_answer(prompt)
    # A bare reference is not in the delimiters that the parser looks for LaTeX in.
    gold = parse(f"${reference}$", parsing_timeout=None) or parse(reference, parsing_timeout=None)
    if not gold:
        raise ValueError(
            f"the reference answer of prompt {prompt.prompt_id} ({prompt.source}) is {reference!r}, which math-verify can't read."
        )
    answer = parse(completion_text, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
