"""Resume after every kind of damage, and delete old checkpoints."""

import dataclasses
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from temper_engine_api.checkpoint import (
    PartReport,
    begin_checkpoint,
    list_complete_steps,
    list_partial_saves,
    report_part,
    verify,
)
from temper_engine_api.checkpoint.manifest import read_manifest
from temper_engine_api.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)
from temper_trainer.checkpoint.checkpoint_messages import (
    describe_deletion,
    describe_last_save,
    describe_policy,
)
from temper_trainer.checkpoint.checkpointer import Checkpointer, load_run_id
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.run import RunConfig
from temper_trainer.types import DataCursor


def write_weights(directory: str) -> Sequence[PartReport]:
    Path(directory, "weights").write_bytes(bytes(range(200)))
    return [report_part(directory, ["weights"])]


def make_checkpointer(
    root: Path, *, max_to_keep: int | None = None, keep_every: int = 0, run_id: str = "ours"
) -> Checkpointer:
    return Checkpointer(root=root, max_to_keep=max_to_keep, keep_every=keep_every, run_id=run_id)


def save(checkpointer: Checkpointer, *steps: int) -> list[Path]:
    states = [
        TrainerState(phase="rl", step=s, cursor=DataCursor(), weight_version=1, config_digest="ab")
        for s in steps
    ]
    return [
        checkpointer.save(state, roles={"actor": write_weights}, topology={}) for state in states
    ]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_step(path: Path) -> None:
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"step": 7}))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # its first byte gives EIO


def rename_in_manifest(step: Path, name: str) -> None:
    manifest = read_manifest(step)
    records = (dataclasses.replace(manifest.files[0], path=name), *manifest.files[1:])
    (step / "manifest.json").write_text(dataclasses.replace(manifest, files=records).to_json())


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def copy_first(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.with_name("step_00000001"), step)


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "flipped": (
        lambda step: flip_bit(step / "actor/weights"),
        "damaged",
        "actor/weights has another checksum",
    ),
    "truncated": (
        lambda step: os.truncate(step / "actor/weights", 100),
        "damaged",
        "has 100 bytes instead of 200",
    ),
    "emptied": (
        lambda step: os.truncate(step / "actor/weights", 0),
        "damaged",
        "has 0 bytes instead of 200",
    ),
    "deleted": (
        lambda step: (step / "actor/weights").unlink(),
        "damaged",
        "actor/weights is missing",
    ),
    "replaced": (
        lambda step: replace_by_folder(step / "actor/weights"),
        "damaged",
        "actor/weights is not a file",
    ),
    "part deleted": (
        lambda step: shutil.rmtree(step / "trainer"),
        "damaged",
        "trainer/state.json is missing",
    ),
    "state edited": (
        lambda step: edit_step(step / "trainer/state.json"),
        "damaged",
        "trainer/state.json",
    ),
    "state flipped": (
        lambda step: flip_bit(step / "trainer/state.json"),
        "damaged",
        "trainer/state.json has another",
    ),
    "manifest emptied": (
        lambda step: os.truncate(step / "manifest.json", 0),
        "damaged",
        "manifest.json is damaged",
    ),
    "manifest edited": (
        lambda step: edit_step(step / "manifest.json"),
        "damaged",
        "does not match its own checksum",
    ),
    "manifest deleted": (
        lambda step: (step / "manifest.json").unlink(),
        "incomplete",
        "it has no manifest.json",
    ),
    "manifest replaced by a folder": (
        lambda step: replace_by_folder(step / "manifest.json"),
        "incomplete",
        "it has no manifest.json",
    ),
    "manifest replaced by a loop": (
        lambda step: replace_by_loop(step / "manifest.json"),
        "damaged",
        "manifest.json cannot be read",
    ),
    "manifest replaced by a fifo": (
        lambda step: replace_by_fifo(step / "manifest.json"),
        "damaged",
        "manifest.json is not a file",
    ),
    "manifest unreadable by its disk": (
        lambda step: replace_by_unreadable(step / "manifest.json"),
        "damaged",
        "Input/output error",
    ),
    "manifest nested": (
        lambda step: (step / "manifest.json").write_text("[" * 100_000),
        "damaged",
        "manifest.json is damaged",
    ),
    "null byte in a path": (
        lambda step: rename_in_manifest(step, "nu\0ll"),
        "damaged",
        "has an impossible name",
    ),
    "path too long": (
        lambda step: rename_in_manifest(step, "x" * 5000),
        "damaged",
        "File name too long",
    ),
    "everything deleted": (empty, "incomplete", "it has no manifest.json"),
    "copied from another step": (copy_first, "damaged", "its manifest is of step 1"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_newest_checkpoint_is_renamed_and_the_previous_one_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    checkpointer = make_checkpointer(tmp_path)
    _, second, third = save(checkpointer, 1, 2, 3)
    damage, reason, sentence = DAMAGE[kind]
    damage(third)
    assert checkpointer.find("auto") == second
    (line,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith(f"checkpoint {third} is {reason} (")
    assert sentence in line
    assert line.endswith(f"renamed to step_00000003.{reason}-1")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_00000001",
        "step_00000002",
        f"step_00000003.{reason}-1",
    ]
    (again,) = save(checkpointer, 3)
    verify(again)


def test_several_damaged_checkpoints_are_skipped(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    first, second, third, fourth = save(checkpointer, 1, 2, 3, 4)
    flip_bit(second / "actor/weights")
    (third / "manifest.json").unlink()
    os.truncate(fourth / "manifest.json", 10)
    assert checkpointer.find("auto") == first


def test_run_without_a_good_checkpoint_starts_again_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make_checkpointer(tmp_path)
    for step in save(checkpointer, 1, 2):
        flip_bit(step / "actor/weights")
    assert checkpointer.find("auto") is None
    assert "no checkpoint in" in caplog.text
    assert "all 2 were renamed, none was deleted" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_00000001.damaged-1",
        "step_00000002.damaged-1",
    ]


def damage_and_find(checkpointer: Checkpointer, *steps: int) -> None:
    """Save these steps, each of which is damaged and renamed before the next."""
    for step in steps:
        (saved,) = save(checkpointer, step)
        flip_bit(saved / "actor/weights")
        checkpointer.find("auto")


def test_newest_two_damaged_checkpoints_of_a_run_are_kept(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, max_to_keep=2)
    damage_and_find(checkpointer, 1, 2, 2, 3)
    # Only a save, which commits a good step, deletes the older ones.
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step_00000002.damaged-1", "step_00000002.damaged-2", "step_00000003.damaged-1")
    }
    save(checkpointer, 3)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step_00000002.damaged-2", "step_00000003.damaged-1", "step_00000003")
    }


