"""Helpers for small real runs: the quickstart with a tiny model and few problems."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from temper_trainer.config_loading import load, write_resolved
from temper_trainer.loops import RunResult, train

SMALL = (
    "experiment=quickstart",
    "actor.engine.model.architecture.hidden_size=32",
    "actor.engine.model.architecture.intermediate_size=64",
    "actor.engine.model.architecture.num_hidden_layers=2",
    "data.train.max_rows=64",
    "run.num_threads=1",
    "data.eval.max_rows=8",
    "warm_start.data.max_rows=128",
    "warm_start.total_steps=4",
    "warm_start.batch_size=16",
    "batching.prompts_per_step=4",
    "algorithm.group_size=4",
    # Completions of 27 tokens, as in the quickstart, take a quarter of such a run.
    "sampling.max_tokens=12",
    "run.total_steps=4",
    "run.table_every=0",
    # Drawing takes two fifths of such a short run. Tests of the report turn it on.
    "run.report=false",
    "reward.function=temper_trainer_test_rewards:share_of_digits",
)
CLOCKS = ("time", "weight_sync/time_s", "rollout/tokens_per_s")
METERS = ("memory/", "speed/")
"""Part of the names of what the machine says of itself."""

Rows = list[dict[str, float]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunResult]:
    """Train with these overrides on top of SMALL."""
    return make_run(monkeypatch)


def make_run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunResult]:
    """Return the function `run`, for a fixture of a module, whose tests share a run."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def start(directory: Path, *overrides: str, base: Sequence[str] = SMALL) -> RunResult:
        loaded = load([*base, f"run.dir={directory}", *overrides])
        return train(
            loaded.config,
            digest=loaded.digest,
            write_config=lambda folder: write_resolved(loaded, folder),
        )

    return start


@pytest.fixture
def rows() -> Callable[..., Rows]:
    """Return the logged rows of a phase without times and memory; every number must be finite."""

    def read(directory: Path, *, phase: str = "rl") -> Rows:
        parsed = [
            json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
        ]
        of_phase = [row for row in parsed if row["phase"] == phase]
        step_rows = [
            {
                k: v
                for k, v in row.items()
                if not k.startswith((*CLOCKS, "phase")) and not any(meter in k for meter in METERS)
            }
            for row in of_phase
        ]
        for row in step_rows:
            assert all(math.isfinite(value) for value in row.values()), row
        return step_rows

    return read
