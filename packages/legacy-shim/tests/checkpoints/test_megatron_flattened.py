"""The optimizer of Megatron 0.11 to 0.15 in a distributed checkpoint.

Flat shards, cut over the data-parallel ranks.
"""

import math
import pickle
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from test_megatron import LAYERS, _assert_equal, _model, _stacked, _write_config
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from temper_legacy_shim.checkpoints import open_checkpoint
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.lazy import Rows, as_torch
from temper_legacy_shim.checkpoints.temper.training_state import resumable
from temper_legacy_shim.errors import DamagedFileError

TP = 2
# Shards along each dimension, as tensor-parallel ranks hold them; gate and up are shards of their
# own.
COUNTS = {
    "linear_qkv.weight": (LAYERS, TP, 1),
    "linear_fc1.weight": (LAYERS, 2 * TP, 1),
    "linear_proj.weight": (LAYERS, 1, TP),
    "linear_fc2.weight": (LAYERS, 1, TP),
    "layer_norm_weight": (LAYERS, 1),
    "word_embeddings.weight": (TP, 1),
    "output_layer.weight": (TP, 1),
    "final_layernorm.weight": (1,),
}


def _counts(name: str) -> tuple[int, ...]:
    return next(counts for end, counts in COUNTS.items() if name.endswith(end))


def _shards(name: str, tensor: Tensor) -> dict[tuple[int, ...], Tensor]:
    """Return the flat, by place."""
    counts = _counts(name)
    sizes = [size // count for size, count in zip(tensor.shape, counts, strict=True)]
    return {
        position: tensor[
            tuple(
                slice(at * size, (at + 1) * size) for at, size in zip(position, sizes, strict=True)
            )
        ].reshape(-1)
        for position in product(*map(range, counts))
    }


def write_flattened(
    folder: Path,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    monkeypatch: pytest.MonkeyPatch | None = None,
    is_of_0_15: bool = False,
) -> None:
    """Write weights, and each optimizer shard in two chunks of two ranks."""
    chunks = {}
    for name, tensor in state.items():
        for position, flat in _shards(name, tensor).items():
            cut = max(1, flat.numel() * 2 // 5)
            for start, part in ((0, flat[:cut]), (cut, flat[cut:])):
                if part.numel():
                    chunks[name, (*position, start)] = part.clone().reshape(
                        (1,) * len(position) + (-1,)
                    )
    parts = {f"{i}": part for i, part in enumerate(chunks.values())}
    save({**weights, **parts}, storage_writer=FileSystemWriter(folder), no_dist=True)
    path = folder / ".metadata"
    made: Metadata = pickle.loads(path.read_bytes())
    position_of = {index.fqn: info for index, info in made.storage_data.items()}
    for i in parts:
        del made.state_dict_metadata[i]
    made.storage_data = {
        index: info for index, info in made.storage_data.items() if index.fqn not in parts
    }
    for name, tensor in state.items():
        own = {position: part for (other, position), part in chunks.items() if other == name}
        listed = [
            ChunkStorageMetadata(offsets=torch.Size(position), sizes=part.shape)
            for position, part in own.items()
        ]
        numel = math.prod(tensor.shape) // math.prod(_counts(name))
        size = torch.Size((*_counts(name), numel))
        made.state_dict_metadata[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype), size=size, chunks=listed
        )
    for i, (name, position) in enumerate(chunks):
        made.storage_data[MetadataIndex(name, torch.Size(position))] = position_of[str(i)]
    made.mcore_data = {
        name: {"nd_reformulated_orig_global_shape": tuple(t.shape)} for name, t in state.items()
    }  # type: ignore[attr-defined]
    if monkeypatch is not None:
        plan, metadata = _megatron_classes(monkeypatch)
        made.all_local_plans = [plan()]  # type: ignore[attr-defined]
        made.__class__ = metadata if is_of_0_15 else Metadata
    path.write_bytes(pickle.dumps(made))


def _megatron_classes(monkeypatch: pytest.MonkeyPatch) -> tuple[type, type[Metadata]]:
    """Return stand-ins for Megatron's classes in its metadata up to 0.15.

    The second is only in 0.15.
    """
    module = "megatron.core.dist_checkpointing.strategies.torch"
    plan, metadata = (
        type("MCoreSavePlan", (), {"__module__": module}),
        type("MCoreMetadata", (Metadata,), {"__module__": module}),
    )
    fake = ModuleType(module)
    fake.MCoreSavePlan, fake.MCoreMetadata = plan, metadata  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, fake)
    return plan, metadata


