"""Helper functions of the old package's scoring modules, under which reward files compare answers.

They give the old results for the same arguments, so a reward file scores as before. New code scores
mathematics with ``temper_trainer.reward.builtin_rewards.math_verify``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from temper_legacy_shim.errors import UsageError
from temper_legacy_shim.old_rewards import INFO, SOURCE, by_data_source

_GSM8K_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_GSM8K_NUMBER = re.compile(r"-?[0-9.,]+")
_SHORT_FRACTION = re.compile(r"\\frac(?!\{)(.)(?:(\{)|(.))", re.DOTALL)
_LONGEST_NAME = 2
"""Characters before a single ``=`` that count as the name of the unknown, as in ``x = 3``."""


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    r"""Return the answer in a GSM8K completion.

    It is after the last ``#### ``, or with method flexible the last number.

    Example:
        >>> extract_solution("6 * 7 = 42\n#### 1,042")
        '1042'
    """
    if method == "strict":
        result = _GSM8K_STRICT.findall(solution_str)
        return result[-1].replace(",", "") if result else None
    if method != "flexible":
        raise AssertionError(f"method is {method!r}, but must be strict or flexible.")
    numbers = _GSM8K_NUMBER.findall(solution_str)
    # Without any other the first one counts, even if it is a lone dot.
    return next(
        (number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None
    )


def gsm8k_score(
    solution_str: str,
    ground_truth: str,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score a GSM8K completion: 0, ``format_score`` if wrong, ``score`` if right."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` (or ``\fbox{...}``) of a text, with its braces.

    None if there is none.

    ``\boxed 3`` without braces goes to the next ``$``.

    Example:
        >>> last_boxed_only_string(r"so \boxed{\frac{1}{2}}.")
        '\\boxed{\\frac{1}{2}}'
    """
    if "\\boxed " in string:
        return "\\boxed " + string.rpartition("\\boxed ")[2].partition("$")[0]
    start = string.rfind("\\boxed")
    if start < 0:
        start = string.rfind("\\fbox")
    if start < 0:
        return None
    depth = 0
    for at in range(start, len(string)):
        depth += {"{": 1, "}": -1}.get(string[at], 0)
        if string[at] == "}" and depth == 0:
            return string[start : at + 1]
    return None


def remove_boxed(s: str) -> str:
    r"""Return the content of ``\boxed{...}`` or ``\boxed ...``.

    Raises:
        AssertionError: the text is neither.
    """
    if "\\boxed " in s:
        if not s.startswith("\\boxed "):
            raise AssertionError(f"{s[:80]!r} does not begin with \\boxed.")
        return s.removeprefix("\\boxed ")
    if not s.startswith("\\boxed{") or not s.endswith("}"):
        raise AssertionError(f"{s[:80]!r} is not \\boxed{{...}}.")
    return s[len("\\boxed{") : -1]


def strip_string(string: str) -> str:
    r"""Return a LaTeX answer in the form in which two of them are compared.

    It has no units, spaces or ``\left``, and full fractions.

    Example:
        >>> strip_string(r"x = \dfrac12")
        '\\frac{1}{2}'
    """
    string = string.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    string = string.replace("tfrac", "frac").replace("dfrac", "frac")
    for dropped in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        string = string.replace(dropped, "")
    if string.count("\\text{ ") > 1:
        raise AssertionError(f"{string[:80]!r} has two units.")
    string = string.partition("\\text{ ")[0].replace("\\%", "")
    string = string.replace(" .", " 0.").replace("{.", "{0.")
    if not string:
        return string
    if string.startswith("."):
        string = "0" + string
    name, equals, value = string.partition("=")
    if equals and "=" not in value and len(name) <= _LONGEST_NAME:
        string = value
    string = _with_braced_roots(string).replace(" ", "")
    string = _with_braced_fractions(string)
    return _as_fraction("\\frac{1}{2}" if string == "0.5" else string)


def _with_braced_roots(string: str) -> str:
    first, *rest = string.split("\\sqrt")
    return first + "".join(
        "\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in rest
    )


def _with_braced_fractions(string: str) -> str:
    r"""Rewrite ``\frac12`` and ``\frac1{2}`` to ``\frac{1}{2}``, but no cut-off fraction."""
    parts = string.split("\\frac")[1:]
    if any(part[0] != "{" and len(part) == 1 for part in parts):
        return string
    return _SHORT_FRACTION.sub(
        lambda match: f"\\frac{{{match[1]}}}" + (match[2] or f"{{{match[3]}}}"), string
    )


def _as_fraction(string: str) -> str:
    """Rewrite ``3/4`` of two whole numbers as a fraction."""
    numbers = string.split("/")
    is_simple = len(numbers) == 2 and all(
        re.fullmatch(r"-?(?:0|[1-9][0-9]*)", each) and each != "-0" for each in numbers
    )
    return f"\\frac{{{numbers[0]}}}{{{numbers[1]}}}" if is_simple else string


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    r"""Check if two LaTeX answers are the same after ``strip_string``.

    They are compared as texts if one cannot be stripped.

    Example:
        >>> is_equiv("0.5", r"\frac12")
        True
    """
    if str1 is None or str2 is None:
        return str1 is str2
    try:
        one, other = strip_string(str1), strip_string(str2)
    except (AssertionError, IndexError):
        return str1 == str2
    if verbose:
        print(one, other)  # noqa: T201  # as the old function did
    return one == other


def math_score(solution_str: str, ground_truth: str) -> float:
    r"""Score a completion by its last ``\boxed{...}``: 1 if it equals the reference, else 0."""
    boxed = last_boxed_only_string(solution_str)
    if boxed is None or not boxed.startswith(("\\boxed{", "\\boxed ")):
        return 0.0
    return float(is_equiv(remove_boxed(boxed), ground_truth))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The fields of a prompt that ``by_data_source`` reads."""

    answer: str
    extra: Mapping[str, object]
    text: str = field(default="")


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: object = None,
    *args: object,
    **kwargs: object,
) -> float:
    """Score as the old default did, by ``data_source``.

    See ``temper_legacy_shim.old_rewards.by_data_source``.

    Raises:
        UsageError: the old system scored this source by code of its own, or arguments were given
            that only such code reads.
    """
    given = [each for each in (*args, *kwargs.values()) if each is not None]
    if given:
        raise UsageError(
            f"default_compute_score was given {', '.join(kwargs) or 'further arguments'}, which "
            "only the old sandboxes read: score programs in a function of your own."
        )
    return by_data_source(
        _Row(answer=ground_truth, extra={SOURCE: data_source, INFO: extra_info}), solution_str
    )
