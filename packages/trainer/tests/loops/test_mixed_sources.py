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
        (SOURCES[:1], "data.train.weight has no effect without data.train_sets"),
        (SOURCES[1:], r"are \[None, 1.0\]: set all of them, or none"),
        (("data.train.reward=a", "data.train.reward_key=operations"), "remove one of them"),
        (("warm_start.data.reward=gsm8k_strict",), "completions are not scored"),
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
