"""Run a small policy with the calculator, whose answers are read but not trained."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_trainer.loops import RunResult

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
CALCULATOR = (
    "environment={name: calculator, call_start: '', call_end: '=', answer_start: '', "
    "answer_end: '', turn_discount: 0.9, "
    "max_observation_tokens: 8}"
)

FILES = {"eval": "samples.jsonl", "generate": "completions.jsonl"}


def test_policy_is_trained_on_rollouts_with_a_calculator(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    # The warm start shows calls; a few updates teach their form.
    run(
        tmp_path / "run",
        CALCULATOR,
        "warm_start.total_steps=30",
        "run.total_steps=2",
        "run.save_model=false",
        "sampling.max_tokens=16",
    )
    step_rows = rows(tmp_path / "run")
    assert sum(row["tool/calls"] for row in step_rows) > 0
    assert max(row["rollout/turns_max"] for row in step_rows) > 1
    assert all(row["batch/trained_tokens"] == row["rollout/tokens"] for row in step_rows), (
        "trained is what the policy wrote, and only that"
    )


def test_rewards_of_an_environment_are_in_all_logged_rewards(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    short_run = (
        "warm_start=null",
        "run.num_table_rows=8",
        "environment={name: 'temper_trainer_test_rewards:Fee', call_end: '=', max_turns: 1}",
    )
    logged_rewards = {}
    for fee in (0.0, 0.5):
        scored, written = tmp_path / f"eval-{fee}", tmp_path / f"generate-{fee}"
        run(scored, *short_run, f"environment.arguments.fee={fee}", "task=eval")
        run(written, *short_run, f"environment.arguments.fee={fee}", "task=generate")
        lines = [
            json.loads(line)
            for file in ("eval", "generate")
            for line in (tmp_path / f"{file}-{fee}" / FILES[file]).read_text().splitlines()
        ]
        means = [*rows(scored, phase="eval"), *rows(written, phase="generate")]
        logged_rewards[fee] = [line["reward"] for line in lines] + [
            means[0]["eval/greedy/reward"],
            means[1]["generate/reward"],
        ]
    assert len(logged_rewards[0.0]) > 2
    assert logged_rewards[0.5] == pytest.approx([reward + 0.5 for reward in logged_rewards[0.0]])