def test_repeated_damage_fills_no_disk(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, max_to_keep=1)
    for step in range(1, 30):
        damage_and_find(checkpointer, step)
        save(checkpointer, step)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("case", ["another run", "added file", "no manifest", "permanent", "all"])
def test_damaged_checkpoint_that_retention_would_not_delete_is_kept(
    tmp_path: Path, case: str
) -> None:
    checkpointer = make_checkpointer(
        tmp_path,
        max_to_keep=None if case == "all" else 1,
        keep_every=2 if case == "permanent" else 0,
    )
    first = make_checkpointer(tmp_path, run_id="theirs") if case == "another run" else checkpointer
    damage_and_find(first, 2)
    renamed = tmp_path / "step_00000002.damaged-1"
    if case == "added file":
        (renamed / "notes").write_text("mine")
    if case == "no manifest":
        (renamed / "manifest.json").unlink()
    damage_and_find(checkpointer, 3, 5)
    save(checkpointer, 7)
    assert renamed.is_dir()


def test_renamed_checkpoints_are_named_when_space_is_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make_checkpointer(tmp_path, max_to_keep=2)
    damage_and_find(checkpointer, 1)
    assert "free" not in caplog.text
    caplog.clear()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    damage_and_find(checkpointer, 2)
    line = caplog.records[-2].message
    assert line == (
        f"only 0.0 MiB are free in {tmp_path}, where 2 damaged checkpoints take 0.0 MiB (delete "
        f"what you do not need: rm -r {tmp_path}/step_*.damaged-*)"
    )


@pytest.mark.parametrize(
    ("case", "is_deleted"),
    [("tight", True), ("ample", False), ("none good", False), ("all kept", False)],
)
def test_save_on_a_tight_disk_deletes_damaged_checkpoints_of_the_run(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    is_deleted: bool,
) -> None:
    checkpointer = make_checkpointer(tmp_path, max_to_keep=None if case == "all kept" else 2)
    if case != "none good":
        save(checkpointer, 1)
    foreign = tmp_path / "step_00000009.damaged-1"
    foreign.mkdir()
    damage_and_find(checkpointer, 2)
    usage = shutil.disk_usage(tmp_path)
    free = 1 << 30 if case == "ample" else 100
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    checkpointer.begin(2)
    assert (tmp_path / "step_00000002.damaged-1").exists() != is_deleted
    assert ("damaged checkpoints of this run were deleted" in caplog.text) == is_deleted
    assert foreign.is_dir()


