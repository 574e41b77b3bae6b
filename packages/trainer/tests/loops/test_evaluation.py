"""The line that an evaluation prints: number of problems, and whether they are held out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_trainer.data.rows import ChatMessage, Row
from temper_trainer.loops import RunResult
from temper_trainer.loops.evaluation import count_trained_prompts
from temper_trainer.reward.builtin_rewards import ANSWER_EXTRACTORS
from temper_trainer.types import Prompt

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]


def test_evaluation_reports_unscored_problems_and_those_in_the_training_data(
    run: Run, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first eight of the training problems; every second one can't be scored.
    same = (
        "data.eval.split=train",
        "data.eval.seed=1",
        "reward.function=temper_trainer_test_rewards:fails_on_even",
    )
    result = run(
        tmp_path / "run",
        *same,
        "reward.max_failure_fraction=1.0",
        "warm_start=null",
        "run.total_steps=1",
        "run.save_model=false",
    )
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("before RL", "after RL"))
    ]
    assert len(lines) == 2
    for line in lines:
        assert "over 8 problems, 8 of them in the training data too: greedy" in line
        assert line.count("(over 4 that could be scored)") == 2  # greedy and sampled
    for row in (*rows(tmp_path / "run", phase="eval"), result.evaluation):
        assert (row["eval/greedy/failed"], row["eval/sampled/failed"]) == (4, 4)


def test_evaluation_reports_problems_of_another_split_as_untrained(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", "warm_start=null", "run.total_steps=1", "run.save_model=false")
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("before RL: ")
    ]
    (line,) = lines
    assert line.startswith(
        "before RL: held-out temper_trainer_test_rewards:share_of_digits over 8 problems never "
        "trained on: greedy 0."
    )
    assert "could be scored" not in line


def test_more_completions_per_problem_measure_pass_and_majority(
    run: Run, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("warm_start=null", "run.total_steps=1", "run.save_model=false")
    one = run(tmp_path / "one", *short).evaluation
    several = run(
        tmp_path / "several",
        *short,
        "run.eval_num_completions=3",
        "run.eval_solved_reward=0.1",
        r"run.eval_answer_pattern='\d+'",
    )
    evaluation = several.evaluation
    names = {"reward", "pass_at_1", "pass_at_2", "pass_at_3", "maj_at_3"}
    expected = {f"eval/sampled/{name}{end}" for name in names for end in ("", "_ci95")}
    expected |= {f"eval/greedy/{name}" for name in ("reward", "reward_ci95", "failed")}
    assert set(evaluation) == expected | {"eval/sampled/failed"}
    passed = [evaluation[f"eval/sampled/pass_at_{k}"] for k in (1, 2, 3)]
    assert passed == sorted(passed)
    # The greedy evaluation, and so the training, is what it was.
    assert evaluation["eval/greedy/reward"] == one["eval/greedy/reward"]
    (line,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("after RL") and "pass@3" in line
    ]
    assert "sampled mean@3 " in line
    assert "maj@3 " in line


def test_named_sets_and_categories_are_reported_next_to_the_unnamed_set(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [{"q": f"Tom has {n} pens.", "a": str(n), "level": n % 2} for n in range(2, 6)]
    file = tmp_path / "levels.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    evaluation = run(
        tmp_path / "run",
        "warm_start=null",
        "run.total_steps=1",
        "run.save_model=false",
        "data.eval.category_key=operations",
        f"data.eval_sets.levels.paths=[{file}]",
        "data.eval_sets.levels.prompt_key=q",
        "data.eval_sets.levels.answer_key=a",
        "data.eval_sets.levels.category_key=level",
        "data.eval_sets.levels.reward=exact_match",
    ).evaluation
    means = {name for name in evaluation if name.endswith("reward")}
    assert means == {
        f"eval/{prefix}{kind}{category}/reward"
        for kind in ("greedy", "sampled")
        for prefix, categories in (("", ("", "/one", "/two")), ("levels/", ("", "/0", "/1")))
        for category in categories
    }
    both = [evaluation[f"eval/levels/greedy/{level}/reward"] for level in (0, 1)]
    assert evaluation["eval/levels/greedy/reward"] == pytest.approx(sum(both) / 2)
    out = capsys.readouterr().out
    assert "after RL: held-out temper_trainer_test_rewards:share_of_digits over" in out
    assert "after RL, levels: held-out exact_match over 4 problems never trained on" in out


def test_answers_of_built_in_rewards_are_equal_votes_if_the_numbers_are() -> None:
    strict, flexible = ANSWER_EXTRACTORS["gsm8k_strict"], ANSWER_EXTRACTORS["gsm8k_flexible"]
    assert strict("so\n#### $1,000.") == strict("#### 1000.0") == "1E+3"
    assert strict("1000") is None
    assert flexible("from 3 to 7.50") == flexible("7.5") == "7.5"
    assert flexible("none") is None
    boxed = ANSWER_EXTRACTORS["math_verify"]
    assert boxed(r"thus \boxed{1} or \boxed{ \frac{1}{2} }.") == r"\frac{1}{2}"
    assert boxed(r"cut off \boxed{\frac{1}{2") is None
    assert boxed("it is 12") == "12"


def row(number: int, prompt: str | tuple[ChatMessage, ...]) -> Row:
    return Row(row_id=number, prompt=prompt, answer="4", solution="4", location="here")


def prompt(number: int) -> Prompt:
    return Prompt(prompt_id=number, text="as tokenised", tokens=(1,), answer="4")


def test_questions_are_compared_without_white_space_but_with_roles() -> None:
    ask, system = (
        ChatMessage(role="user", content="2 + 2?"),
        ChatMessage(role="system", content="2 + 2?"),
    )
    eval_rows = [
        row(0, "2 + 2?"),
        row(1, "3 + 3?"),
        row(2, (ask,)),
        row(3, (system,)),
        row(4, "2 + 2?"),
    ]
    trained = [row(0, " 2 +\n2?"), row(1, (ask,))]
    # Of the rows 0, 2 and 4, which are trained on, the last was dropped for its length; 1 and 3 are
    # new.
    assert (
        count_trained_prompts([prompt(i) for i in range(4)], rows=eval_rows, trained=trained) == 2
    )
    assert count_trained_prompts([prompt(i) for i in range(4)], rows=eval_rows, trained=[]) == 0
