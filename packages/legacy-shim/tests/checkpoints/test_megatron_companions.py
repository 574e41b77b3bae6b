"""Files and tensors next to Megatron's matrices.

Layers that differ, weights of other models, schedules, random states, value heads.
"""

import io
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from test_megatron import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    VOCAB,
    _assert_equal,
    _model,
    _stacked,
    _write_config,
    _write_dist,
    _write_ranks,
)

from temper_legacy_shim.checkpoints import open_checkpoint
from temper_legacy_shim.checkpoints.temper.training_state import resumable
from temper_legacy_shim.errors import LayoutError


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_experts_of_layers_that_are_not_stacked_are_taken_apart(tmp_path: Path) -> None:
    # Megatron numbers the layers of its distributed format where they may differ, as moe_layer_freq
    # = [1, 1, ...] says.
    hf = _model(experts=EXPERTS)
    numbered: dict[str, Tensor] = {}
    for name, tensor in _stacked(hf, experts=EXPERTS).items():
        if name.startswith("decoder.layers."):
            rest = name.removeprefix("decoder.layers.")
            numbered |= {
                f"decoder.layers.{layer}.{rest}": tensor[layer].clone() for layer in range(LAYERS)
            }
        else:
            numbered[name] = tensor
    _write_dist(tmp_path / "actor/dist_ckpt", numbered)
    _write_config(tmp_path / "actor/huggingface")
    _assert_equal(open_checkpoint(tmp_path / "actor").weights, hf)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "name", ["vision_model.decoder.layers.mlp.linear_fc1.weight", "mtp.layers.0.eh_proj.weight"]
)
def test_weights_of_another_model_are_named_and_never_left_out(tmp_path: Path, name: str) -> None:
    _write_dist(tmp_path / "actor/dist_ckpt", _stacked(_model()) | {name: torch.ones(2, 2)})
    _write_config(tmp_path / "actor/huggingface")
    with pytest.raises(LayoutError, match=f"has {name}, which is of no model that is known here"):
        open_checkpoint(tmp_path / "actor")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_keeps_its_schedule_and_reports_its_random_states(
    tmp_path: Path,
) -> None:
    state = dict(_stacked(_model())) | {"rng_state/shard_0.0_1.1": io.BytesIO(b"of no use here")}
    _write_dist(
        tmp_path / "actor/dist_ckpt", state, {"lr_scheduler": {"num_steps": 5, "max_lr": 1e-5}}
    )
    _write_config(tmp_path / "actor/huggingface")
    kept = resumable(open_checkpoint(tmp_path / "actor"))
    assert kept.extra.num_schedule_steps == 5
    assert any("the schedule's counter (5 steps" in phrase for phrase in kept.carried)
    assert any("random-number states of Megatron" in sentence for sentence in kept.not_carried)


def test_the_schedule_of_per_rank_files_is_carried_too(tmp_path: Path) -> None:
    _write_ranks(tmp_path / "actor", _model(), tp=1)
    (tmp_path / "actor/optimizer_scheduler").mkdir()
    torch.save(
        {"num_steps": 4, "max_lr": 1e-5},
        tmp_path / "actor/optimizer_scheduler/optimizer_scheduler.pt",
    )
    (tmp_path / "actor/rng_states").mkdir()
    torch.save([{}], tmp_path / "actor/rng_states/rng_states_pp0_tp0_cp0_dp0.pt")
    kept = resumable(open_checkpoint(tmp_path / "actor"))
    assert kept.extra.num_schedule_steps == 4
    assert any("random-number states of Megatron" in sentence for sentence in kept.not_carried)


def test_a_schedule_that_no_file_counts_is_reported(tmp_path: Path) -> None:
    _write_ranks(tmp_path / "actor", _model(), tp=1)
    kept = resumable(open_checkpoint(tmp_path / "actor"))
    assert any("schedule: the files say nothing" in sentence for sentence in kept.not_carried)


def test_a_critic_s_head_is_the_same_on_every_tensor_rank(tmp_path: Path) -> None:
    hf = _model()
    del hf["lm_head.weight"]
    _write_ranks(tmp_path / "actor", hf | {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, tp=2)
    head = {
        "output_layer.weight": torch.arange(HIDDEN).float()[None],
        "output_layer.bias": torch.ones(1),
    }
    for path in (tmp_path / "actor/model").glob("*/model.pt"):
        (chunk,) = torch.load(path)
        torch.save([chunk | head], path)
    model = open_checkpoint(tmp_path / "actor")
    assert model.head == "value_model"
    _assert_equal(
        model.weights,
        hf | {"score.weight": head["output_layer.weight"], "score.bias": head["output_layer.bias"]},
    )
