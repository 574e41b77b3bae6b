"""Estimators that work token by token: GAE and REINFORCE++."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from temper_trainer.algorithms.estimators.estimator import AdvantageEstimator, StepRewards
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
    value_clip: PositiveFloat | None = None
    """Range around the old value to which the value loss is clipped. None is off."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages and returns of ``compute_gae``."""
        assert step.values is not None
        return formulas.compute_gae(
            step.token_rewards,
            values=step.values,
            samples=step.samples,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )


@variant("reinforce_plus_plus")
class ReinforcePlusPlus(AdvantageEstimator):
    """Discounted return of each token, whitened over the step (arXiv:2501.03262)."""

    compares_group: ClassVar[bool] = False
    whitens: ClassVar[bool] = True

    gamma: UnitFloat = 1.0
    """Discount per trained token."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_reinforce_plus_plus_advantages``."""
        return formulas.compute_reinforce_plus_plus_advantages(
            step.token_rewards, samples=step.samples, gamma=self.gamma
        ), None
