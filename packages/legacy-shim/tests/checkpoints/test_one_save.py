"""Checkpoints with parts of different saves are rejected, whatever the target."""

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from old_files import write_fsdp
from safetensors.torch import load_file, save_file
from torch import Tensor

from temper_legacy_shim.checkpoints import Options, convert, find_roles, plan_jobs
from temper_legacy_shim.checkpoints.conversion import finished
from temper_legacy_shim.checkpoints.files.lazy import as_torch
from temper_legacy_shim.checkpoints.model import OldModel, Sources, read_model
from temper_legacy_shim.errors import DamagedFileError, LayoutError, UsageError

TARGETS = ("hf", "temper")


@pytest.fixture
def copied(samples: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a copy of a sample's role directory, which a test may change."""

    def _copied(name: str) -> Path:
        step = next((samples / name / "checkpoints").glob("global_step_*"))
        shutil.copytree(step, tmp_path / name / step.name)
        return tmp_path / name / step.name / "actor"

    return _copied


def _rewrite(path: Path, change: Callable[[str, bytes], bytes], *, without: str = "\0") -> None:
    """Write a file of torch.save with changed entries, without those of ``without``."""
    with zipfile.ZipFile(path) as old:
        entries = [(entry.filename, old.read(entry)) for entry in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, content in entries:
            if not name.endswith(without):
                new.writestr(name, change(name, content))


def _list_storages(old: float, new: float) -> Callable[[str, bytes], bytes]:
    """Replace float32 storages of this single number, as Adam keeps its step."""
    before, after = (np.float32(value).tobytes() for value in (old, new))
    return lambda name, content: after if "/data/" in name and content == before else content


def _convert(role: Path, target: str, out: Path) -> None:
    (job,) = plan_jobs(role, out)
    convert(job, Options(target=target, checks_names=False), Sources())  # type: ignore[arg-type]


def _read(role: Path, sources: Sources | None = None) -> OldModel:
    (result,) = find_roles(role)
    return read_model(result, sources or Sources())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["v0.6.1_fsdp2-actor-untied_ws4", "v0.2_fsdp1-actor-tied_ws2"])
def test_optimizer_file_of_another_step_is_refused(
    copied: Callable[[str], Path], tmp_path: Path, target: str, name: str
) -> None:
    role = copied(name)
    (file,) = role.glob("optim_world_size_*_rank_1.pt")
    _rewrite(file, _list_storages(2.0, 3.0))
    with pytest.raises(
        DamagedFileError,
        match=(
            r"optim_world_size_\d_rank_1.pt has made 3 updates of parameter 0, but .*rank_0.pt 2: "
            r".*"
        ),
    ):
        _convert(role, target, tmp_path / "out")


@pytest.mark.parametrize("target", TARGETS)
def test_schedule_of_another_step_is_refused(
    copied: Callable[[str], Path], tmp_path: Path, target: str
) -> None:
    role = copied("v0.6.1_fsdp2-actor-untied_ws4")
    file = role / "extra_state_world_size_4_rank_1.pt"
    state = torch.load(file, weights_only=False)
    state["lr_scheduler"]["last_epoch"] = 3
    torch.save(state, file)
    with pytest.raises(
        DamagedFileError,
        match=r"extra_state_world_size_4_rank_1.pt has last_epoch 3, but .*rank_0.pt 2",
    ):
        _convert(role, target, tmp_path / "out")


def test_optimizer_file_with_another_learning_rate_is_refused(
    copied: Callable[[str], Path],
) -> None:
    role = copied("v0.6.1_fsdp2-actor-untied_ws4")
    lr, other = (b"G" + np.array(value, ">f8").tobytes() for value in (0.01, 0.02))
    _rewrite(
        role / "optim_world_size_4_rank_2.pt", lambda name, content: content.replace(lr, other)
    )
    with pytest.raises(
        DamagedFileError, match=r"optim_world_size_4_rank_2.pt has lr 0.02, but .*rank_0.pt 0.01"
    ):
        _read(role)


def test_file_of_another_torch_is_refused(copied: Callable[[str], Path]) -> None:
    # torch 2.7 and newer write .format_version; a file without it is older.
    role = copied("v0.6.1_fsdp2-actor-untied_ws4")
    _rewrite(
        role / "model_world_size_4_rank_1.pt",
        lambda name, content: content,
        without="/.format_version",
    )
    with pytest.raises(
        DamagedFileError,
        match=r"rank_1.pt was written by another version of torch than .*rank_0.pt",
    ):
        _read(role)


def test_rank_of_another_torch_is_refused_by_its_mesh(
    copied: Callable[[str], Path], samples: Path
) -> None:
    role = copied("v0.7.1_fsdp2-actor-untied_ws2")
    older = (
        next((samples / "v0.4.1_fsdp2-actor-untied_ws2/checkpoints").glob("*/actor"))
        / "model_world_size_2_rank_1.pt"
    )
    shutil.copy(older, role / older.name)
    with pytest.raises(
        DamagedFileError,
        match=r"rank_1.pt was written by another version of torch than .*rank_0.pt",
    ):
        _read(role)


def test_damaged_optimizer_file_is_noted_where_weights_only_are_requested(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    role = copied("v0.6.1_fsdp2-actor-untied_ws4")
    file = role / "optim_world_size_4_rank_1.pt"
    file.write_bytes(file.read_bytes()[:1000])
    (note,) = (each for each in _read(role).notes if "optim" in each)
    assert note.startswith("optim_world_size_4_rank_1.pt was not compared")
    _convert(role, "hf", tmp_path / "out")
    with pytest.raises(DamagedFileError, match=r"rank_1\.pt"):
        _convert(role, "temper", tmp_path / "resumed")


def _replicated_weights(folder: Path, *, second: float) -> None:
    """Build two replicas of two shards; the second replica holds other numbers."""
    write_fsdp(folder, {"model.norm.weight": torch.full((8, 4), 1.0)}, mesh_shape=(2, 2))
    first = {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name.endswith(("rank_0.pt", "rank_1.pt"))
    }
    write_fsdp(folder, {"model.norm.weight": torch.full((8, 4), second)}, mesh_shape=(2, 2))
    for name, content in first.items():
        (folder / name).write_bytes(content)


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    _replicated_weights(tmp_path / "actor", second=1.5)
    with pytest.raises(
        DamagedFileError,
        match=r"model.norm.weight differs between ranks 0 and 2, which hold the same shard",
    ):
        _read(tmp_path / "actor")


def test_replicas_that_agree_are_read(tmp_path: Path) -> None:
    _replicated_weights(tmp_path / "actor", second=1.0)
    assert list(_read(tmp_path / "actor").weights) == ["model.norm.weight"]


@pytest.mark.parametrize(
    "name", ["v0.7.1_fsdp2-hsdp-actor-untied_ws4", "v0.3.0.post1_fsdp1-hsdp-actor-untied_ws4"]
)
def test_moments_of_replicas_that_differ_are_refused(
    copied: Callable[[str], Path], tmp_path: Path, samples: Path, name: str
) -> None:
    role = copied(name)

    def shifted(entry: str, content: bytes) -> bytes:
        is_moment = "/data/" in entry and len(content) > 64
        return (
            (np.frombuffer(content, np.float32) + np.float32(0.25)).tobytes()
            if is_moment
            else content
        )

    _rewrite(role / "optim_world_size_4_rank_3.pt", shifted)
    (job,) = plan_jobs(role, tmp_path / "out")
    sources = Sources(hf_config=samples / "_base/llama_untied") if "0.3.0" in name else Sources()
    with pytest.raises(
        DamagedFileError, match=r"differs between ranks 1 and 3, which hold the same shard"
    ):
        convert(job, Options(target="temper", checks_names=False), sources)


# Megatron: stages, tensor-parallel ranks, configurations

LAYER = {
    "self_attention.linear_qkv.weight": (32, 16),
    "self_attention.linear_proj.weight": (16, 16),
    "mlp.linear_fc1.weight": (48, 16),
    "mlp.linear_fc2.weight": (16, 24),
    "self_attention.linear_qkv.layer_norm_weight": (16,),
    "mlp.linear_fc1.layer_norm_weight": (16,),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 4,
    "vocab_size": 12,
}
SPLIT = {"self_attention.linear_proj.weight": 1, "mlp.linear_fc2.weight": 1}
FULL = ("layer_norm_weight", "final_layernorm.weight")


def _full(*, is_tied: bool) -> list[dict[str, Tensor]]:
    """Return the two stages of two layers under Megatron's names, whole."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    stages: list[dict[str, Tensor]] = [
        {
            f"decoder.layers.{layer}.{name}": drawn(*shape)
            for layer in range(2)
            for name, shape in LAYER.items()
        }
        for _ in range(2)
    ]
    stages[0] = {"embedding.word_embeddings.weight": drawn(12, 16)} | stages[0]
    stages[1]["decoder.final_layernorm.weight"] = drawn(16)
    stages[1]["output_layer.weight"] = (
        stages[0]["embedding.word_embeddings.weight"].clone() if is_tied else drawn(12, 16)
    )
    return stages


def _part(name: str, tensor: Tensor, rank: int) -> Tensor:
    if name.endswith(FULL):
        return tensor.clone()
    if "linear_fc1" in name:
        gate, up = tensor.chunk(2)
        return torch.cat((gate.chunk(2)[rank], up.chunk(2)[rank]))
    dim = next((dim for end, dim in SPLIT.items() if name.endswith(end)), 0)
    return tensor.chunk(2, dim=dim)[rank].clone()


def _write_megatron(role: Path, *, is_tied: bool, order: Mapping[str, str] | None = None) -> Path:
    """Return the files of two tensor ranks and two stages.

    ``order`` says into which folder goes what another one should hold.
    """
    for pp, stage in enumerate(_full(is_tied=is_tied)):
        for tp in range(2):
            name = f"mp_rank_{tp:02d}_{pp:03d}"
            folder = role / "model" / (order or {}).get(name, name)
            folder.mkdir(parents=True)
            torch.save(
                {key: _part(key, tensor, tp) for key, tensor in stage.items()}, folder / "model.pt"
            )
    (role / "hf_config_and_tokenizer").mkdir()
    (role / "hf_config_and_tokenizer/config.json").write_text(
        json.dumps(CONFIG | {"tie_word_embeddings": is_tied})
    )
    return role


def _swapped(*pairs: tuple[str, str]) -> dict[str, str]:
    return {a: b for pair in pairs for a, b in (pair, pair[::-1])}


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_and_tensor_ranks_in_order_are_read(tmp_path: Path, is_tied: bool) -> None:
    model = _read(_write_megatron(tmp_path / "actor", is_tied=is_tied))
    assert not model.notes
    assert ("lm_head.weight" in model.weights) != is_tied


def test_swapped_stages_are_refused(tmp_path: Path) -> None:
    order = _swapped(("mp_rank_00_000", "mp_rank_00_001"), ("mp_rank_01_000", "mp_rank_01_001"))
    role = _write_megatron(tmp_path / "actor", is_tied=False, order=order)
    with pytest.raises(
        DamagedFileError,
        match=r"final_layernorm.weight is in stage 0, but belongs to the last: .* swapped",
    ):
        _read(role)


def test_tensor_ranks_that_are_swapped_in_one_stage_are_refused_where_embeddings_are_tied(
    tmp_path: Path,
) -> None:
    role = _write_megatron(
        tmp_path / "actor", is_tied=True, order=_swapped(("mp_rank_00_000", "mp_rank_01_000"))
    )
    with pytest.raises(
        DamagedFileError, match=r"output_layer.weight differs from embedding.word_embeddings.weight"
    ):
        _read(role)


def test_tensor_rank_of_another_step_is_refused_by_its_norms(tmp_path: Path) -> None:
    role = _write_megatron(tmp_path / "actor", is_tied=False)
    file = role / "model/mp_rank_01_001/model.pt"
    state = torch.load(file)
    torch.save({name: tensor + 0.5 for name, tensor in state.items()}, file)
    with pytest.raises(
        DamagedFileError, match=r"decoder.*norm.* differs between tensor ranks 0 and 1"
    ):
        _read(role)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 8),
        ("num_query_groups", 4),
        ("num_layers", 2),
        ("hidden_size", 32),
        ("kv_channels", 8),
    ],
)
def test_transformer_config_that_contradicts_the_config_is_refused(
    tmp_path: Path, key: str, value: int
) -> None:
    role = _write_megatron(tmp_path / "actor", is_tied=False)
    saved = {
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "num_layers": 4,
        "hidden_size": 16,
        "kv_channels": 4,
    }
    (role / "transformer_config.json").write_text(json.dumps(saved))
    _read(role)
    (role / "transformer_config.json").write_text(json.dumps(saved | {key: value}))
    with pytest.raises(
        UsageError, match=rf"transformer_config.json has {key} = {value}, but .*config.json"
    ):
        _read(role)


def test_config_of_other_heads_is_refused_next_to_a_genuine_transformer_config(
    copied: Callable[[str], Path],
) -> None:
    role = copied("v0.7.1_megatron-distckpt-tp2")
    path = role / "huggingface/config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8})
    )
    with pytest.raises(
        UsageError,
        match=r"transformer_config.json has num_attention_heads = 4, but .*config.json.* = 8",
    ):
        _read(role)


@pytest.mark.parametrize("target", TARGETS)
def test_another_number_of_ranks_in_fsdp_config_is_refused(
    target: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    role = copied("v0.7.1_fsdp2-actor-untied_ws2")
    (role / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 4}))
    with pytest.raises(DamagedFileError, match="says 4 ranks, but the files are of 2"):
        _convert(role, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Copies of the same weights in one role directory


def _shift(path: Path, name: str) -> None:
    tensors = load_file(path)
    tensors[name] = tensors[name] + 0.5
    save_file(tensors, path)


@pytest.mark.parametrize("target", TARGETS)
def test_exported_model_of_another_step_is_refused(
    target: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    role = copied("v0.5.0_fsdp2-actor-untied-hfmodel_ws2")
    _shift(role / "huggingface/model.safetensors", "model.norm.weight")
    with pytest.raises(
        DamagedFileError, match=r"huggingface holds another model.norm.weight than .*rank_0.pt"
    ):
        _convert(role, target, tmp_path / "out")


def test_exported_model_in_a_lower_precision_is_the_same_model(
    copied: Callable[[str], Path],
) -> None:
    role = copied("v0.5.0_fsdp2-actor-untied-hfmodel_ws2")
    path = role / "huggingface/model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    assert _read(role).notes == ()


def test_exported_model_that_is_damaged_is_noted(copied: Callable[[str], Path]) -> None:
    role = copied("v0.5.0_fsdp2-actor-untied-hfmodel_ws2")
    (role / "huggingface/model.safetensors").write_bytes(b"\0" * 8)
    (note,) = _read(role).notes
    assert "huggingface was not compared with the ranks' files" in note


def test_exported_adapter_of_another_step_is_refused(copied: Callable[[str], Path]) -> None:
    role = copied("v0.7.1_fsdp1-lora_ws2")
    path = role / "lora_adapter/adapter_model.safetensors"
    name = sorted(load_file(path))[0]
    _shift(path, name)
    with pytest.raises(DamagedFileError, match=r"lora_adapter holds another .*down_proj.lora_A"):
        _read(role)


def test_swapped_tensor_ranks_are_refused_next_to_an_exported_model(tmp_path: Path) -> None:
    pairs = [("mp_rank_00_000", "mp_rank_01_000"), ("mp_rank_00_001", "mp_rank_01_001")]
    sound = _read(_write_megatron(tmp_path / "sound", is_tied=False))
    role = _write_megatron(tmp_path / "actor", is_tied=False, order=_swapped(*pairs))
    _read(role)  # nothing else shows it
    (role / "huggingface").mkdir()
    save_file(
        {name: as_torch(tensor) for name, tensor in sound.weights.items()},
        role / "huggingface/model.safetensors",
    )
    with pytest.raises(DamagedFileError, match=r"huggingface holds another .*weight than .*model"):
        _read(role)


@pytest.mark.parametrize("other", ["dist_ckpt", "model/dist_ckpt"])
def test_files_of_two_layouts_are_refused(tmp_path: Path, other: str) -> None:
    role = _write_megatron(tmp_path / "actor", is_tied=False)
    (role / other).mkdir(parents=True)
    (role / other / ".metadata").write_bytes(b"")
    with pytest.raises(LayoutError, match=rf"holds weights in model/mp_rank_\* and {other}"):
        _read(role)


@pytest.mark.parametrize(
    "changed", ["optim_world_size_2_rank_1.pt", "huggingface/tokenizer.json", "../data.pt"]
)
def test_output_is_not_taken_for_finished_after_any_file_was_replaced(
    changed: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    role = copied("v0.7.1_fsdp2-actor-untied_ws2")
    (job,) = plan_jobs(role, tmp_path / "out")
    options = Options(target="temper", checks_names=False)
    receipt = convert(job, options, Sources())
    assert finished(job, options, Sources()) == receipt
    content = (role / changed).read_bytes()
    (role / changed).unlink()
    (role / changed).write_bytes(content)
    assert finished(job, options, Sources()) is None
