"""A rank is killed at a random moment while steps are saved one after the other: the last complete step loads, and is what was saved."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import pytest

SCRIPT = Path(__file__).with_name("saving_ranks.py")


class Trial(TypedDict):
    """What was found after a kill."""

    was_saving: bool
    before: int
    complete: list[int]
    loaded: list[int]
    digests: list[str]
    saved_digest: str
    exit_codes: list[int]


def kill_at(seeds: range, *, how: str, folder: Path) -> list[Trial]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), how, *map(str, seeds)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1100,
    )
    trials: list[Trial] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(trials) == len(seeds)
    return trials


def check(trial: Trial) -> None:
    assert trial["loaded"] == [trial["complete"][-1]] * 2
    assert trial["complete"][-1] >= trial["before"], "a step that was complete is gone"
    assert trial["digests"] == [trial["saved_digest"]] * 2
    assert trial["exit_codes"] == [0, 0]


@pytest.mark.slow
def test_a_killed_save_leaves_a_step_that_loads_in_another_layout(tmp_path: Path) -> None:
    for trial in kill_at(range(1), how="background", folder=tmp_path):
        check(trial)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", ["foreground", "background"])
def test_twenty_kills_at_random_moments_leave_a_step_that_loads_in_another_layout(
    tmp_path: Path, how: str
) -> None:
    trials = kill_at(range(100, 120), how=how, folder=tmp_path)
    for trial in trials:
        check(trial)
    assert sum(trial["was_saving"] for trial in trials) >= 5, (
        "hardly any kill struck a save: the moments are badly chosen"
    )
