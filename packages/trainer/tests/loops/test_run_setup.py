"""Epochs become steps, and schedules get the length of the run."""

from dataclasses import replace

import pytest

from temper_engine_api.errors import ConfigError
from temper_engine_api.schedule import compute_learning_rate
from temper_engine_api.specs import ScheduleSpec
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading import load
from temper_trainer.data.rows import DataError
from temper_trainer.loops.run_setup import with_run_length


def composed(*overrides: str) -> TrainerConfig:
    return load(["experiment=quickstart", "~run.total_steps", *overrides]).config


def test_epoch_has_as_many_steps_as_full_batches() -> None:
    config = with_run_length(
        composed("run.total_epochs=3", "batching.prompts_per_step=32"), num_problems=100
    )
    assert config.run.total_steps == 9  # 3 passes of 100 // 32 = 3 steps
    assert config.run.total_epochs is None


def test_epoch_without_a_full_batch_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"has 7 problems, less than a step of batching\.prompts_per_step = 32"
    ):
        with_run_length(
            composed("run.total_epochs=3", "batching.prompts_per_step=32"), num_problems=7
        )


def test_schedule_of_length_0_gets_the_length_of_the_run_in_its_unit() -> None:
    epochs = (
        "actor.engine.schedule.kind=cosine",
        "actor.engine.schedule.total_steps=0",
        "run.total_epochs=2",
    )
    two_updates = ("batching.prompts_per_step=10", "batching.num_mini_batches=2")
    by_update = with_run_length(composed(*epochs, *two_updates), num_problems=50)
    assert by_update.actor.engine.schedule.total_steps == 20  # 2 passes x 5 steps x 2 updates
    by_step = with_run_length(
        composed(*epochs, *two_updates, "actor.engine.schedule.advance=rl_step"), num_problems=50
    )
    assert by_step.actor.engine.schedule.total_steps == 10


def test_schedule_with_a_length_keeps_it() -> None:
    config = composed(
        "actor.engine.schedule.kind=cosine",
        "actor.engine.schedule.total_steps=7",
        "run.total_epochs=2",
    )
    assert with_run_length(config, num_problems=64).actor.engine.schedule.total_steps == 7


def test_schedule_of_length_0_cannot_be_used_for_training() -> None:
    spec = replace(ScheduleSpec(kind="linear", total_steps=0))
    with pytest.raises(ConfigError, match="filled in by a trainer"):
        compute_learning_rate(0, peak=1.0, spec=spec)


def test_steps_and_epochs_together_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"run\.total_steps \(command line\) has no effect with run\.total_epochs"
    ):
        load(["experiment=quickstart", "run.total_steps=3", "run.total_epochs=2"])
