"""Test uploads and downloads with fsspec's local and in-memory file systems."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from temper_engine_api.checkpoint import begin_checkpoint, download, upload, verify
from temper_engine_api.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)

SaveStep = Callable[..., Path]


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    bucket = (
        f"memory://{uuid4().hex}/run"
        if request.param == "memory"
        else f"file://{tmp_path}/bucket/run"
    )
    yield bucket
    files, path = fsspec.core.url_to_fs(bucket)
    if files.exists(path):
        files.rm(path, recursive=True)


def test_downloaded_step_equals_the_uploaded_one(
    save_step: SaveStep, tmp_path: Path, url: str
) -> None:
    step = save_step(7)
    assert upload(step, url) == f"{url}/step_00000007"
    for i, source in enumerate((url, f"{url}/step_00000007", f"{url}/")):
        copy = download(source, tmp_path / f"fresh_{i}")
        assert verify(copy) == verify(step)
        assert (copy / "manifest.json").read_bytes() == (step / "manifest.json").read_bytes()


def test_downloaded_step_of_an_earlier_schema_is_verified(
    save_step: SaveStep, downgrade: Callable[..., None], tmp_path: Path, url: str
) -> None:
    step = save_step(7)
    downgrade(step, 1)
    upload(step, url)
    copy = download(url, tmp_path / "fresh")
    assert verify(copy) == verify(step)


def test_url_of_a_folder_gives_its_last_committed_step(
    save_step: SaveStep, tmp_path: Path, url: str
) -> None:
    for step in (1, 12, 3):
        upload(save_step(step), url)
    files, base = fsspec.core.url_to_fs(url)
    files.makedirs(f"{base}/step_00000099", exist_ok=True)
    files.pipe_file(f"{base}/step_00000099/0.bin", b"of an upload that died")
    assert download(url, tmp_path / "fresh").name == "step_00000012"


def test_the_manifest_goes_up_last(
    save_step: SaveStep, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, base = fsspec.core.url_to_fs(url)
    order = []
    put_file = type(files).put_file

    def watched(self: object, lpath: str, rpath: str, **kwargs: object) -> None:
        order.append(rpath.removeprefix(f"{base}/step_00000001/"))
        put_file(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(type(files), "put_file", watched)
    upload(save_step(1), url)
    assert order == ["engine/shards/0.bin", "trainer/state.json", "manifest.json"]


def test_a_committed_copy_is_never_overwritten(
    save_step: SaveStep, tmp_path: Path, url: str
) -> None:
    upload(save_step(1), url)
    other = save_step(1, content="other", root=tmp_path / "other")
    with pytest.raises(
        CheckpointError, match=r"step_00000001 already exists and is never overwritten"
    ):
        upload(other, url)
    assert (
        download(url, tmp_path / "fresh") / "engine/shards/0.bin"
    ).read_text() == "weights of step 1"


def test_interrupted_upload_is_not_a_step_and_can_be_repeated(
    save_step: SaveStep, tmp_path: Path, url: str
) -> None:
    step = save_step(1)
    files, base = fsspec.core.url_to_fs(url)
    files.makedirs(f"{base}/step_00000001/engine/shards", exist_ok=True)
    files.pipe_file(f"{base}/step_00000001/engine/shards/0.bin", b"half")
    with pytest.raises(IncompleteCheckpointError, match=r"has no committed step"):
        download(url, tmp_path / "fresh")
    upload(step, url)
    verify(download(url, tmp_path / "fresh"))


def test_other_files_at_the_url_are_not_changed(save_step: SaveStep, url: str) -> None:
    files, base = fsspec.core.url_to_fs(url)
    files.makedirs(f"{base}/step_00000001", exist_ok=True)
    files.pipe_file(f"{base}/step_00000001/thesis.pdf", b"years")
    with pytest.raises(
        CheckpointError, match=r"contains thesis.pdf, which is not a file of this step"
    ):
        upload(save_step(1), url)
    assert files.cat_file(f"{base}/step_00000001/thesis.pdf") == b"years"


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_damage_behind_the_url_is_refused_naming_the_file(
    save_step: SaveStep, tmp_path: Path, url: str, damage: str
) -> None:
    upload(save_step(1), url)
    files, base = fsspec.core.url_to_fs(url)
    if damage == "missing":
        files.rm(f"{base}/step_00000001/engine/shards/0.bin")
    else:
        files.pipe_file(f"{base}/step_00000001/engine/shards/0.bin", b"weights of step 2")
    with pytest.raises(
        DamagedCheckpointError, match=r"engine/shards/0.bin of .* (is missing|has another checksum)"
    ):
        download(url, tmp_path / "fresh")
    assert list((tmp_path / "fresh").iterdir()) == []


def test_download_does_not_overwrite_a_local_step(
    save_step: SaveStep, tmp_path: Path, url: str
) -> None:
    upload(save_step(1), url)
    with pytest.raises(CheckpointError, match=r"already exists and is never overwritten"):
        download(url, tmp_path)


def test_a_full_disk_stops_the_download_cleanly(
    save_step: SaveStep, small_disk: Path, url: str
) -> None:
    upload(save_step(1, content="w" * 400_000), url)
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved: .*No space left"):
        download(url, small_disk)
    assert list(small_disk.iterdir()) == []


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"gopher://x can't be opened \(.*gopher"):
        download("gopher://x", "nowhere")


def test_error_without_fsspec_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        CheckpointError,
        match=r"memory://x needs fsspec, which is not installed: pip install fsspec",
    ):
        download("memory://x", "nowhere")
    monkeypatch.undo()
    importlib.import_module("fsspec.core")


def test_download_does_not_delete_a_running_save(
    save_step: SaveStep, tmp_path: Path, url: str
) -> None:
    upload(save_step(1), url)
    running = begin_checkpoint(tmp_path / "fresh", 5)
    download(url, tmp_path / "fresh")
    assert running.staging.is_dir()
