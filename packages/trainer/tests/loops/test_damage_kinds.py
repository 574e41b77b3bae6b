"""Resume a run after each kind of damage to its folder: it ends as if nothing had happened."""

import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_trainer.loops import RunResult

pytestmark = [
    # Nightly: makes a run for each kind of damage. test_recovery_runs.py draws three every day.
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform == "win32", reason="needs links, pipes and sockets"),
]

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
SETTINGS = (
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.save_every=1",
    "run.max_ckpt_to_keep=null",
    "run.total_steps=4",
)
BYTES = bytes(range(256)) * 12


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def flip(path: Path) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def replace_by_empty_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x\n")


def replace_by_link(path: Path) -> None:
    moved = path.parents[2] / "moved"
    path.rename(moved)
    path.symlink_to(moved)


def replace_by_link_to_damage(path: Path) -> None:
    cut(path / "trainer" / "state.json")
    replace_by_link(path)


def add_socket(path: Path) -> None:
    folder = os.getcwd()
    os.chdir(path.parent)  # because the path of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(folder)


def add_partial_save(path: Path) -> None:
    partial = path.with_name(f".{path.name}.0a0b0c.partial")
    shutil.copytree(path.with_name("step_00000003"), partial)
    (partial / ".temper-partial").touch()


def damage_copy(path: Path) -> None:
    copy = path.with_name("step_000000003")
    shutil.copytree(path, copy)
    cut(copy / "trainer" / "state.json")


def damage_all(checkpoints: Path) -> None:
    for step in checkpoints.iterdir():
        cut(step / "trainer" / "state.json")


def remove_all_manifests(checkpoints: Path) -> None:
    for manifest in checkpoints.glob("*/manifest.json"):
        manifest.unlink()


def overwrite_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(BYTES)


NEWEST = "checkpoints/step_00000003"
WEIGHTS = f"{NEWEST}/actor/dcp/__0_0.distcp"
PROGRESS = f"{NEWEST}/actor/progress.json"
MANIFEST = f"{NEWEST}/manifest.json"
LATER = "checkpoints/step_00000009"
KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (cut, WEIGHTS),
    "flipped bit of weights": (flip, WEIGHTS),
    "weights are a folder": (replace_by_folder, WEIGHTS),
    "no weights": (shutil.rmtree, f"{NEWEST}/actor/dcp"),
    "no random state": (Path.unlink, f"{NEWEST}/actor/random/rank_0.pt"),
    "progress is a pipe": (replace_by_pipe, PROGRESS),
    "progress is a link to itself": (replace_by_loop, PROGRESS),
    "no state of the trainer": (shutil.rmtree, f"{NEWEST}/trainer"),
    "no manifest": (Path.unlink, MANIFEST),
    "manifest is a folder": (replace_by_folder, MANIFEST),
    "manifest is a pipe": (replace_by_pipe, MANIFEST),
    "manifest is a list": (lambda path: path.write_text("[]"), MANIFEST),
    "manifest is empty": (lambda path: path.write_text(""), MANIFEST),
    "manifest is nested deeply": (lambda path: path.write_text("[" * 100_000), MANIFEST),
    "added file": (lambda path: path.write_text("x"), f"{NEWEST}/actor/added"),
    "step is an empty folder": (replace_by_empty_folder, NEWEST),
    "step is a file": (replace_by_file, NEWEST),
    "step is a link": (replace_by_link, NEWEST),
    "step is a link to a damaged one": (replace_by_link_to_damage, NEWEST),
    "step has a later number": (lambda path: path.rename(path.with_name("step_00000044")), NEWEST),
    "damaged copy": (damage_copy, NEWEST),
    "later empty folder": (Path.mkdir, LATER),
    "later file": (Path.touch, LATER),
    "later socket": (add_socket, LATER),
    "later link to nothing": (lambda path: path.symlink_to("/no/step"), LATER),
    "later link to itself": (lambda path: path.symlink_to(path.name), LATER),
    "unfinished save": (add_partial_save, LATER),
    "huge number": (Path.mkdir, "checkpoints/step_" + "9" * 30),
    "all steps damaged": (damage_all, "checkpoints"),
    "no step has a manifest": (remove_all_manifests, "checkpoints"),
    "no config.yaml": (Path.unlink, "config.yaml"),
    "binary config.yaml": (lambda path: path.write_bytes(BYTES), "config.yaml"),
    "no tokenizer": (shutil.rmtree, "tokenizer"),
    "flipped bit of the tokenizer": (flip, "tokenizer/tokenizer.json"),
    "empty metrics": (lambda path: path.write_text(""), "metrics.jsonl"),
    "binary metrics": (lambda path: path.write_bytes(BYTES), "metrics.jsonl"),
    "cut metrics": (cut, "metrics.jsonl"),
    "binary timeline": (lambda path: path.write_bytes(BYTES), "timeline.jsonl"),
    "binary samples": (lambda path: path.write_bytes(BYTES), "samples.jsonl"),
    "binary rollouts": (lambda path: path.write_bytes(BYTES), "rollouts.jsonl"),
    "binary starts": (lambda path: path.write_bytes(BYTES), "starts.jsonl"),
    "empty run_id": (lambda path: path.write_text(""), "run_id"),
    "binary TensorBoard": (overwrite_all, "tensorboard"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that the first test of this module trains in."""
    return tmp_path_factory.mktemp("undamaged") / "run"


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_run_ends_with_the_numbers_of_the_undamaged_one(
    run: Run, rows: Rows, folder: Path, tmp_path: Path, kind: str
) -> None:
    if not folder.exists():
        run(folder, *SETTINGS)
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000004")  # the run was killed before this save
    apply, name = KINDS[kind]
    apply(copy / name)
    run(copy, *SETTINGS, "run.resume=auto")
    assert rows(copy)[-1] == rows(folder)[-1]
    assert (copy / "checkpoints" / "step_00000004" / "manifest.json").is_file()
