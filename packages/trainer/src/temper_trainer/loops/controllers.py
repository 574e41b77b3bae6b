"""What moves from step to step besides weights and data: coefficients and running statistics; all of it goes into checkpoints."""

from dataclasses import dataclass, field, replace

from temper_trainer.algorithms.entropy import EntropyController, entropy_controller
from temper_trainer.algorithms.kl import KlController, kl_controller
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.reward.shaping import RewardMoments


@dataclass(frozen=True, slots=True, kw_only=True)
class Controllers:
    """Of one run, between two steps."""

    kl: KlController
    """Weight of the KL penalty on rewards."""
    entropy: EntropyController
    """Weight of the entropy bonus."""
    rewards: RewardMoments = field(default_factory=RewardMoments)
    """Of all rewards so far, for reward.shaping.normalization=running."""


def restored_controllers(config: AlgorithmConfig, state: TrainerState) -> Controllers:
    """As a checkpoint's state has them; a state that was made from the configuration has those that a run begins with."""
    return Controllers(
        kl=replace(kl_controller(config), coef=state.kl_coef),
        entropy=replace(entropy_controller(config), coef=state.entropy_coef),
        rewards=RewardMoments(
            count=state.reward_count, mean=state.reward_mean, squares=state.reward_squares
        ),
    )
