from pathlib import Path

import pytest
from rich.console import Console

from temper_trainer.checkpoint.checkpoint_messages import describe_policy
from temper_trainer.config.run import RunConfig
from temper_trainer.loops.run.run_folder import RunFolder
from temper_trainer.loops.run.step_boundary import StepBoundary
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.run_lock import RunLock


def saved_steps(
    run: RunConfig, *, folder: Path, step_s: float, save_s: float, num_steps: int
) -> list[int]:
    """Return the steps after which a run saves, given the time of its steps and saves."""
    clock, saved = [0.0], []
    log = RunLog(folder, trackers=(), progress=False, console=Console(quiet=True))
    boundary = StepBoundary(
        run=run, folder=RunFolder(folder), lock=RunLock(folder), log=log, now=lambda: clock[0]
    )
    for step in range(1, num_steps + 1):
        clock[0] += step_s
        if boundary.is_save_due(step, is_last=step == num_steps):
            clock[0] += save_s
            saved.append(step)
            boundary.set_saved(step, folder)
    return saved


def test_first_step_that_ends_after_the_interval_saves(tmp_path: Path) -> None:
    # Steps of 6 minutes: 18 minutes are the first end after 15; the save's 10 minutes do not count.
    assert saved_steps(RunConfig(), folder=tmp_path, step_s=360, save_s=600, num_steps=10) == [
        3,
        6,
        9,
        10,
    ]


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        (RunConfig(save_interval_s=None), [5]),
        (RunConfig(save_interval_s=None, save_every=2), [2, 4, 5]),
        (
            RunConfig(save_interval_s=180.0, save_every=2),
            [2, 4, 5],
        ),  # every save begins a new interval of 3 steps
    ],
)
def test_save_every_and_save_interval_apply_independently(
    run: RunConfig, steps: list[int], tmp_path: Path
) -> None:
    assert saved_steps(run, folder=tmp_path, step_s=60, save_s=0, num_steps=5) == steps


def test_policy_describes_when_a_run_saves() -> None:
    assert describe_policy(RunConfig()).startswith(
        "checkpoints: saved every 15 min and at the end; "
    )
    both = RunConfig(save_every=10, save_interval_s=120.0)
    assert describe_policy(both).startswith(
        "checkpoints: saved every 2 min, every 10 steps and at the end; "
    )
    assert describe_policy(RunConfig(save_interval_s=None)).startswith(
        "checkpoints: saved at the end; "
    )
