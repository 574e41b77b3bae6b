"""Reward functions with the old signature under the new one.

They call a user's own file, or choose by a row's ``data_source``.

Translated configurations name them in ``reward.function``; the trainer calls them with a prompt and
the text of a completion. They read the row's further fields from ``prompt.extra``, which the
translated ``data.train.extra_keys`` fills.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Protocol, SupportsFloat

from temper_legacy_shim import old_paths
from temper_legacy_shim.errors import MissingExtraError, UsageError

Argument = str | int | float | bool | None

SOURCE, INFO = "data_source", "extra_info"
"""Columns of the old data sets that scoring functions were given."""


class ScoredPrompt(Protocol):
    """Fields of the trainer's prompt that are read."""

    @property
    def text(self) -> str: ...

    @property
    def answer(self) -> str: ...

    @property
    def extra(self) -> Mapping[str, object]:
        """Further fields of the row."""
        ...


def from_file(
    prompt: ScoredPrompt,
    text: str,
    /,
    *,
    path: str,
    name: str = "compute_score",
    **arguments: Argument,
) -> float:
    """Score with a function of a file that has the old signature.

    The signature is ``f(data_source, solution_str, ground_truth, extra_info)``.

    Args:
        prompt: its answer and extra fields.
        text: the completion.
        path: the Python file, imported once in each process.
        name: of the function; compute_score was the old default.
        arguments: the old ``reward_kwargs``.

    Returns:
        The number, or the entry ``score`` of the mapping, that the function returned.

    Raises:
        UsageError: file or function do not exist, or the result is neither.
    """
    function = _function(path, name)
    result = function(
        data_source=prompt.extra.get(SOURCE),
        solution_str=text,
        ground_truth=prompt.answer,
        extra_info=prompt.extra.get(INFO),
        **arguments,
    )
    if inspect.isawaitable(result):
        raise UsageError(
            f"{name} in {path} is asynchronous: wrap it in a function that waits for it "
            "(asyncio.run) and name that one."
        )
    return _score(result, what=f"{name} in {path}")


def score_by_data_source(prompt: ScoredPrompt, text: str, /) -> float:
    """Score as the old default did: by the row's ``data_source``.

    GSM8K by the last number after ``#### `` among the last 300 characters, compared as text without
    commas (1 or 0); mathematics by math-verify, which accepts a few spellings that the old
    comparison of texts did not; DAPO's data by the same with -1 for a wrong answer.

    Raises:
        UsageError: a source that was scored by code of its own; name a reward function for it.
        MissingExtraError: mathematics, without math-verify.
    """
    source = str(prompt.extra.get(SOURCE) or "")
    if source == "openai/gsm8k":
        return _gsm8k(prompt.answer, text)
    if source in _MATHS or source.startswith(_MATHS_BEGIN):
        return _maths(prompt, text)
    if source == "math_dapo" or source.startswith("aime"):
        return 1.0 if _maths(prompt, text) > 0 else -1.0
    raise UsageError(
        f"data_source is {source!r}, which the old system scored by code of its own: name a reward "
        "function of yours in reward.function "
        "(temper_legacy_shim.old_rewards:from_file takes the old kind, with reward.arguments.path)."
    )


_MATHS = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "math",
    "math_dapo_reasoning",
)
_MATHS_BEGIN = ("numina_",)
_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def _gsm8k(answer: str, text: str) -> float:
    result = _GSM8K_ANSWER.findall(text[-300:])
    return float(
        bool(result)
        and result[-1].replace(",", "").replace("$", "") == answer.rpartition("####")[2].strip()
    )


def _maths(prompt: ScoredPrompt, text: str) -> float:
    if importlib.util.find_spec("math_verify") is None:
        # Imported late, because this file is also read where temper-engine-api is not installed.
        from temper_engine_api.errors import format_install

        raise MissingExtraError(
            f"data_source {prompt.extra.get(SOURCE)!r} is scored by math-verify, which is not "
            f"installed: run {format_install('temper-trainer[math]')}."
        )
    from temper_trainer.reward.builtin_rewards import math_verify

    return math_verify(prompt, text)  # type: ignore[arg-type]


@cache
def _function(path: str, name: str) -> Callable[..., object]:
    file = Path(path)
    if not file.is_file():
        raise UsageError(
            f"reward.arguments.path is {path}, which is no file here ({Path.cwd()}): fix the path."
        )
    spec = importlib.util.spec_from_file_location(f"_old_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file: give the .py file with the reward function.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if not old_paths.is_installed() and importlib.util.find_spec(old_paths.PACKAGE) is None:
        # For helpers such as verl.utils.reward_score.math.last_boxed_only_string.
        old_paths.install()
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        missing = str(error.name or "")
        if missing.partition(".")[0] != old_paths.PACKAGE:
            raise
        from temper_legacy_shim.imports.successors import advice_for

        raise UsageError(f"{path} can't be imported ({error}): {advice_for(missing)}.") from error
    function = vars(module).get(name)
    if not callable(function):
        raise UsageError(
            f"{path} has no function {name}: set reward.arguments.name to the one that scores."
        )
    result: Callable[..., object] = function
    return result


def _score(result: object, *, what: str) -> float:
    value = result.get("score") if isinstance(result, Mapping) else result
    if not isinstance(value, SupportsFloat):
        raise UsageError(
            f"{what} returned {result!r:.80}, but a number, or a mapping with a number under "
            "score, is expected."
        )
    return float(value)


# Translated configurations call it by this name.
by_data_source = score_by_data_source
