"""Files in the run folder at the start of a run."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.checkpoint.checkpointer import RUN_ID_FILE
from temper_trainer.config.data import TokenizerConfig
from temper_trainer.config.rollout import RECORD_FILE
from temper_trainer.config.run import RunConfig
from temper_trainer.config.run_folder_checks import find_wrong_entries
from temper_trainer.config_loading import load
from temper_trainer.loops import train
from temper_trainer.loops.run.run_folder import (
    TRAINED_CONFIG,
    RunFolder,
    open_run_folder,
    set_aside_damaged_model,
)
from temper_trainer.metrics.report import REPORT_FILE
from temper_trainer.metrics.rollout_records import ROLLOUTS_FILE
from temper_trainer.metrics.run_files import METRICS_FILE, STARTS_FILE
from temper_trainer.metrics.run_log import SAMPLES_FILE
from temper_trainer.metrics.timeline import TIMELINE_FILE
from temper_trainer.run_lock import LOCK_FILE


def test_files_of_a_failed_start_are_renamed_and_never_deleted(
    tmp_path: Path,
) -> None:
    run = RunConfig(dir=str(tmp_path))
    open_run_folder(run)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "MY_NOTES.txt").write_text("mine")
    (tmp_path / "config.yaml").write_text("mine")
    open_run_folder(run)
    assert not (tmp_path / "tokenizer").exists()
    assert (tmp_path / "tokenizer.superseded-1" / "MY_NOTES.txt").read_text() == "mine"
    assert (tmp_path / "config.superseded-1.yaml").read_text() == "mine"


def test_input_inside_the_run_folder_is_refused_before_any_change(
    tmp_path: Path,
) -> None:
    (tmp_path / ".untrained").touch()  # left by a start that failed
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    config = load(["experiment=quickstart", f"run.dir={tmp_path}"]).config
    own = TokenizerConfig(kind="pretrained", path=str(tokenizer))
    config = replace(config, data=replace(config.data, tokenizer=own))
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.path is .*move it out of run\.dir"):
        train(config, digest="", write_config=lambda folder: None)
    assert tokenizer.is_dir()


@pytest.mark.parametrize("is_link", [True, False])
@pytest.mark.parametrize("resume", ["never", "auto"])
def test_checkpoints_that_is_not_a_folder_is_refused_at_the_start(
    is_link: bool, resume: str, tmp_path: Path
) -> None:
    if is_link:
        (tmp_path / "checkpoints").symlink_to(tmp_path / "missing")
    else:
        (tmp_path / "checkpoints").touch()
    with pytest.raises(
        ConfigError,
        match=r"checkpoints is (a file|a broken link).*(rename|remove)|already holds a run",
    ):
        open_run_folder(RunConfig(dir=str(tmp_path), resume=resume))


def test_pipe_in_place_of_any_file_that_a_run_writes_is_found(tmp_path: Path) -> None:
    names = {
        *(METRICS_FILE, STARTS_FILE, SAMPLES_FILE, TIMELINE_FILE, ROLLOUTS_FILE, RECORD_FILE),
        *(TRAINED_CONFIG, RUN_ID_FILE, LOCK_FILE, REPORT_FILE, f".{REPORT_FILE}.partial"),
    }
    for name in names:
        os.mkfifo(tmp_path / name)
    refused = {Path(problem.split()[0]).name for problem in find_wrong_entries(tmp_path)}
    assert refused == names


def test_link_to_a_missing_model_is_renamed(tmp_path: Path) -> None:
    # Such as one to a disk that is not mounted: renaming the new model over it would fail.
    folder = RunFolder(tmp_path)
    folder.model.symlink_to(tmp_path / "unmounted")
    folder.supersede_model()
    assert folder.model.with_name("huggingface.superseded-1").is_symlink()
    folder.model.symlink_to(tmp_path / "unmounted")
    assert set_aside_damaged_model(folder.model) is not None
    assert folder.model.with_name("huggingface.damaged-1").is_symlink()
    assert not folder.model.is_symlink()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("config.yaml", "folder"),
        ("metrics.jsonl", "folder"),
        ("samples.jsonl", "folder"),
        ("timeline.jsonl", "folder"),
        ("rollouts.jsonl", "folder"),
        ("run.lock", "folder"),
        ("report.html", "folder"),
        (".report.html.partial", "folder"),
        ("curves.png", "folder"),
        (".trained_config.yaml", "folder"),
        ("wandb_id.txt", "folder"),
        ("config.yaml", "pipe"),
        ("metrics.jsonl", "pipe"),
        ("run.lock", "pipe"),
        ("completions.jsonl", "pipe"),
        ("tensorboard", "file"),
        ("tensorboard/rl", "file"),
        ("wandb", "file"),
        ("warm_start", "file"),
        ("warm_start/checkpoints", "file"),
    ],
)
def test_entry_of_another_kind_than_the_run_writes_is_refused(
    tmp_path: Path, name: str, kind: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    # To read a pipe would wait forever.
    make = {"folder": Path.mkdir, "pipe": os.mkfifo, "file": Path.touch}
    make[kind](path)
    with pytest.raises(ConfigError, match=rf"{name} is a {kind}.*, but must be a .*: rename or"):
        open_run_folder(RunConfig(dir=str(tmp_path), resume="auto"))
