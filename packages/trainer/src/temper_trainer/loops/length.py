"""How long a run is: epochs become steps once the problems have been read, and schedules learn the length."""

from dataclasses import replace

from temper_engine_api.specs import EngineConfig
from temper_trainer.config.run import RoleConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.rows import DataError


def with_length(config: TrainerConfig, *, num_problems: int) -> TrainerConfig:
    """The configuration with run.total_steps counted from run.total_epochs, and with every schedule as long as it asks for.

    A pass is as many steps as it holds whole ones; what is left over begins the next.

    Args:
        config: as it was composed.
        num_problems: what one pass hands out, after those that do not fit were dropped.

    Raises:
        DataError: a pass holds no whole step.
    """
    if config.run.total_epochs is not None:
        size = config.batching.prompts_per_step
        if num_problems < size:
            raise DataError(
                f"run.total_epochs is {config.run.total_epochs}, but the data hold {num_problems} problems, less than a step of "
                f"batching.prompts_per_step = {size}: lower it, or give run.total_steps."
            )
        config = replace(
            config,
            run=replace(
                config.run,
                total_steps=config.run.total_epochs * (num_problems // size),
                total_epochs=None,
            ),
        )
    updates = (
        config.batching.num_mini_batches * config.batching.num_passes if config.task == "rl" else 1
    )
    return replace(
        config,
        actor=_role_with_schedule(
            config.actor, total_steps=config.run.total_steps, updates_per_step=updates
        ),
        critic=None
        if config.critic is None
        else _role_with_schedule(
            config.critic, total_steps=config.run.total_steps, updates_per_step=updates
        ),
    )


def with_schedule_length(
    engine: EngineConfig, *, total_steps: int, updates_per_step: int
) -> EngineConfig:
    """The engine whose schedule ends with the run where it says 0, in the unit that the schedule counts."""
    schedule = engine.schedule
    if schedule.total_steps != 0:
        return engine
    length = total_steps * (updates_per_step if schedule.advance == "update" else 1)
    return replace(engine, schedule=replace(schedule, total_steps=length))


def _role_with_schedule(role: RoleConfig, *, total_steps: int, updates_per_step: int) -> RoleConfig:
    return replace(
        role,
        engine=with_schedule_length(
            role.engine, total_steps=total_steps, updates_per_step=updates_per_step
        ),
    )
