"""Estimators of evaluations: numbers worked by hand, and pass@k against all subsets."""

import itertools
import math

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.metrics.evaluation_estimators import (
    ProblemResult,
    compute_majority_score,
    compute_pass_at_k,
    estimate_mean,
    group_by_category,
    list_pass_k,
    measure_problems,
    name_categories,
)


def test_interval_is_the_normal_approximation_over_problems() -> None:
    # Deviations 0.5 of the mean 0.5: variance 4 * 0.25 / 3 = 1/3, standard error sqrt(1/3 / 4).
    estimate = estimate_mean([1.0, 0.0, 1.0, 0.0])
    assert (estimate.mean, estimate.num_problems) == (0.5, 4)
    assert estimate.ci95 == pytest.approx(1.959964 * math.sqrt(1 / 12), rel=1e-6)


def test_interval_needs_two_problems() -> None:
    assert estimate_mean([0.25]).mean == 0.25
    assert math.isnan(estimate_mean([0.25]).ci95)
    assert math.isnan(estimate_mean([]).mean)
    assert estimate_mean([1.0, 1.0]).ci95 == 0.0


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_fraction_of_subsets_with_a_right_completion(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        computed = compute_pass_at_k(num_completions=n, num_solved=c, k=k)
        assert computed == pytest.approx(expected, rel=1e-12)


def test_pass_at_k_by_hand() -> None:
    # 1 - C(7, 5) / C(10, 5) = 1 - 21 / 252
    assert compute_pass_at_k(num_completions=10, num_solved=3, k=5) == pytest.approx(11 / 12)
    # C(5000, 2500) has 1500 digits, so it is no float. One right among n: k / n.
    assert compute_pass_at_k(num_completions=5000, num_solved=1, k=2500) == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 2), (4, -1, 2), (4, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        compute_pass_at_k(num_completions=n, num_solved=c, k=k)


def test_pass_at_k_is_reported_for_powers_of_two_and_all_completions() -> None:
    assert [list_pass_k(n) for n in (1, 2, 3, 8, 10)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 10],
    ]


def test_majority_is_decided_by_votes_not_by_right_answers() -> None:
    assert compute_majority_score(["7", "8", "8"], is_solved=[True, False, False]) == 0.0
    assert compute_majority_score(["7", "8", "7"], is_solved=[True, False, True]) == 1.0


def test_tied_answers_are_averaged_and_missing_ones_do_not_vote() -> None:
    answers = ["7", "8", "9", "7", "8", None, None, None]
    is_solved = [True, False, False, True, False, False, False, False]
    assert compute_majority_score(answers, is_solved=is_solved) == 0.5
    assert compute_majority_score([None, None], is_solved=[False, False]) == 0.0


def test_metrics_of_two_problems_with_four_completions() -> None:
    problems = [
        ProblemResult(rewards=(1.0, 0.0, 0.0, 0.0), answers=("1", "2", "2", "3")),
        ProblemResult(rewards=(1.0, 1.0, 0.0, 0.0), answers=("5", "5", "6", None)),
    ]
    metrics = measure_problems(problems, num_completions=4, solved_reward=1.0)
    # pass@2: 1 - C(3,2)/C(4,2) = 1/2 and 1 - C(2,2)/C(4,2) = 5/6.
    expected = {"reward": 0.375, "pass_at_1": 0.375, "pass_at_2": 2 / 3, "pass_at_4": 1.0}
    expected |= {"maj_at_4": 0.5, "failed": 0.0}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics.keys() - expected.keys() == {f"{name}_ci95" for name in expected} - {
        "failed_ci95"
    }


def test_one_completion_has_no_pass_at_k() -> None:
    problems = [ProblemResult(rewards=(reward,)) for reward in (0.5, None, 1.0)]
    metrics = measure_problems(problems, num_completions=1, solved_reward=1.0)
    assert metrics.keys() == {"reward", "reward_ci95", "failed"}
    assert (metrics["reward"], metrics["failed"]) == (0.75, 1.0)


def test_problem_with_an_unscored_completion_is_left_out_of_pass_at_k() -> None:
    problems = [ProblemResult(rewards=(1.0, None)), ProblemResult(rewards=(0.0, 0.0))]
    metrics = measure_problems(problems, num_completions=2, solved_reward=1.0)
    assert (metrics["reward"], metrics["pass_at_2"], metrics["failed"]) == (0.5, 0.0, 1.0)
    assert "maj_at_2" not in metrics
    assert "pass_at_2_ci95" not in metrics


def test_problems_are_grouped_by_the_names_of_their_categories() -> None:
    problems = [ProblemResult(rewards=(1.0,), category=name) for name in ("b/c", "", "a", "b/c")]
    groups = group_by_category(problems)
    assert {name: len(group) for name, group in groups.items()} == {"": 4, "a": 1, "b_c": 2}
    with pytest.raises(ConfigError, match=r"'a b' and 'a/b' would both be named 'a_b'"):
        name_categories(["a b", "a/b"])


def test_partial_rewards_are_right_from_the_threshold() -> None:
    problems = [ProblemResult(rewards=(0.9, 0.4))]
    assert measure_problems(problems, num_completions=2, solved_reward=0.5)["pass_at_1"] == 0.5
    assert measure_problems(problems, num_completions=2, solved_reward=1.0)["pass_at_1"] == 0.0
