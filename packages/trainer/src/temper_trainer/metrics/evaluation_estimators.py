"""Estimate mean@k, pass@k and maj@k of an evaluation, with confidence intervals.

Completions of one problem are not independent, so the problem is the unit: each estimate is a mean
over problems of one number per problem. Its 95 % interval is the normal approximation for a mean of
independent problems, mean +- 1.96 s / sqrt(n), with the sample standard deviation s of the n
numbers (Miller 2024, "Adding Error Bars to Evals", arXiv:2411.00640, section 2: the clustered
standard error, with one cluster per problem).
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from temper_engine_api.errors import ConfigError

Z_95 = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanEstimate:
    """A mean over problems with its 95 % confidence interval."""

    mean: float
    """NaN without problems."""
    ci95: float
    """Half the interval's width; NaN with fewer than two problems."""
    num_problems: int


def estimate_mean(values: Sequence[float]) -> MeanEstimate:
    """Estimate the mean of one number per problem.

    If all numbers are equal, so is the interval's width to 0: the approximation does not know that
    other problems may differ.

    Example:
        >>> estimate = estimate_mean([1.0, 0.0, 1.0, 0.0])
        >>> f"{estimate.mean} +- {estimate.ci95:.4f}"
        '0.5 +- 0.5658'
    """
    n = len(values)
    if n == 0:
        return MeanEstimate(mean=math.nan, ci95=math.nan, num_problems=0)
    mean = sum(values) / n
    if n == 1:
        return MeanEstimate(mean=mean, ci95=math.nan, num_problems=1)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return MeanEstimate(mean=mean, ci95=Z_95 * math.sqrt(variance / n), num_problems=n)


def compute_pass_at_k(*, num_completions: int, num_solved: int, k: int) -> float:
    """Return an unbiased estimate for the probability that one of k completions is right.

    1 - C(n - c, k) / C(n, k) for c right ones among n completions: the fraction of subsets of size
    k that contain a right one (Chen et al. 2021, arXiv:2107.03374, equation 1). In exact integers,
    because the binomials of the formula overflow a float from about n = 1000.

    Args:
        num_completions: n, at least k.
        num_solved: c, from 0 to n.
        k: Size of the subsets, at least 1.

    Example:
        >>> compute_pass_at_k(num_completions=4, num_solved=1, k=2)
        0.5
    """
    if not (1 <= k <= num_completions and 0 <= num_solved <= num_completions):
        raise ValueError(
            f"pass@{k} of {num_solved} right among {num_completions} completions is not defined: "
            "k must be from 1, and the number of right ones from 0, to the number of completions."
        )
    num_subsets = math.comb(num_completions, k)
    num_wrong_subsets = math.comb(num_completions - num_solved, k)
    return (num_subsets - num_wrong_subsets) / num_subsets


def list_pass_k(num_completions: int) -> list[int]:
    """Return the k values that pass@k is reported for: powers of two, and all completions.

    Example:
        >>> list_pass_k(6)
        [1, 2, 4, 6]
    """
    powers = [2**i for i in range(num_completions.bit_length()) if 2**i <= num_completions]
    return sorted({*powers, num_completions})


