"""Test training state through DCP, and RNG states by rank."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import CheckpointError, EngineStateError
from temper_engine_api.specs import Scalar
from temper_engine_fsdp.checkpoint import training_checkpoint
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine

CPU = torch.device("cpu")


def test_rank_continues_with_its_own_rng_state(tmp_path: Path) -> None:
    torch.manual_seed(3)
    assert (
        training_checkpoint.write_rng_states(
            training_checkpoint.get_rng_states(CPU), directory=str(tmp_path), rank=1
        )
        == "random/rank_1.pt"
    )
    drawn = torch.rand(2)
    assert training_checkpoint.load_rng_state(directory=str(tmp_path), rank=1, device=CPU)
    assert torch.equal(torch.rand(2), drawn)


def test_rank_without_a_saved_rng_state_keeps_its_own(tmp_path: Path) -> None:
    training_checkpoint.write_rng_states(
        training_checkpoint.get_rng_states(CPU), directory=str(tmp_path), rank=0
    )
    torch.manual_seed(4)
    assert not training_checkpoint.load_rng_state(directory=str(tmp_path), rank=1, device=CPU)
    after = torch.rand(2)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(2), after)


def test_loading_a_checkpoint_of_another_system_is_refused(
    start: Callable[..., FSDPEngine], tmp_path: Path
) -> None:
    (tmp_path / "model_world_size_1_rank_0.pt").touch()
    with pytest.raises(CheckpointError, match=r"temper-migrate checkpoint .* --to temper"):
        start().load_checkpoint(str(tmp_path))


@pytest.mark.bitwise
def test_moments_and_counts_are_restored_bit_for_bit(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, tmp_path: Path
) -> None:
    engine, other = start(), start()
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    for _ in range(2):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_step(batch)
        engine.optimizer_step()
    step = engine.save_checkpoint(str(tmp_path), global_step=2)
    other.load_checkpoint(step)
    for saved, loaded in zip(engine.export_state(), other.export_state()):
        assert (loaded.name, loaded.update_count) == (saved.name, 2)
        for column in ("master", "first_moment", "second_moment"):
            assert torch.equal(getattr(loaded, column), getattr(saved, column)), (
                saved.name,
                column,
            )


def trained_once(engine: FSDPEngine, batch: SequenceBatch) -> None:
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    engine.optimizer_step()


def test_background_write_contains_the_staged_state(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, tmp_path: Path
) -> None:
    engine, other = start(), start()
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    trained_once(engine, batch)
    state = list(engine.export_state())
    engine.stage_part(str(tmp_path))
    trained_once(engine, batch)
    with pytest.raises(EngineStateError, match=r"still being written: call finish_part\(\)"):
        engine.stage_part(str(tmp_path / "second"))
    report = engine.finish_part()
    assert {record.path for record in report.files} == {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")
    }
    assert engine.has_written_part
    other.read_part(str(tmp_path))
    assert other.num_updates == 1
    for loaded, saved in zip(other.export_state(), state, strict=True):
        assert torch.equal(loaded.master, saved.master), loaded.name
        assert torch.equal(loaded.second_moment, saved.second_moment), loaded.name


def test_background_safetensors_contain_the_staged_state(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, tmp_path: Path
) -> None:
    engine = start(save_huggingface_weights=True)
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    with engine.export_weights() as stream:
        weights = dict(stream)
    step = engine.save_checkpoint(str(tmp_path), global_step=1, in_background=True)
    trained_once(engine, batch)
    engine.finish_saving()
    (written,) = Path(step).rglob("*.safetensors")
    on_disk = load_file(written)
    assert on_disk.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(on_disk[name], tensor), name


def test_a_part_that_was_never_staged_cannot_be_finished(start: Callable[..., FSDPEngine]) -> None:
    with pytest.raises(EngineStateError, match=r"call stage_part\(\) before finish_part\(\)"):
        start().finish_part()


def test_a_part_that_cannot_be_written_is_reported_by_the_rank_that_finishes_it(
    start: Callable[..., FSDPEngine], tmp_path: Path
) -> None:
    engine = start()
    (tmp_path / "file").touch()
    engine.stage_part(str(tmp_path / "file"))
    with pytest.raises(Exception, match="file"):
        engine.finish_part()
    engine.stage_part(str(tmp_path))
    assert engine.finish_part().files


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"num_hidden_layers": 3}, r"unexpected first_moment\.model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"missing first_moment\.model\.layers\.1\."),
        (
            {"intermediate_size": 40},
            r"first_moment\.\S*down_proj\.weight: shape \(32, 40\), expected \(32, 48\)",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    start: Callable[..., FSDPEngine],
    config: FSDPConfig,
    tmp_path: Path,
    change: Mapping[str, Scalar],
    difference: str,
) -> None:
    other = start(
        model=replace(config.model, architecture={**config.model.architecture, **change}, seed=1)
    )
    engine = start()
    step, before = other.save_checkpoint(str(tmp_path), global_step=2), list(engine.export_state())
    with pytest.raises(
        CheckpointError, match=rf"{difference}.*Resume with the configuration that wrote it"
    ):
        engine.load_checkpoint(step)
    for loaded, saved in zip(engine.export_state(), before, strict=True):
        assert torch.equal(loaded.master, saved.master), loaded.name


def test_engine_without_optimizer_loads_the_weights_of_a_trained_one(
    start: Callable[..., FSDPEngine], config: FSDPConfig, tmp_path: Path
) -> None:
    trained, reader = start(model=replace(config.model, seed=1)), start(optimizer=None)
    reader.load_checkpoint(trained.save_checkpoint(str(tmp_path), global_step=1))
    with reader.export_weights() as loaded, trained.export_weights() as expected:
        assert all(
            torch.equal(one.tensor, other.tensor)
            for one, other in zip(loaded, expected, strict=True)
        )


def test_checkpoint_without_optimizer_state_is_refused(
    start: Callable[..., FSDPEngine], tmp_path: Path
) -> None:
    step = start(optimizer=None).save_checkpoint(str(tmp_path), global_step=1)
    with pytest.raises(CheckpointError, match=r"missing first_moment\."):
        start().load_checkpoint(step)
