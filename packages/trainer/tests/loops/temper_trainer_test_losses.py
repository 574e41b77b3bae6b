"""Distillation objectives that the tests of the loops name by import path."""

from typing import ClassVar

from torch import Tensor

from temper_trainer.algorithms.distillation_losses.distillation_loss import DistillationLoss
from temper_trainer.settings.variants import settings


@settings
class SquaredGap(DistillationLoss):
    """loss = (log p - log q)^2."""

    def measure(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        """Return the squared differences [T]."""
        return (policy - teacher).square()


@settings
class SquaredGapReward(SquaredGap):
    """reward = -(log p_old - log q)^2."""

    is_reward: ClassVar[bool] = True
