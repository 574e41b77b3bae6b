"""Run a small policy with the calculator, whose answers are read but not trained."""

import base64
import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        "data.eval=null",
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


def test_timeline_and_recorded_rollouts_are_those_of_the_run(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(
        tmp_path / "run",
        CALCULATOR,
        "loop=async",
        "rollout.record=true",
        "data.eval=null",
        "warm_start.total_steps=30",
        "run.total_steps=3",
        "run.save_model=false",
        "run.report=true",
        "run.table_every=1",
        "sampling.max_tokens=16",
    )

    def read(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]

    steps = read("timeline.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step, metrics in zip(steps, rows(tmp_path / "run"), strict=True):
        assert step["num_rollouts"] == len(step["rollouts"]) == 16
        assert sum(step["staleness"].values()) == metrics["rollout/tokens"]
        assert sum(each["tokens"] for each in step["rollouts"]) == metrics["rollout/tokens"]
        for each in step["rollouts"]:
            assert step["weight_version"] - 1 <= each["version"] <= step["weight_version"]
            for _, begin, end in each["spans"]:
                assert each["requested_s"] <= begin <= end <= each["scored_s"]
        assert {span[0] for each in step["rollouts"] for span in each["spans"]} >= {"sampling"}
        assert max(step["servers"]["0"]["open"]) > 0

    def decode(typecode: str, values: str) -> list[Any]:
        return array(typecode, base64.b64decode(values)).tolist()

    sampled = [
        [
            decode("I", row["tokens"]),
            [round(each, 5) for each in decode("f", row["logprobs"])],
            decode("I", row["token_versions"]) or [row["weight_version"]],
        ]
        for row in read("completions.jsonl")
        if "tokens" in row
    ]
    recorded = read("rollouts.jsonl")
    completions = [
        segment
        for row in recorded
        for segment in row["histories"][0]
        if segment["role"] == "completion"
    ]
    assert len(completions) >= len(recorded) >= 3 * 4
    for segment in completions:
        assert [segment["ids"], segment["logprobs"], segment["versions"]] in sampled
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.index("<h2>Timeline</h2>") < page.index("<h2>Rollouts</h2>")
