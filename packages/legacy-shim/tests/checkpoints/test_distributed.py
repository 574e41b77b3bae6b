"""Shards of every placement, as the installed torch pickles them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from old_files import Box, write_fsdp, write_sharded
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from temper_legacy_shim.checkpoints import rank_files
from temper_legacy_shim.checkpoints.files.lazy import (
    Element,
    InMemory,
    LazyTensor,
    Piece,
    as_torch,
    blocks,
    buffered_blocks,
    read_all,
)
from temper_legacy_shim.checkpoints.files.sharded import covering, shard_box
from temper_legacy_shim.checkpoints.files.tensors import Placement as Placed
from temper_legacy_shim.checkpoints.layouts import find_roles
from temper_legacy_shim.errors import DamagedFileError, LayoutError


def _tensors() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"matrix": (7, 10), "cube": (3, 5, 4), "vector": (5,), "row": (1, 6), "number": ()}
    made = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return made | {
        "half": torch.randn(6, 3, generator=g).to(torch.bfloat16),
        "ids": torch.arange(9),
        "none": torch.zeros(0, 4),
    }


def _read(folder: Path) -> dict[str, LazyTensor]:
    (role,) = find_roles(folder)
    return rank_files.read_weights(role.fsdp_files["model"], where=folder)


def _assert_equal(have: Mapping[str, LazyTensor], want: Mapping[str, Tensor]) -> None:
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(as_torch(have[name]), tensor), name
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for read in (blocks, buffered_blocks):
            in_blocks = b"".join(block.tobytes() for block in read(have[name], block_bytes=8))
            assert in_blocks == content, (name, read)


@pytest.mark.parametrize(
    ("mesh_shape", "placement"),
    [
        ((2,), [Shard(0)]),
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((3,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 3), [Replicate(), Shard(1)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2, 2), [Replicate(), Shard(0), Shard(1)]),
    ],
)
def test_every_placement_is_put_together(
    tmp_path: Path, mesh_shape: Sequence[int], placement: Sequence[Placement]
) -> None:
    tensors = _tensors()
    placements = {name: list(placement) for name in ("matrix", "cube", "half")}
    write_fsdp(
        tmp_path, tensors, mesh_shape=mesh_shape, placements=placements, plain=["number", "ids"]
    )
    _assert_equal(_read(tmp_path), tensors)


def test_a_rank_s_file_under_another_rank_s_name_is_noticed(tmp_path: Path) -> None:
    write_fsdp(tmp_path, _tensors(), mesh_shape=(3,), plain=["number"])
    (tmp_path / "model_world_size_3_rank_1.pt").write_bytes(
        (tmp_path / "model_world_size_3_rank_2.pt").read_bytes()
    )
    with pytest.raises(DamagedFileError, match="matrix"):
        _read(tmp_path)


@pytest.mark.parametrize(("mesh_shape", "rank"), [((2,), 1), ((2, 2), 3)])
def test_a_copy_of_another_rank_s_file_is_noticed_where_all_shards_have_one_size(
    tmp_path: Path, mesh_shape: Sequence[int], rank: int
) -> None:
    write_fsdp(tmp_path, {"matrix": torch.arange(24.0).reshape(8, 3)}, mesh_shape=mesh_shape)
    world = 2 ** len(mesh_shape)
    (tmp_path / f"model_world_size_{world}_rank_{rank}.pt").write_bytes(
        (tmp_path / f"model_world_size_{world}_rank_0.pt").read_bytes()
    )
    with pytest.raises(
        DamagedFileError,
        match=rf"rank_{rank}\.pt.*matrix was written at \(0.* is at \(1.*another rank's file",
    ):
        _read(tmp_path)


def test_a_missing_rank_is_named_before_anything_is_read(tmp_path: Path) -> None:
    write_fsdp(tmp_path, _tensors(), mesh_shape=(3,), plain=["number"])
    (tmp_path / "model_world_size_3_rank_1.pt").unlink()
    with pytest.raises(LayoutError, match=r"model_world_size_3_rank_1\.pt"):
        find_roles(tmp_path)


def test_files_of_two_world_sizes_are_not_mixed(tmp_path: Path) -> None:
    for world in (2, 3):
        write_fsdp(tmp_path, _tensors(), mesh_shape=(world,), plain=["number"])
    with pytest.raises(LayoutError, match="world sizes"):
        find_roles(tmp_path)


def test_a_tensor_that_one_rank_lacks_is_named(tmp_path: Path) -> None:
    write_fsdp(tmp_path / "a", _tensors(), plain=["number"])
    write_fsdp(tmp_path / "b", {"matrix": torch.zeros(7, 10)})
    (tmp_path / "b/model_world_size_2_rank_0.pt").write_bytes(
        (tmp_path / "a/model_world_size_2_rank_0.pt").read_bytes()
    )
    with pytest.raises(DamagedFileError, match="has no cube"):
        _read(tmp_path / "b")


def test_views_with_strides_and_offsets_are_gathered(tmp_path: Path) -> None:
    complete = torch.arange(60.0).reshape(6, 10)
    tensors = {
        "turned": complete.t(),
        "part": complete[1:4, 2:5],
        "steps": complete[::2],
        "tail": complete[5],
        "same": complete,
    }
    torch.save(tensors, tmp_path / "model_world_size_1_rank_0.pt")
    _assert_equal(_read(tmp_path), tensors)


def test_parameters_are_tensors(tmp_path: Path) -> None:
    torch.save(
        {"w": torch.nn.Parameter(torch.ones(2, 3))}, tmp_path / "model_world_size_1_rank_0.pt"
    )
    assert torch.equal(as_torch(_read(tmp_path)["w"]), torch.ones(2, 3))


def test_a_strided_split_goes_over_what_the_later_axis_leaves() -> None:
    # FSDP over tensor parallelism: the inner axis cuts first; rank (1, 0) of a 2 by 2 mesh holds
    # rows 2 and 3 of 8.
    placements = (Placed(dim=0, split_factor=2), Placed(dim=0))
    assert shard_box((8, 3), placements, mesh_shape=(2, 2), coordinate=(1, 0)) == ((2, 0), (2, 3))
    assert shard_box((8, 3), placements, mesh_shape=(2, 2), coordinate=(0, 1)) == ((4, 0), (2, 3))


@pytest.mark.filterwarnings(
    "ignore:Please use DTensor instead:FutureWarning"
)  # torch, about the class that is tested here
@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (3, 6)), ((3, 0), (2, 6))],
        [((0, 0), (5, 4)), ((0, 4), (5, 2))],
        [((0, 0), (3, 4)), ((0, 4), (3, 2)), ((3, 0), (2, 4)), ((3, 4), (2, 2))],
    ],
    ids=["rows", "columns", "both"],
)
def test_sharded_tensors_of_any_dimension_stand_next_to_what_every_rank_holds(
    tmp_path: Path, boxes: Sequence[Box]
) -> None:
    draw = torch.Generator().manual_seed(0)
    matrix, everywhere = torch.randn(5, 6, generator=draw), torch.randn(4, generator=draw)
    write_sharded(tmp_path, {"matrix": (matrix, boxes)}, plain={"everywhere": everywhere})
    _assert_equal(_read(tmp_path), {"everywhere": everywhere, "matrix": matrix})


@pytest.mark.filterwarnings(
    "ignore:Please use DTensor instead:FutureWarning"
)  # torch, about the class that is tested here
def test_a_sharded_tensor_with_a_hole_is_refused(tmp_path: Path) -> None:
    write_sharded(
        tmp_path, {"matrix": (torch.ones(5, 6), [((0, 0), (3, 6)), ((3, 0), (2, 6))])}, plain={}
    )
    (tmp_path / "model_world_size_2_rank_1.pt").write_bytes(
        (tmp_path / "model_world_size_2_rank_0.pt").read_bytes()
    )
    with pytest.raises(DamagedFileError, match="18 of 30 elements of matrix"):
        _read(tmp_path)


class _Counting(InMemory):
    """A tensor that counts how often it is looked at."""

    looks = 0

    @property
    def shape(self) -> tuple[int, ...]:
        type(self).looks += 1
        return super().shape


def test_stacked_experts_are_not_searched_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # 512 experts that each look through all 512 parts are still quick; a large mixture has tens of
    # thousands of both.
    monkeypatch.setattr(_Counting, "looks", 0)
    layers, experts = 8, 64
    positions = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    parts = [
        Piece(offsets=(i, e, 0), tensor=_Counting(np.full((1, 1, 3), 100 * i + e, np.float32)))
        for i, e in positions
    ]
    complete = covering(
        "experts", parts, shape=(layers, experts, 3), like=parts[0].tensor, where="here"
    )
    of_layer = [Element(complete, layer) for layer in range(layers)]
    for layer, expert in positions:
        assert read_all(Element(of_layer[layer], expert)).tolist() == [100 * layer + expert] * 3
    assert _Counting.looks < 30 * len(parts)
