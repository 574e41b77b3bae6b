"""`--check` calls the reward functions on the first row."""

import json
import sys
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load
from temper_trainer.config_loading.checks.reward_calls_check import check_reward_calls

REWARDS = """
import time

def echo(prompt, text):
    assert (prompt.text, prompt.answer, text) == ("1 + 1?", "2", "2")
    return 1.0

def fail(prompt, text):
    return {}[text]

def leave(prompt, text):
    raise SystemExit("no API key")

def nothing(prompt, text):
    pass

def hang(prompt, text):
    time.sleep(3600)

def load_model(prompt, text):
    raise MemoryError

load_model.call_in_check = False
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "rewards_of_check.py").write_text(REWARDS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    rows = [{"question": "1 + 1?", "answer": 2}, {"question": "unread", "answer": "3"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("experiment=quickstart", "warm_start=null", "~data.eval", "~data.train"),
        *("+data.train.name=jsonl", f"+data.train.paths=[{tmp_path}/rows.jsonl]"),
        "reward.timeout_s=0.5",
    ]


def test_reward_gets_the_first_row_with_its_answer_as_completion(settings: list[str]) -> None:
    check_reward_calls(load([*settings, "reward.function=rewards_of_check:echo"]).config)


def test_reward_that_asks_for_it_is_not_called(settings: list[str]) -> None:
    check_reward_calls(load([*settings, "reward.function=rewards_of_check:load_model"]).config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fail", "exception: KeyError: '2' (prompt 0, {file}:1)\nTraceback"),
        ("leave", "exception: SystemExit: no API key (prompt 0, {file}:1)\nTraceback"),
        ("nothing", "not_finite: returned None (NoneType), but a reward is a finite number"),
        ("hang", "timeout: took longer than reward.timeout_s = 0.5 (prompt 0, {file}:1)"),
    ],
)
def test_failure_is_reported_in_the_words_of_the_run(
    settings: list[str], tmp_path: Path, name: str, message: str
) -> None:
    config = load([*settings, f"reward.function=rewards_of_check:{name}"]).config
    with pytest.raises(ConfigError) as caught:
        check_reward_calls(config)
    expected = message.format(file=tmp_path / "rows.jsonl")
    assert f"data.train: the reward rewards_of_check:{name} of the first row" in str(caught.value)
    assert expected in str(caught.value)
