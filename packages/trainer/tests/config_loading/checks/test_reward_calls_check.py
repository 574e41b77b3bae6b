"""`--check` calls the reward functions on the first row."""

import json
import sys
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load
from temper_trainer.config_loading.checks.reward_calls_check import check_reward_calls

REWARDS = """
import multiprocessing
import os
import re
import threading
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

def backtrack(prompt, text):
    re.match(r"(a+)+$", "a" * 60 + "b")  # takes years, and keeps the GIL

def crash(prompt, text):
    os._exit(3)

def run_program(prompt, text):
    program = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    program.start()
    program.join()
    return float(threading.current_thread() is not threading.main_thread())

unnamed = lambda prompt, text: 1.0

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


@pytest.mark.parametrize(
    ("name", "is_accepted"),
    [("gsm8k_strict", False), ("exact_match", True), ("rewards_of_check:echo", True)],
)
def test_warning_names_a_reward_that_rejects_the_reference_answer(
    settings: list[str], caplog: pytest.LogCaptureFixture, name: str, is_accepted: bool
) -> None:
    check_reward_calls(load([*settings, f"reward.function={name}"]).config)
    warning = f"data.train: the reference answer of the first row, '2', gets reward 0 from {name}: "
    assert (warning in caplog.text) != is_accepted
    assert bool(caplog.text) != is_accepted


def test_reward_that_asks_for_it_is_not_called(settings: list[str]) -> None:
    check_reward_calls(load([*settings, "reward.function=rewards_of_check:load_model"]).config)


@pytest.mark.parametrize("name", ["unnamed", "run_program"])
def test_function_that_only_the_driver_could_call_passes(settings: list[str], name: str) -> None:
    """Functions without a name cannot be pickled, and daemonic processes start no others."""
    check_reward_calls(load([*settings, f"reward.function=rewards_of_check:{name}"]).config)


def test_function_that_workers_cannot_import_is_refused_with_workers(settings: list[str]) -> None:
    overrides = ["reward.function=rewards_of_check:unnamed", "reward.num_workers=1"]
    with pytest.raises(ConfigError, match="cannot be sent to worker processes"):
        check_reward_calls(load([*settings, *overrides]).config)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_call_that_keeps_the_gil_is_ended(settings: list[str], num_workers: int) -> None:
    overrides = [
        "reward.function=rewards_of_check:backtrack",
        f"reward.num_workers={num_workers}",
    ]
    with pytest.raises(ConfigError, match=r"timeout: took longer than reward\.timeout_s") as caught:
        check_reward_calls(load([*settings, *overrides]).config)
    assert ("set reward.num_workers=1" in str(caught.value)) == (num_workers == 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fail", "exception: KeyError: '2' (prompt 0, {file}:1)\nTraceback"),
        ("leave", "exception: SystemExit: no API key (prompt 0, {file}:1)\nTraceback"),
        ("nothing", "not_finite: returned None (NoneType), but a reward is a finite number"),
        (
            "crash",
            "exception: the function ended its process with exit code 3 (prompt 0, {file}:1)",
        ),
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
