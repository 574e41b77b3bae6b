"""Tasks of verifiers in a run, with a harness in the run's process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_trainer.loops import RunResult

pytest.importorskip(
    "verifiers", reason="needs temper-trainer[verifiers]: nox -s adapters runs this"
)

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_policy_is_trained_on_tasks_of_verifiers(
    run: Callable[..., RunResult],
    rows: Callable[..., list[dict[str, float]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from temper_trainer.environment.verifiers_tasks import list_rows

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    taskset = "verifiers_sums_for_tests"
    data = tmp_path / "tasks.jsonl"
    data.write_text(
        "".join(json.dumps(row | {"harness": taskset}) + "\n" for row in list_rows(taskset))
    )
    assert json.loads(data.read_text().splitlines()[3]) == {
        "question": "3 + 4 =",
        "answer": "",
        "taskset": taskset,
        "task": 3,
        "harness": taskset,
    }
    run(
        tmp_path / "run",
        "environment={name: agent, max_turns: 2, max_tokens: 60, arguments: "
        "{function: 'temper_trainer.environment.verifiers_tasks:run_task'}}",
        f"data.train={{name: jsonl, paths: [{data}], extra_keys: [taskset, task, harness]}}",
        "data.eval=null",
        f"data.chat_template='{TEMPLATE}'",
        "warm_start=null",
        "run.total_steps=3",
        "run.save_model=false",
        "sampling.max_tokens=8",
    )
    step_rows = rows(tmp_path / "run")
    assert [row["step"] for row in step_rows] == [1, 2, 3]
    assert [row["agent/requests"] for row in step_rows] == [32, 32, 32]
    assert any(row["reward/mean"] > 0 for row in step_rows)