def compute_majority_score(answers: Sequence[str | None], *, is_solved: Sequence[bool]) -> float:
    """Return whether the most frequent answer is right, as a probability.

    Ties are broken at random, so the result is the mean over the tied answers (self-consistency:
    Wang et al. 2022, arXiv:2203.11171). A completion without an answer does not vote; if none
    votes, the result is 0.

    Args:
        answers: Answer per completion; None if it has none.
        is_solved: Whether each completion is right. If completions with the same answer differ,
            the fraction of right ones counts.

    Example:
        >>> compute_majority_score(["7", "8", "7", None], is_solved=[True, False, True, False])
        1.0
        >>> compute_majority_score(["7", "8"], is_solved=[True, False])
        0.5
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    num_right = sum(
        solved for answer, solved in zip(answers, is_solved, strict=True) if answer in winners
    )
    # All winners have `most` votes, so the mean over winners of their fractions is one fraction.
    return num_right / (most * len(winners))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """The completions of one held-out problem."""

    rewards: tuple[float | None, ...]
    """Reward per completion; None if it could not be scored."""
    answers: tuple[str | None, ...] | None = None
    """Answer per completion for maj@k; None if answers cannot be extracted."""
    category: str = ""
    """Category of the problem; empty without categories."""


def name_categories(categories: Iterable[str]) -> dict[str, str]:
    """Return the metric name per category, without the empty category.

    Other characters than letters, digits and ``. _ -`` become ``_``.

    Raises:
        ConfigError: If two categories would get the same name.

    Example:
        >>> name_categories(["Counting & Probability", "Algebra", ""])
        {'Counting & Probability': 'Counting_Probability', 'Algebra': 'Algebra'}
    """
    names: dict[str, str] = {}
    for category in dict.fromkeys(filter(None, categories)):
        name = re.sub(r"[^\w.-]+", "_", category)
        if other := next((each for each, used in names.items() if used == name), None):
            raise ConfigError(
                f"the categories {other!r} and {category!r} would both be named {name!r} in "
                "metrics: rename one of them in the data, or remove category_key."
            )
        names[category] = name
    return names


def group_by_category(problems: Sequence[ProblemResult]) -> dict[str, list[ProblemResult]]:
    """Return all problems under the empty name, then the problems per category, sorted by name."""
    names = name_categories(problem.category for problem in problems)
    groups: dict[str, list[ProblemResult]] = {name: [] for name in sorted(names.values())}
    for problem in problems:
        if problem.category:
            groups[names[problem.category]].append(problem)
    return {"": list(problems)} | groups


def measure_problems(
    problems: Sequence[ProblemResult], *, num_completions: int, solved_reward: float
) -> dict[str, float]:
    """Return metrics for a set of problems; keys are the last parts of the metrics' names.

    ``reward`` is mean@k. ``failed`` counts completions that could not be scored. They are left out
    of ``reward``, which uses the problem's other completions. pass@k and maj@k need all completions
    of a problem, so they leave out a problem that has such a completion.

    Args:
        problems: Problems with their completions.
        num_completions: Completions per problem. With one, pass@1 and maj@1 would say the same as
            ``reward``, and are left out.
        solved_reward: A completion is right if its reward is at least this.
    """
    known = [[r for r in problem.rewards if r is not None] for problem in problems]
    estimates = {"reward": estimate_mean([sum(each) / len(each) for each in known if each])}
    if num_completions > 1:
        complete = [
            (problem, [r >= solved_reward for r in rewards])
            for problem, rewards in zip(problems, known, strict=True)
            if len(rewards) == num_completions
        ]
        for k in list_pass_k(num_completions):
            estimates[f"pass_at_{k}"] = estimate_mean(
                [
                    compute_pass_at_k(
                        num_completions=num_completions, num_solved=sum(is_solved), k=k
                    )
                    for _, is_solved in complete
                ]
            )
        if all(problem.answers is not None for problem in problems):
            estimates[f"maj_at_{num_completions}"] = estimate_mean(
                [
                    compute_majority_score(problem.answers, is_solved=is_solved)
                    for problem, is_solved in complete
                    if problem.answers is not None
                ]
            )
    metrics: dict[str, float] = {}
    for name, estimate in estimates.items():
        metrics[name] = estimate.mean
        # One value has no confidence interval, and trackers should not get a metric that is always
        # NaN.
        if estimate.num_problems > 1:
            metrics[f"{name}_ci95"] = estimate.ci95
    num_sampled = sum(len(problem.rewards) for problem in problems)
    metrics["failed"] = float(num_sampled - sum(map(len, known)))
    return metrics
