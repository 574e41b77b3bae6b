"""Test that the last complete step loads after a rank is killed while saving."""

from pathlib import Path

import pytest

from temper_engine_api.conformance.harness.killed_saves import SaveMode, check_trial, run_trials

FIELDS = {"save_huggingface_weights": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "num_kills"),
    [
        # Nightly: the conformance kit kills ranks in foreground saves, and the trainer's tests of
        # recovery kill runs that save in the background.
        pytest.param("foreground", 1, marks=pytest.mark.nightly),
        pytest.param("background", 2, marks=pytest.mark.nightly),
    ],
)
def test_killed_save_leaves_a_step_that_loads(
    tmp_path: Path, how: SaveMode, num_kills: int
) -> None:
    for trial in run_trials(
        engine="fsdp",
        seeds=range(num_kills),
        how=how,
        folder=tmp_path,
        save_fields=FIELDS,
        load_fields=FIELDS,
    ):
        check_trial(trial)


# Nightly: forty saves with a killed rank take minutes; see above for the kills of every day.
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", ["foreground", "background"])
def test_twenty_kills_at_random_moments_leave_a_step_that_loads(
    tmp_path: Path, how: SaveMode
) -> None:
    trials = run_trials(
        engine="fsdp",
        seeds=range(100, 120),
        how=how,
        folder=tmp_path,
        save_fields=FIELDS,
        load_fields=FIELDS,
    )
    for trial in trials:
        check_trial(trial)
    assert sum(trial.was_saving for trial in trials) >= 5, (
        "hardly any kill hit a save: the moments are badly chosen"
    )
