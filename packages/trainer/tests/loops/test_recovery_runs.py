"""Damage checkpoints of a real run at random, resume, and compare with an uninterrupted run."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.errors import CapabilityError, CheckpointError
from temper_trainer.data.rows import DataError
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
    # Nightly: three of forty seeds run every day.
    "seed",
    [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 40))],
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


SHORT = ("data.eval=null", "run.save_model=false", "run.save_every=1", "run.total_steps=1")


@pytest.fixture(scope="module")
def warm_started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that the first test with a warm start trains in."""
    return tmp_path_factory.mktemp("warm_started") / "run"


@pytest.mark.parametrize(
    ("name", "num_lost_bytes"),
    [("model.safetensors", 100), ("config.json", None), ("tokenizer_config.json", 3)],
)
def test_damaged_model_of_the_warm_start_is_written_again_from_its_checkpoint(
    run: Run, warm_started: Path, tmp_path: Path, name: str, num_lost_bytes: int | None
) -> None:
    if not warm_started.exists():
        run(warm_started, *SHORT)
    shutil.copytree(warm_started, tmp_path / "run")
    model = tmp_path / "run" / "warm_start" / "huggingface"
    content = (model / name).read_bytes()
    damaged_content = b"" if num_lost_bytes is None else content[:-num_lost_bytes]
    (model / name).write_bytes(damaged_content)
    run(tmp_path / "run", *SHORT, "run.resume=auto")
    assert (model / name).read_bytes() == content
    assert (model.with_name("huggingface.damaged-1") / name).read_bytes() == damaged_content


def test_model_of_the_warm_start_without_a_config_is_written_again(
    run: Run, warm_started: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not warm_started.exists():
        run(warm_started, *SHORT)
    shutil.copytree(warm_started, tmp_path / "run")
    model = tmp_path / "run" / "warm_start" / "huggingface"
    content = (model / "config.json").read_bytes()
    (model / "config.json").unlink()
    run(tmp_path / "run", *SHORT, "run.resume=auto")
    assert (model / "config.json").read_bytes() == content
    assert (
        f"the model of the warm start is damaged ({model / 'config.json'} is not there): renamed "
        "to huggingface.damaged-1" in capsys.readouterr().out
    )


@pytest.mark.parametrize(("name", "num_lost_bytes"), [("model.safetensors", 100), ("", 0)])
def test_damaged_final_model_is_renamed_and_written_again(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, num_lost_bytes: int
) -> None:
    settings = ("warm_start=null", "data.eval=null", "run.total_steps=1")
    run(tmp_path / "run", *settings)
    model = tmp_path / "run" / "huggingface"
    content = (model / "model.safetensors").read_bytes()
    if name:
        (model / name).write_bytes(content[:-num_lost_bytes])
    else:  # a folder that Temper did not write
        shutil.rmtree(model)
        model.mkdir()
        (model / "notes.txt").write_text("mine")
    # What a process that was killed during the export leaves.
    shutil.copytree(model, model.with_name(".huggingface.partial"))
    damaged = {path.name: path.read_bytes() for path in model.iterdir()}
    run(tmp_path / "run", *settings, "run.resume=auto")
    assert (model / "model.safetensors").read_bytes() == content
    kept = model.with_name("huggingface.damaged-1")
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == damaged
    assert not model.with_name(".huggingface.partial").exists()
    assert "renamed to huggingface.damaged-1, and written again" in caplog.text


def test_run_that_resumes_from_another_runs_checkpoint_repeats_no_warm_start(
    run: Run, rows: Rows, warm_started: Path, tmp_path: Path
) -> None:
    if not warm_started.exists():
        run(warm_started, *SHORT)
    shutil.copytree(warm_started, tmp_path / "same")
    two_steps = (*SHORT[:-1], "run.total_steps=2")
    run(tmp_path / "same", *two_steps, "run.resume=auto")
    checkpoint = warm_started / "checkpoints" / "step_00000001"
    run(tmp_path / "other", *two_steps, f"run.resume={checkpoint}")
    assert rows(tmp_path / "other", phase="warm_start") == []
    assert rows(tmp_path / "other") == rows(tmp_path / "same")[1:]


ONE_STEP = ("warm_start=null", "data.eval=null", "run.save_model=false")


def read_vocabulary(folder: Path) -> object:
    return json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]


def test_resumed_run_keeps_its_tokenizer_when_the_training_data_change(
    run: Run, tmp_path: Path
) -> None:
    run(tmp_path / "run", *ONE_STEP, "run.total_steps=1", "data.train.max_rows=64")
    vocabulary = read_vocabulary(tmp_path / "run")
    more = (*ONE_STEP, "run.total_steps=2", "run.resume=auto")
    # Half of the texts have fewer words, on which a new tokenizer would have fewer entries.
    run(tmp_path / "run", *more, "data.train.max_rows=8")
    assert read_vocabulary(tmp_path / "run") == vocabulary
    last = tmp_path / "run" / "checkpoints" / "step_00000002"
    resume = (*ONE_STEP, "run.total_steps=3", f"run.resume={last}")
    run(tmp_path / "other", *resume, "data.train.max_rows=8")
    assert read_vocabulary(tmp_path / "other") == vocabulary


def test_training_data_with_words_that_the_tokenizer_lacks_are_refused_on_resume(
    run: Run, tmp_path: Path
) -> None:
    # With this vocabulary size, the model would accept the ids of another tokenizer.
    size = "actor.engine.model.architecture.vocab_size=200"
    settings = (*ONE_STEP, size, "run.resume=auto")
    run(tmp_path / "run", *settings, "run.total_steps=1", "data.train.max_rows=8")
    vocabulary = read_vocabulary(tmp_path / "run")
    with pytest.raises(DataError, match=r"run/tokenizer was trained on other texts .* run\.dir"):
        run(tmp_path / "run", *settings, "run.total_steps=2", "data.train.max_rows=64")
    assert read_vocabulary(tmp_path / "run") == vocabulary


@pytest.mark.parametrize("damaged", [None, "[" * 100_000], ids=["cut", "depth"])
def test_damaged_tokenizer_is_renamed_and_trained_again(
    run: Run, tmp_path: Path, damaged: str | None
) -> None:
    run(tmp_path / "run", *ONE_STEP, "run.total_steps=1")
    vocabulary = read_vocabulary(tmp_path / "run")
    file = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text()[:-9] if damaged is None else damaged)
    run(tmp_path / "run", *ONE_STEP, "run.total_steps=2", "run.resume=auto")
    assert read_vocabulary(tmp_path / "run") == vocabulary
    assert (tmp_path / "run" / "tokenizer.damaged-1" / "tokenizer.json").is_file()


@pytest.mark.parametrize("setting", ["model_type=t5", "num_hidden_layers=3"])
def test_model_that_cannot_continue_needs_another_remedy_than_a_resume(
    run: Run, tmp_path: Path, setting: str
) -> None:
    run(tmp_path / "run", *ONE_STEP, "run.total_steps=1")
    wrong = f"actor.engine.model.architecture.{setting}"
    with pytest.raises((CapabilityError, CheckpointError)) as caught:
        run(tmp_path / "run", *ONE_STEP, "run.total_steps=2", "run.resume=auto", wrong)
    (note,) = caught.value.__notes__
    assert note.endswith("correct what the error names first, then continue with run.resume=auto.")
