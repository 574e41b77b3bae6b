"""Test checkpoints that a single engine saves and loads, on one rank and on several."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from temper_engine_api.checkpoint import (
    ManifestInfo,
    begin_checkpoint,
    engine_checkpoint,
    list_complete_steps,
    report_part,
    verify,
)
from temper_engine_api.checkpoint.engine_checkpoint import _check_seen, save_engine_checkpoint
from temper_engine_api.checkpoint.manifest import MANIFEST_NAME
from temper_engine_api.checkpoint.transaction import open_part
from temper_engine_api.distributed.gather_codec import encode_value
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    ConfigError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    MessageError,
)
from temper_engine_api.specs import ModelSpec

MakeEngines = Callable[..., list[Any]]
OTHER_SEED = ModelSpec(architecture={"model_type": "bigram"}, seed=9)


def on_every_rank(engines: list[Any], action: Callable[[BaseEngine], object]) -> list[object]:
    """Run an action on every rank; return its results or errors, in rank order."""

    def run(rank: int) -> object:
        try:
            return action(engines[rank])
        except (CheckpointError, ConfigError) as error:
            return error

    return list(engines[0].rank_threads.run(run))


def save(step: int, path: Path, **options: Any) -> Callable[[BaseEngine], str]:
    return lambda engine: engine.save_checkpoint(str(path), global_step=step, **options)


def test_all_ranks_write_one_step_and_return_its_path(
    make_engines: MakeEngines, tmp_path: Path
) -> None:
    paths = on_every_rank(make_engines(3), save(10, tmp_path))
    assert paths == [str(tmp_path / "step_00000010")] * 3
    manifest = verify(tmp_path / "step_00000010")
    assert [record.path for record in manifest.files] == [
        "engine/progress.json",
        *(f"engine/rank_{rank}.pt" for rank in range(3)),
    ]
    assert manifest.info.topology["dp"] == 3


def test_a_step_loads_on_another_number_of_ranks(make_engines: MakeEngines, tmp_path: Path) -> None:
    (one,), others = make_engines(), make_engines(3, model=OTHER_SEED)
    one.save_checkpoint(str(tmp_path), global_step=1)
    on_every_rank(others, lambda engine: engine.load_checkpoint(str(tmp_path)))
    assert all(torch.equal(engine.table, one.table) for engine in others)


def test_saving_keeps_the_newest_steps(make_engines: MakeEngines, tmp_path: Path) -> None:
    engines = make_engines(2)
    for step in (1, 2, 3):
        on_every_rank(engines, save(step, tmp_path, max_ckpt_to_keep=2))
    assert list_complete_steps(tmp_path) == [2, 3]


def test_an_existing_step_is_refused_on_every_rank(
    make_engines: MakeEngines, tmp_path: Path
) -> None:
    engines = make_engines(2)
    on_every_rank(engines, save(1, tmp_path))
    for error in on_every_rank(engines, save(1, tmp_path)):
        assert isinstance(error, CheckpointError)
        assert "already exists and is never overwritten" in str(error)


def test_all_ranks_raise_if_one_cannot_write(
    make_engines: MakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = make_engines(2)
    on_every_rank(engines, save(1, tmp_path))

    def fails(directory: str) -> list[str]:
        Path(directory, "nowhere", "x").write_text("x")
        return ["nowhere/x"]

    monkeypatch.setattr(engines[1], "_write_state", fails)
    errors = on_every_rank(engines, save(2, tmp_path))
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "step 2 could not be saved: rank 1: FileNotFoundError" in str(error)
        assert "Earlier steps have not changed" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_no_rank_writes_if_one_cannot_create_its_directory(
    make_engines: MakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rank would not reach the collectives in which the others write.
    engines = make_engines(2)
    opened: list[str] = []
    written: list[str] = []

    def open_or_fail(staging: Path, name: str) -> Path:
        opened.append(name)
        if len(opened) == 2:
            raise PermissionError("injected")
        return open_part(staging, name)

    monkeypatch.setattr(engine_checkpoint, "open_part", open_or_fail)
    for engine in engines:
        monkeypatch.setattr(engine, "_write_state", written.append)
    for error in on_every_rank(engines, save(1, tmp_path)):
        assert "step 1 could not be saved: rank " in str(error)
        assert "PermissionError: injected" in str(error)
    assert written == []
    assert list(tmp_path.iterdir()) == []


def test_all_ranks_raise_if_a_library_raises_on_one(
    make_engines: MakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LibraryError(Exception):
        """Error class of a library; safetensors, for example, has one."""

    def fails(directory: str) -> list[str]:
        raise LibraryError("No space left on device")

    engines = make_engines(2)

    monkeypatch.setattr(engines[1], "_write_state", fails)
    for error in on_every_rank(engines, save(1, tmp_path)):
        assert "step 1 could not be saved: rank 1: LibraryError: No space left on device" in str(
            error
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning"
)  # one process is what is meant
def test_full_disk_in_torch_checkpoint_writer_is_a_checkpoint_error(
    make_engines: MakeEngines, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine,) = make_engines()
    engine.save_checkpoint(str(small_disk), global_step=1)

    def write(directory: str) -> list[str]:
        dcp.save({"table": torch.zeros(200_000)}, checkpoint_id=directory, no_dist=True)
        return [path.name for path in Path(directory).iterdir()]

    monkeypatch.setattr(engine, "_write_state", write)
    with pytest.raises(
        CheckpointError,
        match=r"step 2 could not be saved: rank 0: .*MiB of the step were written and 0.0 MiB",
    ):
        engine.save_checkpoint(str(small_disk), global_step=2)
    assert [path.name for path in small_disk.iterdir()] == ["step_00000001"]
    engine.load_checkpoint(str(small_disk))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("file", ["progress.json", "rank_0.pt", "rank_1.pt"])
def test_damage_is_refused_before_the_first_weight_changes(
    make_engines: MakeEngines, tmp_path: Path, file: str, num_ranks: int
) -> None:
    engines, fresh = make_engines(2), make_engines(num_ranks, model=OTHER_SEED)
    on_every_rank(engines, save(1, tmp_path))
    path = tmp_path / "step_00000001" / "engine" / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    before = fresh[0].table.detach().clone()
    for error in on_every_rank(fresh, lambda engine: engine.load_checkpoint(str(tmp_path))):
        assert isinstance(error, DamagedCheckpointError)
        assert f"{file} has another checksum" in str(error)
    assert all(torch.equal(engine.table, before) for engine in fresh)


def test_counters_of_a_wrong_type_are_damage(make_engines: MakeEngines, tmp_path: Path) -> None:
    (engine,) = make_engines()
    with begin_checkpoint(tmp_path, 1) as transaction:
        part = transaction.open_part("engine")
        report = engine.write_part(str(part))
        (part / "progress.json").write_text('{"num_updates": "many"}')
        again = report_part(part, [record.path for record in report.files])
        final = transaction.commit(
            {"engine": [again]}, info=ManifestInfo(topology={}, config_hash="")
        )
    with pytest.raises(DamagedCheckpointError, match=r"progress.json must contain the counters"):
        engine.load_checkpoint(str(final))


def test_no_complete_step_is_refused_on_every_rank(
    make_engines: MakeEngines, tmp_path: Path
) -> None:
    for error in on_every_rank(
        make_engines(2), lambda engine: engine.load_checkpoint(str(tmp_path))
    ):
        assert isinstance(error, IncompleteCheckpointError)


def test_a_step_of_several_participants_is_refused_naming_them(
    make_engines: MakeEngines, tmp_path: Path
) -> None:
    (engine,) = make_engines()
    with begin_checkpoint(tmp_path, 1) as transaction:
        report = engine.write_part(str(transaction.open_part("actor")))
        final = transaction.commit(
            {"actor": [report]}, info=ManifestInfo(topology={}, config_hash="")
        )
    with pytest.raises(CheckpointError, match=r"has no folder 'engine', but \['actor'\]"):
        engine.load_checkpoint(str(final))


def test_lost_rank_leaves_no_staging_directory(make_engines: MakeEngines, tmp_path: Path) -> None:
    def gather(item: object) -> list[Any]:
        raise CollectiveTimeoutError("rank 1 does not answer")

    (engine,) = make_engines(1)
    with pytest.raises(CollectiveTimeoutError, match="does not answer"):
        save_engine_checkpoint(
            engine, local_path=str(tmp_path), remote_url=None, step=1, max_to_keep=1, gather=gather
        )
    assert list(tmp_path.iterdir()) == []


def test_no_other_rank_can_commit_or_abort_a_step(tmp_path: Path) -> None:
    with begin_checkpoint(tmp_path, 1) as transaction, pytest.raises(MessageError):
        encode_value(transaction)


def test_folder_that_one_rank_does_not_see_is_refused_on_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ranks \[1, 3\] do not see .* that all nodes share"):
        _check_seen(tmp_path, lambda seen: [True, seen, True, seen])


def test_copy_is_uploaded_and_loaded_from_the_url(
    make_engines: MakeEngines, tmp_path: Path
) -> None:
    engines, fresh = make_engines(2), make_engines(2, model=OTHER_SEED)
    url = f"memory://{tmp_path.name}/run"
    on_every_rank(engines, save(4, tmp_path / "local", hdfs_path=url))

    def load(engine: BaseEngine) -> None:
        engine.load_checkpoint(str(tmp_path / "other"), hdfs_path=url)

    assert on_every_rank(fresh, load) == [None, None]
    assert torch.equal(fresh[1].table, engines[0].table)
    verify(tmp_path / "other" / "step_00000004")
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_only_the_downloaded_copy_is_deleted_after_loading(
    make_engines: MakeEngines, tmp_path: Path
) -> None:
    engines = make_engines(2)
    url = f"file://{tmp_path}/bucket"
    on_every_rank(engines, save(4, tmp_path / "local", hdfs_path=url))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")

    def load(engine: BaseEngine) -> None:
        engine.load_checkpoint(
            str(tmp_path / "other"), hdfs_path=f"{url}/step_00000004", del_local_after_load=True
        )

    assert on_every_rank(engines, load) == [None, None]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine.txt"]
    verify(tmp_path / "local" / "step_00000004")
    verify(tmp_path / "bucket" / "step_00000004")


def test_failed_deletion_of_a_download_does_not_fail_the_load(
    make_engines: MakeEngines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (engine,) = make_engines()
    url = f"file://{tmp_path}/bucket"
    saved = engine.save_checkpoint(str(tmp_path / "local"), hdfs_path=url)
    read = engine._read_state

    def read_and_damage(directory: str) -> None:
        read(directory)
        Path(directory, "..", MANIFEST_NAME).unlink()

    engine._read_state = read_and_damage
    engine.load_checkpoint(
        str(tmp_path / "other"), hdfs_path=f"{url}/{Path(saved).name}", del_local_after_load=True
    )
    assert "could not delete the downloaded copy" in caplog.text


def test_deleting_without_a_download_is_refused(make_engines: MakeEngines, tmp_path: Path) -> None:
    (engine,) = make_engines()
    saved = engine.save_checkpoint(str(tmp_path), global_step=1)
    with pytest.raises(ConfigError, match=r"del_local_after_load has no effect without hdfs_path"):
        engine.load_checkpoint(saved, del_local_after_load=True)
    verify(saved)


def test_keeping_no_step_is_refused_before_anything_is_written(
    make_engines: MakeEngines, tmp_path: Path
) -> None:
    (engine,) = make_engines()
    with pytest.raises(ConfigError, match=r"is 0, but must be at least 1"):
        engine.save_checkpoint(str(tmp_path / "run"), max_ckpt_to_keep=0)
    assert not (tmp_path / "run").exists()