def test_older_damaged_checkpoint_is_not_renamed(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    first, second = save(checkpointer, 1, 2)
    flip_bit(first / "actor/weights")
    assert checkpointer.find("auto") == second
    assert first.is_dir()


def test_remains_of_a_killed_save_are_renamed_and_later_deleted(
    tmp_path: Path,
) -> None:
    checkpointer = make_checkpointer(tmp_path, max_to_keep=2)
    save(checkpointer, 1)
    begin_checkpoint(tmp_path, 2, run_id="ours")
    foreign = tmp_path / ".step_00000009.abc.partial"
    foreign.mkdir()
    assert checkpointer.find("auto") == tmp_path / "step_00000001"
    assert (tmp_path / "step_00000002.incomplete-1").is_dir()
    save(checkpointer, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        foreign.name,
        "step_00000001",
        "step_00000002",
    ]
    assert list_partial_saves(tmp_path) == [foreign]


def test_remains_of_a_killed_save_take_no_space_during_the_next_save(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, max_to_keep=2)
    save(checkpointer, 1)
    begin_checkpoint(tmp_path, 2, run_id="ours")
    begin_checkpoint(tmp_path, 3, run_id="another")
    checkpointer.find("auto")
    running = begin_checkpoint(tmp_path, 4, run_id="ours")
    with checkpointer.begin(2) as transaction:
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
            [
                transaction.staging.name,
                running.staging.name,
                "step_00000001",
                "step_00000003.incomplete-1",
            ]
        )


def test_without_retention_remains_of_a_killed_save_are_kept(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, max_to_keep=None)
    begin_checkpoint(tmp_path, 2, run_id="ours")
    checkpointer.find("auto")
    save(checkpointer, 2)
    assert (tmp_path / "step_00000002.incomplete-1").is_dir()


@pytest.fixture
def readable_by_all() -> Iterator[Path]:
    """A folder that a user other than root may enter, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def unprivileged(readable_by_all: Path) -> Iterator[None]:
    """Files of mode 0 stop this user: root becomes another one for the test."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)
    for path in [readable_by_all, *readable_by_all.rglob("*")]:
        path.chmod(0o700)


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize("name", ["actor/weights", "manifest.json", "trainer", "."])
def test_unreadable_file_stops_the_run_without_changes(readable_by_all: Path, name: str) -> None:
    checkpointer = make_checkpointer(readable_by_all / "checkpoints")
    _, second = save(checkpointer, 1, 2)
    (second / name).chmod(0)
    with pytest.raises(
        CheckpointError,
        match=r"cannot be read \(Permission denied\).*The checkpoint is not damaged",
    ) as caught:
        checkpointer.find("auto")
    assert type(caught.value) is CheckpointError
    assert sorted(p.name for p in second.parent.iterdir()) == ["step_00000001", "step_00000002"]


def test_resuming_from_an_earlier_step_renames_the_later_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make_checkpointer(tmp_path)
    first, second, third = save(checkpointer, 1, 2, 3)
    (third / "manifest.json").unlink()  # in the way too, whatever state it is in
    assert checkpointer.find(str(first)) == first
    assert (
        caplog.text.count("is superseded (run.resume names the earlier step_00000001): renamed to")
        == 2
    )
    verify(second.with_name("step_00000002.superseded-1"))
    save(checkpointer, 2)


def test_requested_damaged_checkpoint_is_refused_and_later_ones_remain(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    first, second = save(checkpointer, 1, 2)
    flip_bit(first / "actor/weights")
    with pytest.raises(
        DamagedCheckpointError,
        match=r"actor/weights has another checksum.*run\.resume=auto renames",
    ):
        checkpointer.find(str(first))
    assert list_complete_steps(tmp_path) == [1, 2]
    with pytest.raises(IncompleteCheckpointError, match=r"has no manifest\.json"):
        checkpointer.find(str(second.with_name("step_00000005")))


def test_existing_later_step_of_another_run_is_refused_at_the_start(tmp_path: Path) -> None:
    (other,) = save(make_checkpointer(tmp_path / "other"), 5)
    checkpointer = make_checkpointer(tmp_path / "ours")
    save(checkpointer, 9)
    with pytest.raises(
        CheckpointError,
        match=r"step_00000009 exists already, but this run continues from step 5 .* mv ",
    ):
        checkpointer.find(str(other))
    with pytest.raises(
        CheckpointError, match=r"step_00000009 exists already, but this run continues from step 0"
    ):
        checkpointer.find("never")


def test_retention_keeps_the_newest_two_and_checkpoints_of_other_runs(tmp_path: Path) -> None:
    save(make_checkpointer(tmp_path, run_id="before"), 1)
    checkpointer = make_checkpointer(tmp_path, max_to_keep=2)
    save(checkpointer, 2, 3, 4, 5)
    assert list_complete_steps(tmp_path) == [1, 4, 5]
    save(make_checkpointer(tmp_path, max_to_keep=2, keep_every=4), 6, 7, 8)
    assert list_complete_steps(tmp_path) == [1, 4, 7, 8]


def test_retention_verifies_checkpoints_of_an_earlier_process(
    tmp_path: Path,
) -> None:
    save(Checkpointer(root=tmp_path, max_to_keep=2, run_id="ours"), 1, 2)
    flip_bit(tmp_path / "step_00000002/actor/weights")
    save(Checkpointer(root=tmp_path, max_to_keep=2, run_id="ours"), 3)
    assert list_complete_steps(tmp_path) == [1, 2, 3]


def test_retention_does_not_verify_checkpoints_of_this_process_again(tmp_path: Path) -> None:
    read: list[Path] = []
    checkpointer = Checkpointer(root=tmp_path, max_to_keep=2, run_id="ours", verify=read.append)
    save(checkpointer, 1, 2, 3)
    assert (read, list_complete_steps(tmp_path)) == ([], [2, 3])


def test_run_keeps_its_id(tmp_path: Path) -> None:
    assert load_run_id(tmp_path / "a") == load_run_id(tmp_path / "a") != load_run_id(tmp_path / "b")


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x80", b"\0" * 33])
def test_damaged_run_id_is_renamed_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    first = load_run_id(tmp_path)
    (tmp_path / "run_id").write_bytes(content)
    second = load_run_id(tmp_path)
    assert len(second) == 32
    assert second != first
    assert load_run_id(tmp_path) == second
    assert (tmp_path / "run_id.damaged-1").read_bytes() == content
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / 'run_id'} is damaged: renamed to run_id.damaged-1. ")


