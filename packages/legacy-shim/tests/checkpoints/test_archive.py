"""Files of torch.save are read where they lie."""

import zipfile
from pathlib import Path

import pytest
import torch

from temper_legacy_shim.checkpoints.files.archive import Archive
from temper_legacy_shim.checkpoints.files.pickles import Inert, Persistent
from temper_legacy_shim.errors import DamagedFileError, LayoutError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(6, dtype=torch.float32)}, path)
    return path


def test_a_storage_is_read_from_its_position_in_the_file(saved: Path) -> None:
    archive = Archive(saved)
    value = archive.value()
    assert isinstance(value, dict)
    node = value["w"]
    assert isinstance(node, Inert)
    assert isinstance(node.arguments[0], Persistent)
    stretch = archive.storage(str(node.arguments[0].key[2]))
    raw = stretch.file.read(stretch.offset, stretch.num_bytes)
    assert torch.frombuffer(bytearray(raw), dtype=torch.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_an_archive_inside_a_larger_file_is_read(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    (tmp_path / "many.distcp").write_bytes(b"x" * 100 + content + b"y" * 50)
    assert isinstance(
        Archive(tmp_path / "many.distcp", start=100, length=len(content)).value(), dict
    )


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_of_before_zips_is_refused_with_what_to_do(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "model.pt"
    torch.save(
        {"w": torch.ones(6)}, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol
    )
    with pytest.raises(LayoutError, match=r"before torch 1\.6.*weights_only=True"):
        Archive(path).value()


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_named(saved: Path, fraction: float) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(fraction * len(content))])
    with pytest.raises(DamagedFileError, match=r"model\.pt"):
        Archive(saved).value()


def test_an_empty_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(DamagedFileError, match=r"model\.pt"):
        Archive(tmp_path / "model.pt").value()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"absent\.pt"):
        Archive(tmp_path / "absent.pt")


def test_a_compressed_entry_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("model/data.pkl", b"\x80\x02" + b"N0" * 100_000 + b"N.")
    with pytest.raises(DamagedFileError, match="compressed"):
        Archive(path).value()


def test_a_storage_that_is_not_there_is_named(saved: Path) -> None:
    with pytest.raises(DamagedFileError, match="no storage '17'"):
        Archive(saved).storage("17")
