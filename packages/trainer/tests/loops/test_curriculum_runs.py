"""Runs whose epochs go from easy to hard rows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.loops import RunResult

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
SORTED = ("data.train.difficulty_key=operations", "data.eval=null", "run.save_model=false")


def test_rl_trains_on_easy_prompts_first_and_resumes_in_the_order(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    # Four steps of four prompts are one epoch.
    shared = (
        *SORTED,
        "warm_start=null",
        "data.train.max_rows=16",
        "data.shuffled_fraction=0.25",
        "run.save_every=1",
    )
    run(tmp_path / "full", *shared, "run.total_steps=4")
    run(tmp_path / "part", *shared, "run.total_steps=2")
    run(tmp_path / "part", *shared, "run.total_steps=4", "run.resume=auto")
    full, resumed = (
        [row["data/difficulty"] for row in rows(tmp_path / name)] for name in ("full", "part")
    )
    assert full == resumed
    assert full[0] < full[-1]


def test_warm_start_sorts_its_own_demonstrations(run: Run, rows: Rows, tmp_path: Path) -> None:
    run(
        tmp_path / "run",
        *SORTED[1:],
        "warm_start.data.difficulty_key=operations",
        "run.total_steps=1",
    )
    warm = [row["data/difficulty"] for row in rows(tmp_path / "run", phase="warm_start")]
    assert warm[0] == 1.0
    assert max(warm) > 1.0
    (rl,) = rows(tmp_path / "run")
    assert "data/difficulty" not in rl, "its own source has no difficulty"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("+data.train_sets.other={name: arithmetic, max_rows: 16, seed: 5}",),
            "data.train_sets.other.difficulty_key is not set, but that of another training source",
        ),
        (
            ("task=sft", "data.streaming=true"),
            "data.streaming is true, but data.train.difficulty_key sorts all rows",
        ),
        (("data.shuffled_fraction=1.5",), "shuffled_fraction is 1.5"),
    ],
)
def test_order_that_cannot_be_made_is_refused(
    run: Run, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", *SORTED, *overrides)
