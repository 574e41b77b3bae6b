"""Runs on several training sources, each with its own reward."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.data.rows import DataError
from temper_trainer.loops import RunResult

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
SHORT = ("warm_start=null", "data.eval=null", "run.save_model=false", "run.total_steps=2")
REWARDS = (
    "+reward.functions.constant={function: 'temper_trainer_test_rewards:share_of_digits'}",
    "+reward.sums.mixed={gsm8k_strict: 1.0, constant: 0.5}",
)
SOURCES = (
    "data.train.weight=3",
    "+data.train_sets.other={name: arithmetic, max_rows: 16, seed: 5, weight: 1, reward: mixed}",
)


def test_run_mixes_sources_and_scores_each_with_its_reward(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(tmp_path / "run", *SHORT, *REWARDS, *SOURCES)
    for row in rows(tmp_path / "run"):
        assert {"reward/gsm8k_strict/mean", "reward/constant/mean", "reward/mixed/mean"} <= set(row)
    full = [row["reward/mean"] for row in rows(tmp_path / "run")]
    # Interrupted after a step, it continues with the same prompts.
    run(tmp_path / "two", *SHORT, *REWARDS, *SOURCES, "run.total_steps=1", "run.save_every=1")
    run(tmp_path / "two", *SHORT, *REWARDS, *SOURCES, "run.resume=auto")
    assert [row["reward/mean"] for row in rows(tmp_path / "two")] == full


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.train.reward=mixd",), "is 'mixd', which is not a reward"),
        (REWARDS, "reward.sums.mixed is set, but no reward or data source names mixed"),
        (SOURCES[:1], r"data.train.weight \(.*\) has no effect without other sources"),
        (SOURCES[1:], r"are \[None, 1.0\]: set all of them, or none"),
        (("data.train.reward=a", "data.train.reward_key=operations"), "remove one of them"),
        (("warm_start.data.reward=gsm8k_strict",), "data that is not sampled or scored"),
    ],
)
def test_wrong_selection_is_a_configuration_error(
    run: Run, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        run(tmp_path / "run", *overrides)


@pytest.mark.parametrize(
    ("selected", "message"),
    [
        ("gsm8k_flexible", None),
        (None, None),
        ("other", "the row's reward is 'other', which is not a reward"),
        ("os:system", "is the import path 'os:system', but must be a name"),
        (3, "must be text or null"),
    ],
)
def test_row_selects_its_reward_by_a_field(
    run: Run, tmp_path: Path, selected: object, message: str | None
) -> None:
    record = {"question": "2 + 2 =", "answer": "2 + 2 = 4\n#### 4", "check": selected}
    (tmp_path / "rows.jsonl").write_text(json.dumps(record) + "\n")
    source = f"+data.train_sets.rows={{paths: [{tmp_path}/rows.jsonl], reward_key: check}}"
    if message is None:
        run(tmp_path / "run", *SHORT, source)
        return
    with pytest.raises((ConfigError, DataError), match=message):
        run(tmp_path / "run", *SHORT, source)


ENVIRONMENTS = (
    (
        "+environments.tool={name: calculator, call_start: '', call_end: '=', answer_start: '', "
        "answer_end: '', max_turns: 3, max_observation_tokens: 8}"
    ),
    "+environments.short={name: calculator, call_end: '=', max_turns: 1}",
)
IN_ENVIRONMENTS = (
    "data.train.weight=1",
    "data.train.environment=tool",
    "+data.train_sets.short={name: arithmetic, max_rows: 8, weight: 1, environment: short}",
    "+data.train_sets.plain={name: arithmetic, max_rows: 8, seed: 5, weight: 2}",
)


def test_each_source_has_its_environment_with_its_limits_and_metrics(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(tmp_path / "run", *SHORT, *ENVIRONMENTS, *IN_ENVIRONMENTS, "sampling.max_tokens=24")
    for row in rows(tmp_path / "run"):
        # Of four prompts with four completions, one has each environment, and two have none.
        assert row["environment/tool/rollouts"] == row["environment/short/rollouts"] == 4
        assert row["environment/short/turns_mean"] == 1
        assert 1 <= row["environment/tool/turns_mean"] <= 3
        assert row["rollout/turns_mean"] == (row["environment/tool/turns_mean"] + 3) / 4
        assert row["environment/tool/failed"] == 0
        assert row["batch/trained_tokens"] == row["rollout/tokens"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.train.environment=tol",), r"tol, which is not in environments \(there are none\)"),
        (ENVIRONMENTS, "environments.tool is used by no data source"),
        (
            (*ENVIRONMENTS, *IN_ENVIRONMENTS[:3], "+environment.name=calculator"),
            "environment is set, but every data source names one",
        ),
        (
            ("+warm_start.data.environment=tool", *ENVIRONMENTS, *IN_ENVIRONMENTS),
            "data that is not sampled",
        ),
    ],
)
def test_environment_without_effect_is_refused(
    run: Run, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", "data.eval=null", *overrides)
