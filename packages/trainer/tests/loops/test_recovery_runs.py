"""Random damage to the checkpoints of a real run: the resumed run logs what the uninterrupted one did."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_trainer.loops import RunResult

from .faults_for_tests import damage

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
NUM_STEPS = 3
SETTINGS = (
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.save_every=1",
    "run.max_ckpt_to_keep=null",
    f"run.total_steps={NUM_STEPS}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that the first test of this module trains in."""
    return tmp_path_factory.mktemp("uninterrupted") / "run"


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 40))]
)
def test_resumed_run_logs_the_metrics_of_the_uninterrupted_one(
    run: Run, rows: Rows, folder: Path, tmp_path: Path, seed: int
) -> None:
    if not folder.exists():
        run(folder, *SETTINGS)
    shutil.copytree(folder, tmp_path / "run")
    draw = random.Random(seed)
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in range(NUM_STEPS, draw.randrange(NUM_STEPS), -1):
        damage(checkpoints / f"step_{step:08d}", draw)
    run(tmp_path / "run", *SETTINGS, "run.resume=auto")
    assert rows(tmp_path / "run") == rows(folder)
    assert (checkpoints / f"step_{NUM_STEPS:08d}" / "manifest.json").is_file()


def test_damaged_model_of_the_warm_start_is_written_again_from_its_checkpoint(
    run: Run, tmp_path: Path
) -> None:
    short = ("data.eval=null", "run.save_model=false", "run.save_every=1", "run.total_steps=1")
    run(tmp_path / "run", *short)
    model = tmp_path / "run" / "warm_start" / "huggingface"
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-100])
    run(tmp_path / "run", *short, "run.resume=auto")
    assert (model / "model.safetensors").read_bytes() == content
    damaged = model.with_name("huggingface.damaged-1") / "model.safetensors"
    assert damaged.read_bytes() == content[:-100]
