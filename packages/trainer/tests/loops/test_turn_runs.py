"""A small real run with the calculator: the policy calls it, its answers are read and not trained."""

from collections.abc import Callable
from pathlib import Path

from temper_trainer.loops import RunResult

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
CALCULATOR = (
    "environment={name: calculator, call_start: '', call_end: '=', answer_start: '', answer_end: '', turn_discount: 0.9, "
    "max_observation_tokens: 8}"
)


def test_a_policy_is_trained_on_rollouts_with_a_calculator(run: Run, rows: Rows, tmp_path: Path) -> None:
    # The warm start shows calls; a few updates teach their form.
    run(tmp_path / "run", CALCULATOR, "warm_start.total_steps=30", "run.total_steps=2", "run.save_model=false", "sampling.max_tokens=16")
    found = rows(tmp_path / "run")
    assert sum(row["tool/calls"] for row in found) > 0
    assert max(row["rollout/turns_max"] for row in found) > 1
    assert all(row["batch/trained_tokens"] == row["rollout/tokens"] for row in found), "trained is what the policy wrote, and only that"
