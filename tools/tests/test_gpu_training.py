"""Runs on GPUs: the same command continues them, and pages and engines have the right settings."""

import json
import sys
from pathlib import Path

import pytest

from temper_engine_api.specs import ModelSpec
from temper_trainer.config_loading import load
from tools.gpu import float8_engine
from tools.gpu.train_arithmetic import (
    VLLM_RUNS,
    find_working_times,
    list_evaluation_overrides,
    list_overrides,
    run_within_limit,
    summarize,
)
from tools.gpu.trainer_vllm import run_job, summarize_metrics
from tools.gpu.workload import Rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "train_gpu.md"
LINES = [
    {"step": 1, "phase": "rl", "time_s": 100.0, "time/step_s": 9.0, "batch/trained_tokens": 50},
    {"step": 2, "phase": "rl", "time_s": 104.0, "time/step_s": 3.0, "batch/trained_tokens": 60},
    {"step": 3, "phase": "rl", "time_s": 110.0, "time/step_s": 5.0, "batch/trained_tokens": 90},
    {"step": 4, "phase": "rl", "time_s": 120.0, "time/step_s": 10.0, "batch/trained_tokens": 30},
]
SAVES_WHEN_STOPPED = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
time.sleep(60)
"""
IGNORES_STOP = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""


def write_interrupted_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    return metrics


def test_training_continues_in_the_folder_of_an_interrupted_one(tmp_path: Path) -> None:
    write_interrupted_run(tmp_path / "grpo")
    overrides = list_overrides(
        "grpo", out=tmp_path, rehearse=True, rollout_python=sys.executable, steps=2
    )
    config = load(overrides).config
    assert config.run.resume == "auto"
    # A second part of ten minutes must find a checkpoint if the machine of the first one was lost.
    assert config.run.save_interval_s == 120
    (tmp_path / "sft" / "huggingface").mkdir(parents=True)
    write_interrupted_run(tmp_path / "sft-eval")
    assert "run.resume=auto" in list_evaluation_overrides("sft", out=tmp_path, rehearse=True)


def test_run_that_reaches_its_limit_may_save(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    command = [sys.executable, "-S", "-c", SAVES_WHEN_STOPPED, str(saved)]
    code = run_within_limit(command, log=tmp_path / "log.txt", limit_s=65.0, stop_s=60.0)
    assert code == "stopped after 5 s"
    assert saved.read_text() == "saved"


def test_run_that_does_not_stop_is_killed_at_its_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", IGNORES_STOP]
    code = run_within_limit(command, log=tmp_path / "log.txt", limit_s=4.0, stop_s=1.0)
    assert code == "killed after 4 s"


def test_time_between_two_parts_is_left_out_of_curves() -> None:
    # The part that started at 900 continues after step 2.
    starts = [90.0, 900.0]
    assert find_working_times([100.0, 104.0, 910.0, 920.0], starts=starts) == [
        100.0,
        104.0,
        114.0,
        124.0,
    ]


def test_row_of_a_learning_curve_has_means_without_the_first_step(tmp_path: Path) -> None:
    row = summarize(write_interrupted_run(tmp_path / "run"))
    assert row["steps"] == 4
    assert row["time/step_s"] == 5.0
    assert row["time/step_s, mean"] == 6.0


def test_row_of_a_job_has_the_rate_between_the_first_and_the_last_step(tmp_path: Path) -> None:
    row = summarize_metrics(write_interrupted_run(tmp_path / "run"))
    # 180 tokens in 20 s, in three steps.
    assert row["trained_tokens_per_s"] == 9.0
    assert row["s_per_step"] == pytest.approx(20 / 3, abs=1e-5)


def test_job_starts_again_next_to_the_folder_of_an_interrupted_one(tmp_path: Path) -> None:
    write_interrupted_run(tmp_path / "colocated-0.5B")
    rows = Rows(path=tmp_path / "rows.jsonl")
    run_job(
        rows,
        "colocated",
        ["0"],
        shape="0.5B",
        settings=["no_such_setting=1"],
        out=tmp_path,
        limit_s=120.0,
        more=[],
    )
    (row,) = rows.read()
    # A job that continued would warm up twice, and its medians would include that.
    assert row["steps"] == 0
    earlier = tmp_path / "colocated-0.5B.superseded-1" / "metrics.jsonl"
    assert len(earlier.read_text().splitlines()) == len(LINES)


@pytest.mark.parametrize("name", ["long-sync", "long-async"])
def test_page_has_the_settings_of_the_long_runs(name: str) -> None:
    block = PAGE.read_text().partition("```text\n")[2].partition("```")[0]
    *lines, only_async = block.splitlines()
    lines += [only_async.partition("#")[0]] if name == "long-async" else []
    # `long-async` starts from the warm start of the other run.
    on_page = {
        word
        for line in lines
        for word in line.split()
        if name == "long-sync" or not word.startswith("warm_start.")
    }
    settings = list_overrides(
        name, out=Path("runs"), rehearse=False, rollout_python="python", steps=100
    )
    assert on_page <= set(settings)
    assert set(VLLM_RUNS[name]) & set(settings) <= on_page


def test_engines_for_the_kit_multiply_in_float8_by_default() -> None:
    model = ModelSpec(path="model")
    rowwise = float8_engine.Float8Config(model=model)
    tensorwise = float8_engine.TensorwiseConfig(model=model)
    assert float8_engine.Float8Engine.config_class is type(rowwise)
    assert float8_engine.TensorwiseEngine.config_class is type(tensorwise)
    assert (rowwise.float8, tensorwise.float8) == ("rowwise", "tensorwise")
