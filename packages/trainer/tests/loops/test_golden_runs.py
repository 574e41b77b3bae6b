"""Resume the checkpoint of a released version, and compare with its own next steps."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_trainer.loops import RunResult

GOLDEN = sorted(
    path.parent for path in (Path(__file__).parents[1] / "golden_runs").glob("*/overrides.json")
)


@pytest.mark.skipif(
    not GOLDEN,
    reason="no version is released yet whose run could be kept; the first release brings it",
)
@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_run_of_a_released_version_resumes(
    run: Callable[..., RunResult],
    rows: Callable[..., list[dict[str, float]]],
    folder: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    written = rows(folder / "run")
    run(
        tmp_path / "run",
        "run.resume=auto",
        base=json.loads((folder / "overrides.json").read_text()),
    )
    step_rows = rows(tmp_path / "run")
    assert [row["step"] for row in step_rows] == [1, 2]
    assert step_rows[0] == written[0], (
        "the first step is that of the released version, and was not made again"
    )
    went_on = {
        name: (value, step_rows[1][name]) for name, value in written[1].items() if name in PROMISED
    }
    assert went_on == {
        name: (value, pytest.approx(value, rel=1e-3)) for name, (value, _) in went_on.items()
    }
    assert went_on.keys() == PROMISED


PROMISED = {"weight_sync/version", "reward/mean", "actor/loss", "actor/grad_norm"}
"""Metrics of the second step that depend on saved weights, moments, data position or seeds."""
