"""Estimators whose objective is not the mean reward: MaxRL and pass@k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temper_trainer.algorithms.estimators.estimator import AdvantageEstimator, StepRewards
from temper_trainer.settings.lazy_torch import lazy_module
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_trainer.algorithms import pass_rate_estimators as formulas
else:
    formulas = lazy_module("temper_trainer.algorithms.pass_rate_estimators")


@variant("maxrl")
class MaxRl(AdvantageEstimator):
    """Mean of the group, divided by that mean: the log of the pass rate (arXiv:2602.02710)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_maxrl_advantages``."""
        return formulas.compute_maxrl_advantages(
            step.rewards, group_ids=step.samples.group_ids
        ), None


@variant("grpo_passk")
class GrpoPassk(AdvantageEstimator):
    """Lead of the group's best completion over the second, else 0 (arXiv:2503.19595)."""

    scale_by_std: bool = True
    """Divide by the standard deviation of the group."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_passk_advantages``."""
        return formulas.compute_passk_advantages(
            step.rewards, group_ids=step.samples.group_ids, scale_by_std=self.scale_by_std
        ), None
