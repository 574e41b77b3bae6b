"""Runs that are killed at random moments: no checkpoint is lost, nothing ends silently, and the numbers are those of a whole run."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from temper_trainer.checkpoint.save import Checkpointer

from .conftest import SMALL

logger = logging.getLogger(__name__)

Rows = Callable[..., list[dict[str, float]]]

NUM_RUNS = 30
RUNS_PER_TEST = 5
KILLS_PER_RUN = 2
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


@dataclass(frozen=True, slots=True)
class Whole:
    """A run that nobody disturbs."""

    folder: Path
    length_s: float


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder, begin = tmp_path_factory.mktemp("chaos") / "whole", time.monotonic()
    assert start(folder).wait() == 0
    return Whole(folder=folder, length_s=time.monotonic() - begin)


def wait_for_step(process: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    """Until a step is logged, or the process has ended; step 0 is the begin of the first one.

    By steps and not by the clock, because a run's length is that of its start and of what else the machine does.
    """
    sign = folder / ("metrics.jsonl" if step else "config.yaml")
    while process.poll() is None and not (sign.exists() and (step == 0 or f'"step": {step},' in sign.read_text())):
        time.sleep(0.02)


def run_with_kills(folder: Path, whole: Whole, *, seed: int) -> int:
    """One run, started again after every kill until it ends by itself; returns how often it was killed."""
    choose, reached, kills, code = random.Random(seed), 0, 0, -1
    while code != 0:
        # Every second run saves while it goes on.
        process = start(folder, f"run.save_in_background={str(seed % 2 == 1).lower()}")
        if kills < KILLS_PER_RUN:
            wait_for_step(process, folder, choose.randint(min(reached, STEPS - 1), STEPS - 1))
        try:
            # About as long as a step and its save take.
            code = process.wait(timeout=choose.uniform(0, 1) if kills < KILLS_PER_RUN else 10 * whole.length_s + 60)
            assert code == 0, (folder.parent / f"{folder.name}.log").read_text()[-3000:]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            assert kills <= KILLS_PER_RUN, "the run hangs"
        now = last_step(folder)
        assert now >= reached, "a checkpoint was lost"
        reached = now
    assert reached == STEPS, "a run ended with exit code 0 before its planned steps"
    return kills


# In parts, so that each fits into a sitting; their numbers are the seeds.
@pytest.mark.bitwise
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, NUM_RUNS, RUNS_PER_TEST))
def test_runs_with_random_kills_lose_no_checkpoint_and_never_end_silently(whole: Whole, rows: Rows, tmp_path: Path, first: int) -> None:
    kills = 0
    for seed in range(first, first + RUNS_PER_TEST):
        folder = tmp_path / f"run-{seed}"
        kills += run_with_kills(folder, whole, seed=seed)
        assert rows(folder) == rows(whole.folder)
    logger.info("%d kills in the runs from %d on", kills, first)
    assert kills >= RUNS_PER_TEST
