"""Fuzzed files give an error of the package or a tensor, quickly, and nothing is written."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from old_files import write_fsdp
from test_megatron import LAYERS
from test_megatron_flattened import write_flattened
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Shard

from temper_legacy_shim.checkpoints import rank_files
from temper_legacy_shim.checkpoints.files.archive import Archive
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, blocks, num_bytes
from temper_legacy_shim.checkpoints.files.pickles import load_inert
from temper_legacy_shim.checkpoints.fsdp_moments import read_optimizer
from temper_legacy_shim.checkpoints.huggingface import model_directory
from temper_legacy_shim.checkpoints.layouts import find_roles
from temper_legacy_shim.errors import ShimError

EVERYDAY, NIGHTLY = 150, 5000
"""Inputs for each kind of file."""
_TENSORS = {
    "model.embed_tokens.weight": torch.randn(5, 4),
    "model.layers.0.a.weight": torch.randn(4, 4),
    "model.norm.weight": torch.ones(4),
}

Read = Callable[[Path], None]


def _read_all(tensors: dict[str, LazyTensor]) -> None:
    for tensor in tensors.values():
        assert num_bytes(tensor) < 1 << 20, "a file of a few kilobytes announces more than it holds"
        for _ in blocks(tensor):
            pass


def _fsdp(folder: Path) -> None:
    (role,) = find_roles(folder)
    weights = rank_files.read_weights(role.fsdp_files["model"], where=folder)
    _read_all(weights)
    if "optim" in role.fsdp_files:
        result = read_optimizer(role, weights, parameters=list(weights))
        _read_all({name: kept.first for name, kept in result.moments.items()})


def _dist(folder: Path) -> None:
    _read_all(DistCheckpoint(folder).tensors)


def _safetensors(folder: Path) -> None:
    _read_all(model_directory.read_weights(folder))


def _write_optimizer(folder: Path) -> None:
    write_fsdp(folder, _TENSORS, mesh_shape=(1,))
    state = {
        i: {
            "step": torch.tensor(2.0),
            "exp_avg": torch.randn(t.numel()),
            "exp_avg_sq": torch.rand(t.numel()),
        }
        for i, t in enumerate([torch.zeros(24), torch.zeros(16)])
    }
    torch.save(
        {"state": state, "param_groups": [{"params": [0, 1], "lr": 0.1}]},
        folder / "optim_world_size_1_rank_0.pt",
    )


def _write_dist(folder: Path) -> None:
    save(dict(_TENSORS), storage_writer=FileSystemWriter(folder), no_dist=True)


def _write_flattened(folder: Path) -> None:
    names = ("decoder.layers.mlp.linear_fc1.layer_norm_weight", "decoder.final_layernorm.weight")
    shapes = ((LAYERS, 6), (6,))
    state = {
        f"optimizer.state.exp_avg.{name}": torch.randn(shape)
        for name, shape in zip(names, shapes, strict=True)
    }
    write_flattened(folder, dict(_TENSORS), state)


def _write_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(dict(_TENSORS), folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(_TENSORS, "model-1.safetensors")})
    )


KINDS: dict[str, tuple[Callable[[Path], None], Read]] = {
    "fsdp": (lambda folder: write_fsdp(folder, _TENSORS), _fsdp),
    "optimizer": (_write_optimizer, _fsdp),
    "dist": (_write_dist, _dist),
    "flattened": (_write_flattened, _dist),
    "safetensors": (_write_safetensors, _safetensors),
}
_MUTATION = st.tuples(
    st.sampled_from(["flip", "cut", "drop", "double", "zero", "ones"]),
    st.floats(0, 1),
    st.integers(0, 255),
    st.integers(1, 64),
)


def _mutated(content: bytes, mutations: list[tuple[str, float, int, int]]) -> bytes:
    data = bytearray(content)
    for kind, fraction, value, length in mutations:
        at = int(fraction * max(len(data) - 1, 0))
        if kind == "flip" and data:
            data[at] ^= value
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + length]
        elif kind == "double":
            data[at:at] = data[at : at + length]
        else:
            data[at : at + length] = bytes([0 if kind == "zero" else 255]) * len(
                data[at : at + length]
            )
    return bytes(data)


def _fuzz(kind: str, folder: Path, *, examples: int) -> None:
    write, read = KINDS[kind]
    write(folder)
    read(folder)
    originals = {path: path.read_bytes() for path in sorted(folder.iterdir())}

    @settings(
        max_examples=examples,
        deadline=20_000,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    @given(
        index=st.integers(0, len(originals) - 1),
        mutations=st.lists(_MUTATION, min_size=1, max_size=4),
    )
    def _one(index: int, mutations: list[tuple[str, float, int, int]]) -> None:
        path = list(originals)[index]
        content = originals[path]
        # A mutation inside the pickle's own bytes is worth more than one in its padding.
        path.write_bytes(
            _inside_pickle(content, mutations)
            if mutations[0][2] % 2
            else _mutated(content, mutations)
        )
        try:
            read(folder)
        except ShimError:
            return
        finally:
            path.write_bytes(content)
            assert sorted(folder.iterdir()) == sorted(originals)

    _one()


def _inside_pickle(content: bytes, mutations: list[tuple[str, float, int, int]]) -> bytes:
    """Return the same zip with its data.pkl mutated and everything around it sound."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return _mutated(content, mutations)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, _mutated(data, mutations) if name.endswith("data.pkl") else data)
    return made.getvalue()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_raise_our_own_error_or_none(kind: str, tmp_path: Path) -> None:
    _fuzz(kind, tmp_path / "files", examples=EVERYDAY)


