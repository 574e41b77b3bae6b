"""What moves from step to step besides weights and data: coefficients and running statistics; all of it goes into checkpoints."""

from dataclasses import dataclass, field, replace

from temper_trainer.algorithms.adaptive_coefficients import (
    EntropyController,
    KlController,
    build_entropy_controller,
    build_kl_controller,
)
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.reward.shaping import RunningStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Controllers:
    """Of one run, between two steps."""

    kl: KlController
    """Weight of the KL penalty on rewards."""
    entropy: EntropyController
    """Weight of the entropy bonus."""
    rewards: RunningStats = field(default_factory=RunningStats)
    """Of all rewards so far, for reward.shaping.normalization=running."""


def restored_controllers(config: AlgorithmConfig, state: TrainerState) -> Controllers:
    """As a checkpoint's state has them; a state that was made from the configuration has those that a run begins with."""
    return Controllers(
        kl=replace(build_kl_controller(config), coef=state.kl_coef),
        entropy=replace(build_entropy_controller(config), coef=state.entropy_coef),
        rewards=RunningStats(
            count=state.reward_count, mean=state.reward_mean, squares=state.reward_squares
        ),
    )
