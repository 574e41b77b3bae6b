"""Training state through DCP, and random-number states by rank."""

from collections.abc import Callable
from pathlib import Path

import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_fsdp import persistence
from temper_engine_fsdp.engine import FSDPEngine

CPU = torch.device("cpu")


def test_a_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    assert persistence.write_random_state(directory=str(tmp_path), rank=1, device=CPU) == "random/rank_1.pt"
    drawn = torch.rand(2)
    assert persistence.read_random_state(directory=str(tmp_path), rank=1, device=CPU)
    assert torch.equal(torch.rand(2), drawn)


def test_a_rank_that_was_not_there_keeps_its_stream(tmp_path: Path) -> None:
    persistence.write_random_state(directory=str(tmp_path), rank=0, device=CPU)
    torch.manual_seed(4)
    assert not persistence.read_random_state(directory=str(tmp_path), rank=1, device=CPU)
    after = torch.rand(2)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(2), after)


def test_moments_and_counts_come_back_bit_for_bit(start: Callable[..., FSDPEngine], batch: SequenceBatch, tmp_path: Path) -> None:
    engine, other = start(), start()
    engine.set_loss_fn(lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx))
    for _ in range(2):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_step(batch)
        engine.optimizer_step()
    step = engine.save_checkpoint(str(tmp_path), global_step=2)
    other.load_checkpoint(step)
    for ours, theirs in zip(engine.export_state(), other.export_state()):
        assert (theirs.name, theirs.update_count) == (ours.name, 2)
        for column in ("master", "first_moment", "second_moment"):
            assert torch.equal(getattr(theirs, column), getattr(ours, column)), (ours.name, column)