def _write_role(
    folder: Path,
    masters: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    is_exported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[dict[str, Tensor], Path]:
    """Return the weights in bfloat16 next to an optimizer.

    The distributed checkpoint's, and where it lies.
    """
    hf = {name: tensor.bfloat16() for name, tensor in masters.items()}
    weights, dist_ckpt = (
        {} if is_exported else {name: t.bfloat16() for name, t in _stacked(hf).items()},
        folder / "dist_ckpt",
    )
    write_flattened(dist_ckpt, weights, state, monkeypatch=monkeypatch, is_of_0_15=is_exported)
    groups = [{"step": 3.0, "lr": 1e-5, "weight_decay": decay} for decay in (0.0, 0.1)]
    torch.save(
        {"optimizer": {"optimizer": {"param_groups": groups}}, "lr_scheduler": {"num_steps": 3}},
        dist_ckpt / "common.pt",
    )
    _write_config(folder / "huggingface")
    if is_exported:
        save_file(hf, folder / "huggingface/model.safetensors")
    return weights, dist_ckpt


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_exported", [False, True])
def test_flat_shards_of_every_rank_become_moments_and_masters_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_exported: bool
) -> None:
    # With a bridge, the default since 0.7, the weights lie in huggingface/ and the optimizer alone
    # in the distributed checkpoint.
    masters = _model()
    kinds = {"fp32_param": 1.0, "exp_avg": 0.5, "exp_avg_sq": 2.0}
    state = {
        f"optimizer.state.{kind}.{name}": f * tensor
        for kind, f in kinds.items()
        for name, tensor in _stacked(masters).items()
    }
    weights, folder = _write_role(
        tmp_path / "actor", masters, state, is_exported=is_exported, monkeypatch=monkeypatch
    )
    kept = resumable(open_checkpoint(tmp_path / "actor"))
    _assert_equal(kept.model.weights, masters)
    _assert_equal(
        {name: moments.first for name, moments in kept.moments.items()},
        {name: 0.5 * tensor for name, tensor in masters.items()},
    )
    _assert_equal(
        {name: moments.second for name, moments in kept.moments.items()},
        {name: 2.0 * tensor for name, tensor in masters.items()},
    )
    assert (
        kept.num_updates,
        kept.extra.num_schedule_steps,
        kept.decays_vectors,
        kept.settings["weight_decay"],
    ) == (3, 3, False, 0.1)
    for name, tensor in DistCheckpoint(
        folder
    ).tensors.items():  # rows in small blocks equal those of the full tensor
        result = torch.cat(
            [as_torch(Rows(tensor, ((i, i + 1),))).reshape(-1) for i in range(tensor.shape[0])]
        )
        assert torch.equal(result, (state | weights)[name].reshape(-1)), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_masters_that_do_not_round_to_their_weights_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Megatron itself saves such ones: its tensors are shifted where a buffer has several buckets.
    masters, kinds = _model(), ("fp32_param", "exp_avg", "exp_avg_sq")
    state = {
        f"optimizer.state.{kind}.{name}": tensor
        for kind in kinds
        for name, tensor in _stacked(masters).items()
    }
    shifted = "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2.weight"
    state[shifted] = state[shifted].reshape(-1).roll(48).reshape(state[shifted].shape)
    _write_role(tmp_path / "actor", masters, state, is_exported=False, monkeypatch=monkeypatch)
    kept = resumable(open_checkpoint(tmp_path / "actor"))
    assert not kept.moments
    assert any(
        "down_proj.weight does not round to the weight next to it" in reason
        for reason in kept.not_carried
    )
    _assert_equal(
        kept.model.weights, {name: tensor.bfloat16().float() for name, tensor in masters.items()}
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("shape", "given"),
    [((5, 3), "no grid of shards"), ((8, 16, 2), "no grid of shards"), ((8, 8), "lies outside")],
)
def test_a_shape_that_the_shards_do_not_make_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], given: str
) -> None:
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.layer_norm_weight"
    write_flattened(tmp_path, {}, {name: torch.ones(LAYERS, 16)}, monkeypatch=monkeypatch)
    path = tmp_path / ".metadata"
    made = pickle.loads(path.read_bytes())
    made.mcore_data = {name: {"nd_reformulated_orig_global_shape": shape}}
    path.write_bytes(pickle.dumps(made))
    with pytest.raises(DamagedFileError, match=given):
        _ = DistCheckpoint(tmp_path).tensors
