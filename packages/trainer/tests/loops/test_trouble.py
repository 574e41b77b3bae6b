"""Trouble from outside, on the real program in a process of its own: Ctrl-C, kill, a disk that is full."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = (sys.executable, "-m", "temper_trainer", "experiment=quickstart", "run.num_threads=1", "run.table_every=0", "data.eval=null")
SMALL = (
    "actor.engine.model.architecture.hidden_size=32",
    "actor.engine.model.architecture.intermediate_size=64",
    "actor.engine.model.architecture.num_hidden_layers=2",
    "data.train.max_rows=64",
    "warm_start=null",
    "batching.prompts_per_step=4",
    "algorithm.group_size=4",
    "reward.function=temper_trainer_test_rewards:waits",
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "TEMPER_TEST_MARKER": str(tmp_path / "marker"),
        "OMP_NUM_THREADS": "1",
    }


def start(environment: dict[str, str], directory: Path, *overrides: str, **more: object) -> "subprocess.Popen[str]":
    command = [*PROGRAM, *SMALL, f"run.dir={directory}", *overrides]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload,no-any-return]


def finish(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    with process:
        output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def wait_for_step(directory: Path, *, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        metrics = directory / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().count("\n") >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[1]}")


def steps_of(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_ctrl_c_finishes_the_step_saves_it_and_says_how_to_go_on(environment: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(environment, run, "run.total_steps=1000")
    wait_for_step(run, step=2, process=process)
    process.send_signal(signal.SIGINT)
    stopped = finish(process)
    assert stopped.returncode == 130, stopped.stderr
    (saved,) = steps_of(run)
    assert "run.resume=auto" in stopped.stderr
    step = int(saved.removeprefix("step_"))
    again = start(environment, run, f"run.total_steps={step + 1}", "run.resume=auto", "run.save_model=false")
    done = finish(again)
    assert done.returncode == 0, done.stderr
    assert steps_of(run) == [saved, f"step_{step + 1:08d}"]


def test_a_killed_run_goes_on_from_its_last_complete_checkpoint(environment: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(environment, run, "run.total_steps=1000", "run.save_every=1")
    wait_for_step(run, step=3, process=process)
    process.kill()
    finish(process)
    complete = [name for name in steps_of(run) if name.startswith("step_")]
    last = int(complete[-1].removeprefix("step_"))
    again = start(environment, run, f"run.total_steps={last + 1}", "run.resume=auto", "run.save_model=false")
    done = finish(again)
    assert done.returncode == 0, done.stderr
    assert f"going on from step {last} " in done.stdout


def test_a_full_disk_while_saving_keeps_the_earlier_checkpoint(environment: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = finish(start(environment, run, "run.total_steps=1", "run.save_model=false"))
    assert first.returncode == 0, first.stderr

    def small_files_only() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # a write beyond fails with EFBIG, as on a full disk

    second = finish(start(environment, run, "run.total_steps=2", "run.resume=auto", preexec_fn=small_files_only))
    assert second.returncode == 1, second.stderr
    assert "step 2 could not be saved" in second.stderr
    saved = run / "checkpoints" / "step_00000001"
    assert f"step 1 is saved in {saved}: continue with run.resume=auto." in second.stderr
    assert steps_of(run) == ["step_00000001"]
    third = finish(start(environment, run, "run.total_steps=2", "run.resume=auto", "run.save_model=false"))
    assert third.returncode == 0, third.stderr
    assert steps_of(run) == ["step_00000001", "step_00000002"]
