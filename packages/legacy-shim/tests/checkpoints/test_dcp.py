"""torch reads files that were written without it."""

import errno
import fcntl
import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from temper_legacy_shim.checkpoints.files import hashed_files
from temper_legacy_shim.checkpoints.files.archive import write_archive
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.dtypes import BY_NAME
from temper_legacy_shim.checkpoints.files.hashed_files import HashingWriter
from temper_legacy_shim.checkpoints.files.lazy import InMemory, read_all
from temper_legacy_shim.checkpoints.files.pickles import dump_inert, load_inert
from temper_legacy_shim.checkpoints.files.tensors import describe_tensor
from temper_legacy_shim.checkpoints.temper import dcp
from temper_legacy_shim.checkpoints.temper.dcp import join, write_group

ARRAYS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(4, 3),
    "scalar": np.array(7, np.float32),
    "empty": np.empty((0, 3), np.float32),
    "vector": np.arange(5, dtype=np.float32),
}
TENSORS = {name: InMemory(array) for name, array in ARRAYS.items()}


def _described(folder: Path) -> Metadata:
    """Return torch's view of a description, without the ids of the save."""
    metadata = FileSystemReader(folder).read_metadata()
    return replace(metadata, storage_meta=StorageMeta(), storage_data={})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_description_equals_that_of_torch(tmp_path: Path) -> None:
    write_group(tmp_path / "ours", TENSORS, progress=lambda _: None)
    state = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
    save(state, storage_writer=FileSystemWriter(tmp_path / "torch"), no_dist=True)
    assert replace(_described(tmp_path / "torch"), planner_data=None) == _described(
        tmp_path / "ours"
    )
    result, expected = (
        {(index.fqn, index.offset, index.index) for index in reader.read_metadata().storage_data}
        for reader in (FileSystemReader(tmp_path / "ours"), FileSystemReader(tmp_path / "torch"))
    )
    assert result == {(name, offset, index or 0) for name, offset, index in expected}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_groups_that_were_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "_CHUNK_BYTES", 24)  # two rows of the matrix
    for number, names in enumerate((("matrix", "empty"), ("scalar", "vector"))):
        group = {name: TENSORS[name] for name in names}
        write_group(tmp_path / str(number), group, progress=lambda _: None)
    groups = [tmp_path / "0", tmp_path / "1"]
    join(
        tmp_path / "all", groups, {**TENSORS, "copy": TENSORS["matrix"]}, copies={"copy": "matrix"}
    )
    state = {name: torch.full(array.shape, -1.0) for name, array in ARRAYS.items()}
    state["copy"] = torch.full((4, 3), -1.0)
    load(state, storage_reader=FileSystemReader(tmp_path / "all"), no_dist=True)
    for name, array in {**ARRAYS, "copy": ARRAYS["matrix"]}.items():
        assert state[name].numpy().tolist() == array.tolist()
    assert len(FileSystemReader(tmp_path / "all").read_metadata().storage_data) == 2 + 2 + 1 + 1 + 1


def test_names_of_tensors_with_nan_or_infinity_are_returned(tmp_path: Path) -> None:
    spoilt = {"nan": np.array([1, np.nan], np.float32), "infinite": np.array([-np.inf], np.float32)}
    tensors = {**TENSORS, **{name: InMemory(array) for name, array in spoilt.items()}}
    data, _ = write_group(tmp_path / "group", tensors, progress=lambda _: None)
    assert data.with_nan == ("nan", "infinite")


@pytest.mark.parametrize("name", BY_NAME)
def test_torch_loads_every_dtype(name: str, tmp_path: Path) -> None:
    dtype = BY_NAME[name]
    array = np.frombuffer(bytes(range(48)), dtype.container).reshape(2, -1)
    array = array % 2 if name == "bool" else array
    node = describe_tensor(array.shape, dtype, key="k")
    with open(tmp_path / "file.pt", "wb") as file:
        write_archive(file.write, dump_inert({"a": node}), {"k": [memoryview(array.tobytes())]})
    tensor = torch.load(tmp_path / "file.pt", weights_only=True)["a"]
    assert tensor.dtype == getattr(torch, name)
    assert tensor.shape == array.shape
    assert tensor.view(torch.uint8).numpy().tobytes() == array.tobytes()


def test_pickle_that_was_read_is_written_with_the_same_content(tmp_path: Path) -> None:
    write_group(tmp_path / "group", TENSORS, progress=lambda _: None)
    content = (tmp_path / "group/.metadata").read_bytes()
    (tmp_path / "group/.metadata").write_bytes(dump_inert(load_inert(content, source="test")))
    assert read_all(DistCheckpoint(tmp_path / "group").tensors["matrix"])[3].tolist() == [9, 10, 11]
    with pytest.raises(TypeError, match="a set can't be pickled"):
        dump_inert({"a": {1}})


@pytest.mark.parametrize("number", [0, -1, 127, 128, 255, -128, -129, 2**31, -(2**31), 2**63])
def test_numbers_are_pickled(number: int) -> None:
    assert load_inert(dump_inert([number, True, None]), source="test") == [number, True, None]


@pytest.mark.parametrize("is_compared", [False, True])
@pytest.mark.parametrize("size", [0, 1, 4096, 10_000, (2 << 20) + 17, 5 << 20])
def test_file_has_the_bytes_that_were_put(size: int, is_compared: bool, tmp_path: Path) -> None:
    content = np.random.default_rng(size).bytes(size)
    with HashingWriter(tmp_path / "f", is_compared=is_compared) as writer:
        for start in range(0, size, 700_001):
            writer.put(content[start : start + 700_001])
    record = writer.record("f")
    assert (tmp_path / "f").read_bytes() == content
    assert record.num_bytes == size
    assert record.checksum == f"blake3:{blake3(content).hexdigest()}"


@pytest.mark.parametrize("is_compared", [False, True])
def test_file_is_written_where_direct_writes_are_refused(
    is_compared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half a page: no file system takes direct writes of memory that begins there.
    monkeypatch.setattr(hashed_files, "_BUFFER_BYTES", 777)
    with HashingWriter(tmp_path / "f", is_compared=is_compared) as writer:
        writer.put(bytes(range(250)) * 100)
    assert (tmp_path / "f").read_bytes() == bytes(range(250)) * 100


@pytest.mark.parametrize("is_compared", [False, True])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_is_written_on_a_file_system_without_direct_writes(
    number: int, is_compared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with HashingWriter(tmp_path / "f", is_compared=is_compared) as writer:
        writer.put(b"abc")
    assert (tmp_path / "f").read_bytes() == b"abc"


def test_file_of_another_process_stays_where_direct_writes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    (tmp_path / "f").write_bytes(b"of another process")
    with pytest.raises(FileExistsError):
        HashingWriter(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"of another process"


def test_full_disk_ends_the_writer_with_its_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, limits[1]))
    try:
        with (
            pytest.raises(OSError, match=os.strerror(errno.EFBIG)),
            HashingWriter(tmp_path / "f") as writer,
        ):
            writer.put(bytes(8 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
