"""Test that the last complete step loads in another layout after a rank is killed while saving."""

from pathlib import Path

import pytest

from temper_engine_api.conformance.harness.killed_saves import SaveMode, check_trial, run_trials

SAVE_FIELDS, LOAD_FIELDS = {"tensor_parallel": 2}, {"pipeline_parallel": 2}


# Nightly: engine-fsdp kills ranks in saves of the same code of engine-api.
@pytest.mark.nightly
@pytest.mark.slow
def test_killed_save_leaves_a_step_that_loads_in_another_layout(tmp_path: Path) -> None:
    for trial in run_trials(
        engine="megatron",
        seeds=range(1),
        how="background",
        folder=tmp_path,
        save_fields=SAVE_FIELDS,
        load_fields=LOAD_FIELDS,
    ):
        check_trial(trial)


# Nightly: forty saves with a killed rank take minutes.
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", ["foreground", "background"])
def test_twenty_kills_at_random_moments_leave_a_step_that_loads_in_another_layout(
    tmp_path: Path, how: SaveMode
) -> None:
    trials = run_trials(
        engine="megatron",
        seeds=range(100, 120),
        how=how,
        folder=tmp_path,
        save_fields=SAVE_FIELDS,
        load_fields=LOAD_FIELDS,
    )
    for trial in trials:
        check_trial(trial)
    assert sum(trial.was_saving for trial in trials) >= 5, (
        "hardly any kill hit a save: the moments are badly chosen"
    )
