"""Megatron's per-rank optimizer files, flat vectors without names.

From a genuine optimizer, and laid out here for several ranks.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from megatron_engines import check_states, with_drawn_moments
from test_megatron import CONFIG, EXPERTS, _model, _write_ranks

from temper_engine_api.specs import Compute
from temper_legacy_shim.checkpoints import open_checkpoint
from temper_legacy_shim.checkpoints.files.lazy import InMemory, LazyTensor, as_torch
from temper_legacy_shim.checkpoints.megatron.flat_moments import _layout
from temper_legacy_shim.checkpoints.temper.training_state import (
    ResumableState,
    resumable,
    training_state,
)
from temper_legacy_shim.errors import UsageError

HF = _model()
FACTORS = {"param": 1.0, "exp_avg": 0.5, "exp_avg_sq": 2.0}


def flat(chunk: Mapping[str, Tensor]) -> Tensor:
    """Return a buffer: parameters from the last to the first, each at a multiple of 64 elements."""
    parts: list[Tensor] = []
    for name, tensor in reversed(chunk.items()):
        if not name.endswith("_extra_state"):
            parts.append(torch.zeros(-sum(part.numel() for part in parts) % 64))
            parts.append(tensor.float().reshape(-1))
    return torch.cat(parts)


def write(
    folder: Path,
    hf: Mapping[str, Tensor] = HF,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    late: bool = False,
) -> Path:
    """Return the weights in bfloat16, and optimizer files whose masters are the float32 numbers.

    Names as 0.3 wrote them, or 0.4.0 (late).
    """
    _write_ranks(folder / "actor", hf, tp=tp, pp=pp, vpp=vpp)
    for path in sorted(folder.glob("actor/model/*/model.pt")):
        torch.save(
            [
                {name: tensor.bfloat16() for name, tensor in chunk.items()}
                for chunk in torch.load(path)
            ],
            path,
        )
    for kind, factor in FACTORS.items():
        _write_ranks(
            folder / kind,
            {name: factor * tensor for name, tensor in hf.items()},
            tp=tp,
            pp=pp,
            vpp=vpp,
        )
    (folder / "actor/optim").mkdir()
    for stage in range(pp):
        for rank in range(tp):
            position = f"model/mp_rank_{rank:02d}{f'_{stage:03d}' if pp > 1 else ''}/model.pt"
            chunks = {kind: torch.load(folder / kind / position) for kind in FACTORS}
            state: dict[object, object] = {"buckets_coalesced": True}
            for number in range(vpp):
                vectors: dict[str, object] = {
                    kind: flat(select_kind[number]) for kind, select_kind in chunks.items()
                }
                state[number] = {
                    (torch.bfloat16, torch.float32): vectors
                    | {"numel_unpadded": len(flat(chunks["param"][number]))}
                }
            name = f"distrib_optim_pp{stage}_tp{rank}{'_cp0_dp0' if late else ''}.pt"
            torch.save([state] if late else state, folder / "actor/optim" / name)
    return folder / "actor"


def state_of(folder: Path) -> ResumableState:
    return resumable(open_checkpoint(folder, num_updates=3))


def same(have: Mapping[str, LazyTensor], want: Mapping[str, Tensor]) -> bool:
    return have.keys() == want.keys() and all(
        torch.equal(as_torch(have[name]), tensor) for name, tensor in want.items()
    )


def check_masters_and_moments(result: ResumableState) -> None:
    """Compare with the states that ``write`` gives the weights `HF`."""
    assert same(result.model.weights, HF), "the float32 masters, not the rounded weights"
    assert same(
        {name: kept.first for name, kept in result.moments.items()},
        {name: 0.5 * tensor for name, tensor in HF.items()},
    )
    assert same(
        {name: kept.second for name, kept in result.moments.items()},
        {name: 2.0 * tensor for name, tensor in HF.items()},
    )


@pytest.mark.parametrize(
    ("tp", "pp", "vpp", "late"),
    [(1, 1, 1, False), (2, 1, 1, True), (2, 2, 1, False), (1, 2, 2, True)],
)
def test_masters_and_moments_of_every_layout_are_found(
    tmp_path: Path, tp: int, pp: int, vpp: int, late: bool
) -> None:
    result = state_of(write(tmp_path, tp=tp, pp=pp, vpp=vpp, late=late))
    check_masters_and_moments(result)
    assert result.num_updates == 3
    assert "weights, as float32 masters, the optimizer's own" in result.carried


def test_without_the_number_of_updates_moments_stay_behind_and_the_receipt_says_so(
    tmp_path: Path,
) -> None:
    result = resumable(open_checkpoint(write(tmp_path)))
    assert not result.moments
    assert any("give --num-updates" in reason for reason in result.not_carried)


def test_an_order_that_does_not_fit_the_weights_is_not_guessed(tmp_path: Path) -> None:
    folder = write(tmp_path)
    path = folder / "optim/distrib_optim_pp0_tp0.pt"
    state = torch.load(path)
    for vector in next(iter(state[0].values())).values():
        if isinstance(vector, Tensor):
            vector.copy_(vector.roll(1))
    torch.save(state, path)
    result = state_of(folder)
    assert not result.moments
    assert any("in an order that is not known" in reason for reason in result.not_carried)


def test_a_missing_rank_s_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, tp=2)
    (folder / "optim/distrib_optim_pp0_tp1.pt").unlink()
    assert any(
        "stage 0, tensor rank 1 is missing" in reason for reason in state_of(folder).not_carried
    )


def test_experts_over_several_ranks_stay_behind_where_they_wrote_one_file(tmp_path: Path) -> None:
    _write_ranks(tmp_path / "actor", _model(experts=EXPERTS), tp=1, ep=2)
    (tmp_path / "actor/optim").mkdir()
    torch.save(
        [None, {"buckets_coalesced": True}], tmp_path / "actor/optim/distrib_optim_pp0_tp0.pt"
    )
    assert any(
        "each overwrote the last" in reason for reason in state_of(tmp_path / "actor").not_carried
    )


def test_a_count_that_no_one_reads_is_refused(tmp_path: Path) -> None:
    from test_megatron import _stacked, _write_config, _write_dist

    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        _write_dist(tmp_path / "actor/dist_ckpt", _stacked(HF))
    _write_config(tmp_path / "actor/huggingface")
    with pytest.raises(UsageError, match="--num-updates has no effect"):
        open_checkpoint(tmp_path / "actor", num_updates=3)


def test_a_tied_table_that_two_stages_hold_is_a_bucket_of_its_own() -> None:
    sizes = {"decoder.final_layernorm.weight": 10, "output_layer.weight": 100}
    parameters = {name: InMemory(torch.zeros(size).numpy()) for name, size in sizes.items()}
    # Parameters begin at multiples of 64 within a bucket, and buckets follow each other without
    # their padding.
    assert _layout(parameters, has_own_buckets=True) == (
        {"output_layer.weight": 0, "decoder.final_layernorm.weight": 100},
        110,
    )
    assert _layout(parameters, has_own_buckets=False) == (
        {"output_layer.weight": 0, "decoder.final_layernorm.weight": 128},
        138,
    )


@pytest.mark.filterwarnings("ignore::UserWarning:megatron.core")
@pytest.mark.filterwarnings("ignore:full scope is deprecated")
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_what_megatrons_own_optimizer_wrote_is_what_it_had(
    tmp_path: Path, compute: Compute
) -> None:
    pytest.importorskip(
        "megatron.core",
        reason="needs megatron-core: an environment with temper-engine-megatron runs this",
    )
    small = {**CONFIG, "num_hidden_layers": 2}
    with with_drawn_moments(small, compute=compute) as (chunk, (optimizer,), expected):
        folder = tmp_path / "actor/model/mp_rank_00"
        folder.mkdir(parents=True)
        torch.save([chunk.state_dict()], folder / "model.pt")
        (tmp_path / "actor/optim").mkdir()
        optimizer.save_parameter_state(str(tmp_path / "actor/optim/distrib_optim_pp0_tp0.pt"))
    (tmp_path / "actor/hf_config_and_tokenizer").mkdir()
    (tmp_path / "actor/hf_config_and_tokenizer/config.json").write_text(json.dumps(small))
    check_states(training_state(open_checkpoint(tmp_path / "actor", num_updates=2)), expected)
