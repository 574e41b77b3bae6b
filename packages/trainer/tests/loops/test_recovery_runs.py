"""Random damage to the checkpoints of a real run: the resumed run logs what the uninterrupted one did."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_trainer.loops import RunResult

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


def damage(checkpoint: Path, draw: random.Random) -> None:
    """Do to a checkpoint one of the things that disks, kills and people do."""
    victim = draw.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    content = victim.read_bytes()
    match draw.choice(["flip", "cut", "empty", "delete", "garbage", "no manifest", "nothing"]):
        case "flip":
            position = draw.randrange(len(content))
            victim.write_bytes(content[:position] + bytes([content[position] ^ 1 << draw.randrange(8)]) + content[position + 1 :])
        case "cut":
            victim.write_bytes(content[: draw.randrange(len(content))])
        case "empty":
            victim.write_bytes(b"")
        case "delete":
            victim.unlink()
        case "garbage":
            victim.write_bytes(draw.randbytes(len(content)))
        case "no manifest":
            (checkpoint / "manifest.json").unlink()
        case "nothing":
            shutil.rmtree(checkpoint)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 40))])
def test_a_resumed_run_logs_the_numbers_of_the_uninterrupted_one(run: Run, rows: Rows, folder: Path, tmp_path: Path, seed: int) -> None:
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
