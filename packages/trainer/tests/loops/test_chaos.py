"""Runs that are killed at random moments: no checkpoint is lost, nothing ends silently, and the numbers are those of a whole run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_trainer.checkpoint.save import Checkpointer
from temper_trainer.loops import RunResult

from .conftest import SMALL

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]

NUM_RUNS = 30
STEPS = 6
LEAN = (
    *SMALL,
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    f"run.total_steps={STEPS}",
    "run.save_every=1",
    "sampling.max_tokens=8",
    "run.progress=false",
)


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """A run in a process group of its own."""
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "temper_trainer", *LEAN, f"run.dir={folder}", "run.resume=auto", *overrides]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def last_step(folder: Path) -> int:
    """Of the last complete checkpoint, all checksums compared."""
    checkpointer = Checkpointer(root=folder / "checkpoints", max_to_keep=None)
    found = checkpointer.find("auto")
    return 0 if found is None else checkpointer.read_state(found, phase="rl").step


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3600)
def test_thirty_runs_with_random_kills_lose_no_checkpoint_and_never_end_silently(run: Run, rows: Rows, tmp_path: Path) -> None:
    begin = time.monotonic()
    whole = start(tmp_path / "whole")
    assert whole.wait() == 0
    length_s = time.monotonic() - begin
    choose, kills = random.Random(0), 0
    for number in range(NUM_RUNS):
        folder, reached, code = tmp_path / f"run-{number}", 0, -1
        while code != 0:
            # Every second run saves while it goes on.
            process = start(folder, f"run.save_in_background={str(number % 2 == 1).lower()}")
            # The second half of a run's time holds its steps; a run that is nearly done may be left alone.
            moment = choose.uniform(0.3, 1.3) * length_s if kills <= number else 2 * length_s + 60
            try:
                code = process.wait(timeout=moment)
                assert code == 0, (tmp_path / f"{folder.name}.log").read_text()[-3000:]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
            now = last_step(folder)
            assert now >= reached, "a checkpoint was lost"
            reached = now
        assert reached == STEPS, "a run ended with exit code 0 before its planned steps"
        assert rows(folder) == rows(tmp_path / "whole")
    assert kills >= NUM_RUNS // 2
