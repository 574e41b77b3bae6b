"""Test that a checkpoint of a released version loads bit for bit and training continues."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.conformance.harness.rank import Rank
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.registry import load_conformance_layouts
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.engine import MegatronEngine

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*/written.json"))


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _load_engine(file: Path, written: dict[str, Any], **layout: int) -> MegatronEngine:
    """Create an engine and load the checkpoint of a released version."""
    settings = written["config"]
    config = MegatronConfig(
        model=ModelSpec(**{**settings["model"], "seed": 99}),  # other weights than the checkpoint's
        optimizer=OptimizerSpec(**settings["optimizer"]),
        precision=PrecisionSpec(**settings["precision"]),
        device="cpu",
        **layout,
    )
    engine = MegatronEngine(config)
    engine.init_model()
    engine.load_checkpoint(str(file.parent / "checkpoints" / written["step"]))
    return engine


def _digests(engine: MegatronEngine) -> dict[str, dict[str, object]]:
    return {
        entry.name: {
            "update_count": entry.update_count,
            **{
                column: _digest(getattr(entry, column))
                for column in ("master", "first_moment", "second_moment")
            },
        }
        for entry in engine.export_state()
    }


@pytest.mark.bitwise
@pytest.mark.skipif(
    not GOLDEN,
    reason="no version is released yet whose checkpoint could be kept; the first release brings it",
)
@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.parent.name)
def test_released_checkpoint_is_read_bit_for_bit_and_training_continues(file: Path) -> None:
    written = json.loads(file.read_text())
    engine = _load_engine(file, written)
    assert _digests(engine) == written["state"]
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    batch = from_sequences(
        [torch.tensor(sequence) for sequence in written["sequences"]],
        loss_masks=[
            torch.tensor([False] + [True] * (len(sequence) - 1))
            for sequence in written["sequences"]
        ],
    )
    with engine.train_mode():
        engine.forward_backward_step(batch)
    # The same weights and data; another version of torch may sum in another order.
    assert engine.optimizer_step() == pytest.approx(written["next_grad_norm"], rel=1e-4)
    engine.close()


@pytest.mark.bitwise
# Nightly: test_divided_checkpoints.py reads a checkpoint of one rank in tp2.
@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.nightly), "pp2"])
@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.parent.name)
def test_released_checkpoint_of_one_rank_is_read_bit_for_bit_by_two(
    rank_pool: RankPool, file: Path, layout: str
) -> None:
    written = json.loads(file.read_text())
    (two,) = (each for each in load_conformance_layouts("megatron") if each.name == layout)
    for digests in rank_pool.run(
        load_and_digest, engine="megatron", layout=two, arguments={"file": file}
    ):
        assert digests == written["state"]


def load_and_digest(rank: Rank, *, file: Path) -> dict[str, dict[str, object]]:
    """Return digests of the full tensors after loading on two ranks."""
    engine = _load_engine(file, json.loads(file.read_text()), **rank.layout.fields)
    try:
        return _digests(engine)
    finally:
        engine.close()
