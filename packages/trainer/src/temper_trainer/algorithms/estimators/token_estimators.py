"""Estimators that work token by token: GAE, VAPO and REINFORCE++."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from temper_trainer.algorithms.estimators.estimator import AdvantageEstimator, StepRewards
from temper_trainer.algorithms.estimators.turn_estimators import select_token_rewards
from temper_trainer.settings.lazy_torch import lazy_module
from temper_trainer.settings.ranges import PositiveFloat, UnitFloat
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_trainer.algorithms import advantage_estimators as formulas
else:
    formulas = lazy_module("temper_trainer.algorithms.advantage_estimators")


@variant("gae")
class Gae(AdvantageEstimator):
    """Generalized advantage estimation (arXiv:1506.02438); needs a critic."""

    inputs: ClassVar[frozenset[str]] = frozenset({"values"})
    compares_group: ClassVar[bool] = False

    gamma: UnitFloat = 1.0
    """Discount per trained token."""
    gae_lambda: UnitFloat = 1.0
    """0 bootstraps from the value model only, 1 uses the rewards only."""
    value_lambda: UnitFloat | None = None
    """The same for the returns that the critic is trained on (arXiv:2503.01491). None takes
    gae_lambda.
    """
    turn_rewards: bool = False
    """Put the environment's reward of a turn at the turn's last token, not at the rollout's. It is
    multiplied by reward.shaping.scale; other shaping stays at the rollout's last token.
    """
    value_clip: PositiveFloat | None = None
    """Range around the old value to which the value loss is clipped. None is off."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages and returns of ``compute_gae``."""
        assert step.values is not None
        return formulas.compute_gae(
            select_token_rewards(step, turn_rewards=self.turn_rewards),
            values=step.values,
            samples=step.samples,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            value_lambda=self.value_lambda,
        )


@variant("vapo")
class Vapo(AdvantageEstimator):
    """GAE whose lambda grows with the length, and another for the critic (arXiv:2504.05118)."""

    inputs: ClassVar[frozenset[str]] = frozenset({"values"})
    compares_group: ClassVar[bool] = False

    gamma: UnitFloat = 1.0
    """Discount per trained token."""
    length_factor: PositiveFloat = 0.05
    """Lambda is 1 - 1 / (length_factor * trained tokens of the rollout), at least 0."""
    value_lambda: UnitFloat = 1.0
    """Lambda of the returns that the critic is trained on."""
    turn_rewards: bool = False
    """Put the environment's reward of a turn at the turn's last token, as with gae."""
    value_clip: PositiveFloat | None = None
    """Range around the old value to which the value loss is clipped. None is off."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages and returns of ``compute_gae`` with both lambdas."""
        assert step.values is not None
        return formulas.compute_gae(
            select_token_rewards(step, turn_rewards=self.turn_rewards),
            values=step.values,
            samples=step.samples,
            gamma=self.gamma,
            gae_lambda=formulas.compute_length_adaptive_lambdas(
                step.samples, length_factor=self.length_factor
            ),
            value_lambda=self.value_lambda,
        )


@variant("reinforce_plus_plus")
class ReinforcePlusPlus(AdvantageEstimator):
    """Discounted return of each token, whitened over the step (arXiv:2501.03262)."""

    compares_group: ClassVar[bool] = False
    whitens: ClassVar[bool] = True

    gamma: UnitFloat = 1.0
    """Discount per trained token."""
    turn_rewards: bool = False
    """Put the environment's reward of a turn at the turn's last token, as with gae."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_reinforce_plus_plus_advantages``."""
        rewards = select_token_rewards(step, turn_rewards=self.turn_rewards)
        return formulas.compute_reinforce_plus_plus_advantages(
            rewards, samples=step.samples, gamma=self.gamma
        ), None