def test_last_save_is_described_for_error_messages(tmp_path: Path) -> None:
    root, warm_start = tmp_path / "checkpoints", tmp_path / "warm_start"
    assert describe_last_save(root) == (
        "No checkpoint of this run was saved yet: run.resume=auto would start at step 1."
    )
    save(make_checkpointer(warm_start), 30)
    assert describe_last_save(root, warm_start=warm_start).startswith(
        "warm start: step 30 is saved"
    )
    first, second = save(make_checkpointer(root), 40, 50)
    assert describe_last_save(root).startswith(f"step 50 is saved in {second}")
    (second / "actor/weights").unlink()
    assert (
        describe_last_save(root) == f"step 40 is saved in {first}: continue with run.resume=auto."
    )


@pytest.mark.parametrize("requested", ["checkpoints", "checkpoints/global_step_2/actor"])
def test_checkpoint_of_an_older_system_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, requested: str
) -> None:
    role = tmp_path / "checkpoints/global_step_2/actor"
    role.mkdir(parents=True)
    (role / "model_world_size_1_rank_0.pt").touch()
    checkpointer = make_checkpointer(tmp_path / "new")
    for find in (checkpointer.find, checkpointer.preview):
        with pytest.raises(
            IncompleteCheckpointError,
            match=rf"temper-migrate checkpoint {tmp_path / requested} --to temper --out NEW",
        ):
            find(str(tmp_path / requested))


def test_advice_to_resume_comes_after_the_correction_that_an_error_needs(tmp_path: Path) -> None:
    correction = "correct what the error names first"
    assert describe_last_save(tmp_path, needs_correction=True) == (
        f"No checkpoint of this run was saved yet: {correction}, then run.resume=auto starts at "
        "step 1."
    )
    (saved,) = save(make_checkpointer(tmp_path), 40)
    assert describe_last_save(tmp_path, needs_correction=True) == (
        f"step 40 is saved in {saved}: {correction}, then continue with run.resume=auto."
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "the newest 2 verified ones are kept, older ones that this run wrote are deleted"),
        ({"max_ckpt_to_keep": 1}, "the newest verified one is kept"),
        ({"max_ckpt_to_keep": None}, "all are kept"),
        ({"keep_every": 500}, "the newest 2 verified ones and every 500th step are kept"),
    ],
)
def test_policy_describes_which_checkpoints_are_kept(
    settings: dict[str, int | None], sentence: str
) -> None:
    assert sentence in describe_policy(RunConfig(**settings))  # type: ignore[arg-type]


def test_checkpoint_with_a_directory_as_manifest_is_skipped(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    first, second = save(checkpointer, 1, 2)
    (second / "manifest.json").unlink()
    (second / "manifest.json").mkdir()
    assert checkpointer.find("auto") == first


def test_lowered_retention_warns_how_many_checkpoints_it_deletes(tmp_path: Path) -> None:
    save(make_checkpointer(tmp_path), 1, 2, 3, 4, 5)
    assert describe_deletion(make_checkpointer(tmp_path, max_to_keep=2)) == (
        f"WARNING: the next save deletes 4 older checkpoints in {tmp_path}, because "
        "run.max_ckpt_to_keep is 2: raise it to keep them."
    )
    assert describe_deletion(make_checkpointer(tmp_path, max_to_keep=5)) is None  # as at every save
    assert describe_deletion(make_checkpointer(tmp_path)) is None