# Nightly: takes minutes. The test above draws fewer files every day.
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_thousand_mutated_files_raise_our_own_error_or_none(
    kind: str, tmp_path: Path
) -> None:
    _fuzz(kind, tmp_path / "files", examples=NIGHTLY)


_OPCODES = st.sampled_from(
    [
        *(bytes([code]) for code in b"(012N]})tldsuaeRbQ.\x81\x85\x86\x87\x8f\x90\x91\x93\x94\x95"),
        *(b"K\x01", b"q\x00", b"h\x00", b"X\x01\x00\x00\x00a"),
        *(
            b"ctorch\nSize\n",
            b"ctorch._utils\n_rebuild_tensor_v2\n",
            b"ccollections\nOrderedDict\n",
            b"cposix\nsystem\n",
        ),
    ]
)


@settings(max_examples=300, deadline=20_000, derandomize=True, database=None)
@given(opcodes=st.lists(_OPCODES, max_size=40))
def test_any_sequence_of_opcodes_ends_soon_with_a_value_or_our_error(opcodes: list[bytes]) -> None:
    try:
        load_inert(b"\x80\x04" + b"".join(opcodes) + b".", source="f")
    except ShimError:
        return


def test_a_tree_that_takes_for_ever_to_write_is_never_written(tmp_path: Path) -> None:
    # Sixty doublings of a tuple: as the shape of a tensor, as the key of a mapping, and as the
    # layout of a mesh.
    deep: object = ()
    for _ in range(60):
        deep = (deep, deep)
    tensor = pickle.dumps(deep, protocol=2)[2:-1]
    shape = (
        b"\x80\x02}X\x01\x00\x00\x00ac"
        b"torch._utils\n_rebuild_tensor_v2\n("
        b"N"
        b"K\x00" + tensor + tensor + b"\x89}tRs."
    )
    path = tmp_path / "model_world_size_1_rank_0.pt"
    path.write_bytes(shape)
    assert isinstance(Archive(path).value(), dict)
    with pytest.raises(ShimError, match="no storage"):
        rank_files.read_weights({0: path}, where=tmp_path)


def test_a_number_that_python_refuses_to_write_is_named_by_its_length(tmp_path: Path) -> None:
    torch.save({1 << 100_000: torch.ones(1)}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(ShimError, match="a number of 100001 bits is no name of a tensor"):
        _fsdp(tmp_path)


def test_a_position_on_the_mesh_that_takes_for_ever_to_write_is_never_written(
    tmp_path: Path,
) -> None:
    deep: object = ()
    for _ in range(60):
        deep = (deep, deep)
    write_fsdp(tmp_path, {"w": torch.ones(4, 2)}, mesh_shape=(1,))
    path = tmp_path / "model_world_size_1_rank_0.pt"
    state = torch.load(path, weights_only=False)
    state["w"].device_mesh._coordinate_on_dim = (deep,)
    torch.save(state, path)
    with pytest.raises(ShimError, match=r"was written at \(a tuple\) of its mesh"):
        _fsdp(tmp_path)


def test_a_shard_along_a_dimension_that_is_not_there_is_refused(tmp_path: Path) -> None:
    # Found by the fuzzer: one flipped bit turned Shard(dim=0) into Shard(dim=58).
    write_fsdp(tmp_path, {"w": torch.ones(4, 2)}, placements={"w": [Shard(58)]})
    with pytest.raises(ShimError, match="along a dimension"):
        _fsdp(tmp_path)
