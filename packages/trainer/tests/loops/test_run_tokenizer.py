"""The tokenizer of a resumed run, also if the saved one is damaged or another."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import CheckpointError
from temper_trainer.checkpoint.step_contents import STATE_FILE, TRAINER_PART
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.data import TokenizerConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading import load
from temper_trainer.data.rows import DataError, Row
from temper_trainer.data.tokenizer import build_tokenizer, compute_tokenizer_digest
from temper_trainer.loops.run.run_folder import RunFolder
from temper_trainer.loops.run.run_tokenizer import load_or_train_tokenizer
from temper_trainer.types import DataCursor


def build_rows(text: str) -> list[Row]:
    return [Row(row_id=0, prompt=text, answer="12", solution="12", location="data:1")]


APPLES, PEARS = build_rows("Tom has 12 apples."), build_rows("Ann eats pears.")
BPE = ("data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=280")


def composed(*overrides: str) -> TrainerConfig:
    return load(["experiment=quickstart", *overrides]).config


def save_state(folder: RunFolder, *, digest: str | None, warm_start: bool = False) -> Path:
    """Write the trainer's part of a checkpoint of step 1."""
    owner = folder.warm_start if warm_start else folder
    step = owner.checkpoints / "step_00000001"
    (step / TRAINER_PART).mkdir(parents=True)
    state = TrainerState(
        phase="warm_start" if warm_start else "rl",
        step=1,
        cursor=DataCursor(),
        weight_version=1,
        config_digest="ab",
        tokenizer_digest=digest,
    )
    (step / TRAINER_PART / STATE_FILE).write_text(state.to_json())
    return step


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def first_start(
    folder: RunFolder, *overrides: str, warm_start: bool = False, has_digest: bool = True
) -> tuple[PreTrainedTokenizerBase, Path]:
    """Return the tokenizer of a first start on APPLES, and the checkpoint of its first step."""
    tokenizer = load_or_train_tokenizer(composed(*overrides), folder=folder, rows=APPLES)
    digest = compute_tokenizer_digest(tokenizer) if has_digest else None
    return tokenizer, save_state(folder, digest=digest, warm_start=warm_start)


def damage(folder: RunFolder) -> bytes:
    file = folder.tokenizer / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-9])
    return file.read_bytes()


def swap_two_ids(folder: RunFolder) -> bytes:
    """Exchange the ids of two entries; the file stays well-formed."""
    file = folder.tokenizer / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(content))
    return file.read_bytes()


@pytest.mark.parametrize("has_digest", [True, False])
def test_resumed_run_uses_the_tokenizer_that_it_saved(folder: RunFolder, has_digest: bool) -> None:
    tokenizer, step = first_start(folder, *BPE, has_digest=has_digest)
    changed = composed(*BPE, "data.tokenizer.vocab_size=270")
    resumed = load_or_train_tokenizer(changed, folder=folder, rows=PEARS, checkpoint=step)
    assert resumed.get_vocab() == tokenizer.get_vocab()


def test_started_warm_start_keeps_its_tokenizer(folder: RunFolder) -> None:
    tokenizer, _ = first_start(folder, *BPE, warm_start=True)
    resumed = load_or_train_tokenizer(composed(*BPE), folder=folder, rows=PEARS)
    assert resumed.get_vocab() == tokenizer.get_vocab()


def test_run_without_weights_trains_the_tokenizer_again(folder: RunFolder) -> None:
    tokenizer = load_or_train_tokenizer(composed(*BPE), folder=folder, rows=APPLES)
    again = load_or_train_tokenizer(composed(*BPE), folder=folder, rows=PEARS)
    assert again.get_vocab() != tokenizer.get_vocab()
    assert folder.tokenizer.with_name("tokenizer.superseded-1").is_dir()


def test_resumed_run_keeps_a_pretrained_tokenizer_when_its_path_changes(
    folder: RunFolder, tmp_path: Path
) -> None:
    kinds = TokenizerConfig(kind="bpe", vocab_size=280)
    for name, texts in (("a", ["abab abab"]), ("b", ["cdcd cdcd"])):
        build_tokenizer(kinds, model_path=None, texts=texts, directory=tmp_path / name)

    def compose(name: str) -> TrainerConfig:
        path = f"data.tokenizer.path={tmp_path / name}"
        return composed("data.tokenizer.kind=pretrained", path)

    tokenizer = load_or_train_tokenizer(compose("a"), folder=folder, rows=[])
    step = save_state(folder, digest=compute_tokenizer_digest(tokenizer))
    resumed = load_or_train_tokenizer(compose("b"), folder=folder, rows=[], checkpoint=step)
    assert resumed.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("spoil", [damage, swap_two_ids])
def test_other_tokenizer_is_replaced_by_one_with_the_digest_of_the_checkpoint(
    folder: RunFolder, spoil: Callable[[RunFolder], bytes]
) -> None:
    tokenizer, step = first_start(folder)
    content = spoil(folder)
    resumed = load_or_train_tokenizer(composed(), folder=folder, rows=APPLES, checkpoint=step)
    assert resumed.get_vocab() == tokenizer.get_vocab()
    kept = folder.tokenizer.with_name("tokenizer.damaged-1")
    assert (kept / "tokenizer.json").read_bytes() == content


@pytest.mark.parametrize("spoil", [damage, swap_two_ids])
def test_tokenizer_that_cannot_be_rebuilt_is_refused_and_left_in_place(
    folder: RunFolder, spoil: Callable[[RunFolder], bytes]
) -> None:
    _, step = first_start(folder)
    content = spoil(folder)
    with pytest.raises(CheckpointError, match=r"run/tokenizer .* restore .*tokenizer"):
        load_or_train_tokenizer(composed(), folder=folder, rows=PEARS, checkpoint=step)
    assert (folder.tokenizer / "tokenizer.json").read_bytes() == content


def test_damaged_tokenizer_of_a_checkpoint_without_a_digest_is_refused(folder: RunFolder) -> None:
    _, step = first_start(folder, has_digest=False)
    damage(folder)
    with pytest.raises(CheckpointError, match="records no digest"):
        load_or_train_tokenizer(composed(), folder=folder, rows=APPLES, checkpoint=step)


def test_run_that_resumes_from_another_run_takes_over_its_tokenizer(
    folder: RunFolder, tmp_path: Path
) -> None:
    tokenizer, step = first_start(folder, *BPE)
    other = RunFolder(tmp_path / "other")
    resumed = load_or_train_tokenizer(composed(*BPE), folder=other, rows=PEARS, checkpoint=step)
    assert resumed.get_vocab() == tokenizer.get_vocab()
    assert (other.tokenizer / "tokenizer.json").is_file()


def test_checkpoint_without_its_run_folder_refuses_another_tokenizer(
    folder: RunFolder, tmp_path: Path
) -> None:
    _, step = first_start(folder, *BPE)
    moved = step.rename(tmp_path / "step_00000001")
    with pytest.raises(CheckpointError, match="restore"):
        load_or_train_tokenizer(
            composed(*BPE), folder=RunFolder(tmp_path / "new"), rows=PEARS, checkpoint=moved
        )


@pytest.mark.parametrize("text", ["Ann ate pears.", "it ends <eos> here"])
def test_new_text_that_the_tokenizer_cannot_represent_is_refused(
    folder: RunFolder, text: str
) -> None:
    _, step = first_start(folder)
    with pytest.raises(DataError, match=r"choose another run\.dir|special tokens"):
        load_or_train_tokenizer(composed(), folder=folder, rows=build_rows(text), checkpoint=step)
