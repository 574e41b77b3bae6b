"""Write the messages to a judge, and read the score in its answer."""

import json
import math
import re
from collections.abc import Mapping

from temper_trainer.config.judge import TEMPLATE_FIELD, JudgeConfig
from temper_trainer.types import Prompt

Messages = list[dict[str, str]]
"""Chat messages, each with role and content."""


_MAX_ANSWER_CHARS = 20_000
"""Number of characters at an answer's end that are searched for the score: the search for JSON
takes quadratic time in texts of opening braces."""


class JudgeAnswerError(ValueError):
    """The answer of a judge has no valid score."""


def build_messages(config: JudgeConfig, prompt: Prompt, completion_text: str) -> Messages:
    """Return the chat messages that ask for a completion's score.

    Raises:
        KeyError: If the template has a field {extra.NAME} that the prompt lacks.
    """

    def fill(match: re.Match[str]) -> str:
        match match[1]:
            case "question":
                return prompt.question
            case "completion":
                return completion_text
            case "reference":
                return prompt.answer
        value = prompt.extra[match[2]]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    # In one pass, so that fields in a completion are not filled.
    messages = [{"role": "user", "content": TEMPLATE_FIELD.sub(fill, config.prompt)}]
    if config.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def parse_score(answer: str, *, config: JudgeConfig) -> float:
    """Return the score in a judge's answer.

    Raises:
        JudgeAnswerError: If there is none, or it is outside the configured range.
    """
    answer = answer[-_MAX_ANSWER_CHARS:]
    if config.score_field is None:
        assert config.score_pattern is not None
        value = _find_last_match(answer, pattern=config.score_pattern)
        expected = f"a match of score_pattern {config.score_pattern!r}"
    else:
        value = _find_field(answer, path=config.score_field)
        expected = f"a JSON object with a number in score_field {config.score_field!r}"
    score = _to_number(value)
    if score is None:
        raise JudgeAnswerError(f"the judge answered {_shorten(answer)}, which is not {expected}")
    if not config.min_score <= score <= config.max_score:
        raise JudgeAnswerError(
            f"the judge gave the score {score:g}, but min_score is {config.min_score:g} and "
            f"max_score is {config.max_score:g}; its answer was {_shorten(answer)}"
        )
    return score


def _find_last_match(answer: str, *, pattern: str) -> object:
    matches = list(re.finditer(pattern, answer))
    return matches[-1][1 if matches[-1].re.groups else 0] if matches else None


def _find_field(answer: str, *, path: str) -> object:
    """Return a field's value from the last JSON object that has the field, or None."""
    decoder, start, last = json.JSONDecoder(), answer.find("{"), None
    while start != -1:
        try:
            value, end = decoder.raw_decode(answer, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            for name in path.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
            last = last if value is None else value
        start = answer.find("{", end)
    return last


def _to_number(value: object) -> float | None:
    """Return a number, or a text that is one, as a finite float; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _shorten(answer: str) -> str:
    """Return the end of an answer, where the score usually is."""
    return repr(answer) if len(answer) <= 160 else f"...{answer[-160:]!r}"
