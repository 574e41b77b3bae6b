"""Test that reading torch's distributed checkpoints executes no code of their metadata."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from temper_engine_api.checkpoint.saved_state import SafeDcpReader, open_dcp_state
from temper_engine_api.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_are_read_as_torch_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"a": torch.arange(6).view(2, 3).to(dtype), "b": {"c": torch.ones((), dtype=dtype)}}
    dcp.save(state, checkpoint_id=tmp_path)
    read: dict[str, Any] = {
        "a": torch.zeros(2, 3, dtype=dtype),
        "b": {"c": torch.zeros((), dtype=dtype)},
    }
    dcp.load(read, storage_reader=SafeDcpReader(tmp_path))
    assert read["a"].equal(state["a"])
    assert read["b"]["c"].equal(state["b"]["c"])  # type: ignore[index]
    assert (
        SafeDcpReader(tmp_path).read_metadata().state_dict_metadata
        == dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    )


def test_metadata_is_read_once_for_all_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save({f"parameter.{i}": torch.full((2,), float(i)) for i in range(3)}, checkpoint_id=folder)
    state = open_dcp_state(str(tmp_path))
    # Reading it again for each of many thousand tensors would take hours.
    (folder / ".metadata").unlink()
    assert [weight.tensor.tolist() for weight in state.iterate_weights()] == [
        [float(name)] * 2 for name in state.weights
    ]


def test_metadata_with_code_in_it_is_refused_and_not_executed(tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(proof)))
    with pytest.raises(CheckpointError, match=r"\.metadata names .*\. Nothing was executed"):
        SafeDcpReader(tmp_path).read_metadata()
    assert not proof.exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert proof.exists(), "the standard unpickler executes this pickle"


def test_metadata_cannot_change_a_class_of_this_process(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(
        # What the pickle of an object does: call a class, then set attributes with BUILD (b"b").
        # Here BUILD is applied to the class itself.
        b"cpathlib\nPosixPath\n(N}Vparent\nVelsewhere\nstb."
    )
    with pytest.raises(CheckpointError, match=r"\.metadata sets attributes of a type"):
        SafeDcpReader(tmp_path).read_metadata()
    assert Path("/folder/file").parent == Path("/folder")


@pytest.mark.parametrize(
    "change", [lambda data, i: data[:i], lambda data, i: data[:i] + b"\xff" + data[i + 1 :]]
)
def test_metadata_with_any_byte_changed_is_refused_or_read(
    tmp_path: Path, change: Callable[[bytes, int], bytes]
) -> None:
    dcp.save({"a": torch.ones(2, 3)}, checkpoint_id=tmp_path)
    content = (tmp_path / ".metadata").read_bytes()
    num_refused = 0
    for position in range(len(content)):
        (tmp_path / ".metadata").write_bytes(change(content, position))
        try:
            SafeDcpReader(tmp_path).read_metadata()
        except CheckpointError:
            num_refused += 1
    assert num_refused > len(content) // 2


def test_entries_that_torch_would_unpickle_are_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(1), "steps": 3}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"names .*BytesStorageMetadata"):
        SafeDcpReader(tmp_path).read_metadata()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1])])
def test_damaged_metadata_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata (can't be read|contains a list)"):
        SafeDcpReader(tmp_path).read_metadata()
