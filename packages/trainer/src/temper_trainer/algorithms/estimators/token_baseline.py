"""The optimal token baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temper_trainer.algorithms.estimators.estimator import AdvantageEstimator, StepRewards
from temper_trainer.settings.lazy_torch import lazy_module
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_trainer.algorithms import optimal_token_baseline as formulas
else:
    formulas = lazy_module("temper_trainer.algorithms.optimal_token_baseline")


@variant("optimal_token_baseline")
class OptimalTokenBaseline(AdvantageEstimator):
    """Mean of the group at each position, weighted by gradient energy (arXiv:2602.07078)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_optimal_token_baseline_advantages``."""
        # Of the policy that sampled the tokens: only then is the estimated energy unbiased.
        logprobs = step.samples.columns["rollout_logprobs"]
        return formulas.compute_optimal_token_baseline_advantages(
            step.token_rewards,
            energies=formulas.estimate_token_energies(logprobs),
            samples=step.samples,
        ), None
