"""The optimizer of a distributed checkpoint in buckets, laid out here for several ranks.

``test_megatron_genuine`` has Megatron's own.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import test_megatron
import torch
from safetensors.torch import save_file
from test_megatron import _stacked, _write_config, _write_dist, _write_ranks
from test_megatron_flat import FACTORS, HF, check_masters_and_moments, same
from torch import Tensor

from temper_legacy_shim.checkpoints import open_checkpoint
from temper_legacy_shim.checkpoints.temper.training_state import ResumableState, resumable

ORDER = (
    "word_embeddings",
    "linear_proj",
    "layer_norm_weight",
    "linear_qkv.weight",
    "linear_fc1.weight",
    "linear_fc2",
    "final",
    "output",
)
"""Order of Megatron's modules: in a layer the output projection is made before that of queries,
keys and values.
"""


def sort_by_order(chunk: Mapping[str, Tensor]) -> dict[str, Tensor]:
    def position(name: str) -> tuple[int, bool, int]:
        layer = (
            int(name.split(".")[2]) if ".layers." in name else -1 if "embeddings" in name else 1000
        )
        return layer, ".mlp." in name, next(i for i, part in enumerate(ORDER) if part in name)

    return {
        name: chunk[name]
        for name in sorted(
            (name for name in chunk if not name.endswith("_extra_state")), key=position
        )
    }


def buckets(chunk: Mapping[str, Tensor], *, least: int) -> list[Tensor]:
    """Split parameters from last to first into buckets of this size, each at a multiple of 64."""
    result: list[Tensor] = [torch.zeros(0)]
    for _, tensor in reversed(chunk.items()):
        if result[-1].numel() >= least:
            result.append(torch.zeros(0))
        result[-1] = torch.cat(
            [result[-1], torch.zeros(-result[-1].numel() % 64), tensor.float().reshape(-1)]
        )
    return result


def write(
    folder: Path,
    *,
    tp: int,
    pp: int = 1,
    vpp: int = 1,
    least: int = 1 << 30,
    is_exported: bool = False,
) -> Path:
    state: dict[str, Tensor] = {}
    for kind, factor in FACTORS.items():
        _write_ranks(
            folder / kind,
            {name: factor * tensor for name, tensor in HF.items()},
            tp=tp,
            pp=pp,
            vpp=vpp,
        )
        for stage in range(pp):
            for rank in range(tp):
                position = f"model/mp_rank_{rank:02d}{f'_{stage:03d}' if pp > 1 else ''}/model.pt"
                for number, chunk in enumerate(torch.load(folder / kind / position)):
                    for i, bucket in enumerate(buckets(sort_by_order(chunk), least=least)):
                        group = f"optimizer.distributed.dp_group_idx_{rank + tp * stage}"
                        prefix = f"{group}.gbuf_idx_{number}"
                        state[
                            f"{prefix}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{i}.{kind}"
                        ] = bucket
    weights = (
        {} if is_exported else {name: tensor.bfloat16() for name, tensor in _stacked(HF).items()}
    )
    _write_dist(
        folder / "actor/dist_ckpt", weights | state, {"optimizer": {"param_groups": [{"step": 3}]}}
    )
    _write_config(folder / "actor/huggingface")
    if is_exported:
        save_file(
            {name: tensor.bfloat16() for name, tensor in HF.items()},
            folder / "actor/huggingface/model.safetensors",
        )
    return folder / "actor"


def state_of(folder: Path) -> ResumableState:
    return resumable(open_checkpoint(folder))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("tp", "pp", "vpp", "least"),
    [(1, 1, 1, 2000), (2, 1, 1, 1 << 30), (2, 2, 1, 1000), (1, 2, 2, 1 << 30)],
)
def test_masters_and_moments_of_every_layout_are_found(
    tmp_path: Path, tp: int, pp: int, vpp: int, least: int
) -> None:
    result = state_of(write(tmp_path, tp=tp, pp=pp, vpp=vpp, least=least))
    check_masters_and_moments(result)
    assert (result.num_updates, result.decays_vectors) == (3, False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("tp", "pp", "vpp", "padded"),
    [(1, 1, 1, 37), (1, 2, 2, 37), (2, 1, 1, 38), (2, 2, 2, 256), (4, 1, 1, 64)],
)
def test_masters_and_moments_are_found_next_to_weights_that_were_exported_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, vpp: int, padded: int
) -> None:
    # As 0.8 and 0.9 save with a bridge, their default: the distributed checkpoint has the optimizer
    # alone, with rows of padding.
    monkeypatch.setattr(test_megatron, "PADDED", padded)
    result = state_of(write(tmp_path, tp=tp, pp=pp, vpp=vpp, is_exported=True))
    assert same(result.model.weights, HF)
    assert same(
        {name: kept.first for name, kept in result.moments.items()},
        {name: 0.5 * tensor for name, tensor in HF.items()},
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_order_that_does_not_fit_the_weights_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backwards(chunk: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(reversed(chunk.items()))

    monkeypatch.setitem(globals(), "sort_by_order", backwards)
    result = state_of(write(tmp_path, tp=2))
    assert not result.moments
    assert any(
        "buckets of 2 model-parallel ranks, and no way of dividing" in reason
        for reason in result.not_carried
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "shapes",
    [
        {"param": (5,), "exp_avg": (5,)},
        {"exp_avg_sq": ()},
        {"param": (5,), "exp_avg": (4,), "exp_avg_sq": (5,)},
    ],
)
def test_buckets_that_are_none_are_reported_not_to_be_carried(
    tmp_path: Path, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    prefix = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0"
    state = {f"{prefix}.{kind}": torch.zeros(shape) for kind, shape in shapes.items()}
    _write_dist(
        tmp_path / "dist_ckpt", _stacked(HF) | state, {"optimizer": {"param_groups": [{"step": 3}]}}
    )
    _write_config(tmp_path / "huggingface")
    result = state_of(tmp_path)
    assert not result.moments
    assert any("buckets that lack" in reason for reason in result.not_carried)
