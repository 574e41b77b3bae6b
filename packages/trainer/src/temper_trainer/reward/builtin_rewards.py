"""The built-in reward functions: exact match, GSM8K answers and math-verify."""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from temper_engine_api.errors import TemperError
from temper_trainer.types import Prompt


class AnswerError(TemperError, ValueError):
    """A row's reference answer is not of the kind that a built-in reward compares."""


def exact_match(prompt: Prompt, completion_text: str) -> float:
    """Return 1 if completion and reference are equal up to surrounding white space, else 0."""
    return float(completion_text.strip() == prompt.answer.strip())


MARK = "####"


_NUMBER = r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\$?\.\d+"


_ANSWER_LINE = re.compile(rf"{MARK}\s*({_NUMBER})\.?")


_ANY_NUMBER = re.compile(_NUMBER)


def gsm8k_strict(prompt: Prompt, completion_text: str) -> float:
    """Return 1 if the last line is ``#### N`` with the reference's number, else 0.

    ``$``, commas and ``.0`` are ignored. GSM8K solutions end in such a line: Cobbe et al. 2021,
    arXiv:2110.14168.

    Raises:
        ValueError: If the reference is not a number.
    """
    lines = completion_text.strip().splitlines()
    match = _ANSWER_LINE.fullmatch(lines[-1].strip()) if lines else None
    reference = _parse_reference(prompt)
    return float(match is not None and _parse_number(match[1]) == reference)


def gsm8k_flexible(prompt: Prompt, completion_text: str) -> float:
    """Return 1 if the last number of the completion is the reference's, else 0.

    Raises:
        ValueError: If the reference is not a number.
    """
    match = _ANY_NUMBER.findall(completion_text)
    reference = _parse_reference(prompt)
    return float(bool(match) and _parse_number(match[-1]) == reference)


def extract_reference(prompt: Prompt) -> str:
    """Return the text after the last ``####`` in the reference, or all of it if there is none."""
    return prompt.answer.rpartition(MARK)[2].strip()


def _parse_reference(prompt: Prompt) -> Decimal:
    answer = extract_reference(prompt)
    if not _ANY_NUMBER.fullmatch(answer):
        raise AnswerError(
            f"the reference answer of prompt {prompt.prompt_id} ({prompt.location}) is {answer!r}, "
            "but must be a number: correct the row, or choose another reward for it."
        )
    return _parse_number(answer)


def _parse_number(text: str) -> Decimal:
    # Two different long numbers may be the same float, so use Decimal.
    return Decimal(text.replace(",", "").replace("$", ""))


def math_verify(prompt: Prompt, completion_text: str) -> float:
    """Return 1 if the completion's answer equals the reference mathematically, else 0.

    An answer that cannot be parsed counts as wrong. The library's own timeouts are disabled
    because they use signal.alarm. It works only in the main thread; in other threads every answer
    would count as wrong. The scorer's timeout applies instead.

    Raises:
        ValueError: If the reference cannot be parsed as mathematics.
    """
    from math_verify import parse, verify

    reference = extract_reference(prompt)
    # The parser only looks for LaTeX within delimiters, which a bare reference does not have.
    gold = parse(f"${reference}$", parsing_timeout=None) or parse(reference, parsing_timeout=None)
    if not gold:
        raise AnswerError(
            f"the reference answer of prompt {prompt.prompt_id} ({prompt.location}) is "
            f"{reference!r}, which math-verify cannot parse: correct the row."
        )
    answer = parse(completion_text, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None, raise_on_error=True))


def _extract_strict_number(completion_text: str) -> str | None:
    lines = completion_text.strip().splitlines()
    match = _ANSWER_LINE.fullmatch(lines[-1].strip()) if lines else None
    return None if match is None else _normalize_number(match[1])


def _extract_last_number(completion_text: str) -> str | None:
    matches = _ANY_NUMBER.findall(completion_text)
    return _normalize_number(matches[-1]) if matches else None


def _normalize_number(text: str) -> str:
    """Return the same text for equal numbers, such as 1,000 and 1000.0."""
    return str(_parse_number(text).normalize())


def _extract_boxed(completion_text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` without white space, or the last number.

    Not math-verify's parser, which has no timeout here. So equal answers that are written
    differently, such as 1/2 and 0.5, are different votes.
    """
    _, mark, rest = completion_text.rpartition(r"\boxed{")
    if not mark:
        return _extract_last_number(completion_text)
    depth = 1
    for i, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return "".join(rest[:i].split()) or None
    return None  # truncated within the braces


ANSWER_EXTRACTORS: Mapping[str, Callable[[str], str | None]] = {
    "exact_match": lambda completion_text: completion_text.strip() or None,
    "gsm8k_flexible": _extract_last_number,
    "gsm8k_strict": _extract_strict_number,
    "math_verify": _extract_boxed,
}
"""Functions that return the answer of a completion, for majority votes, by reward function."""
