"""Estimators that compare a completion with its group, or with another completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from temper_trainer.algorithms.estimators.estimator import AdvantageEstimator, StepRewards
from temper_trainer.settings.lazy_torch import lazy_module, sum_per_sequence
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_trainer.algorithms import advantage_estimators as formulas
else:
    formulas = lazy_module("temper_trainer.algorithms.advantage_estimators")


@variant("grpo")
class Grpo(AdvantageEstimator):
    """Mean and standard deviation of the group (arXiv:2402.03300)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_grpo_advantages``."""
        return formulas.compute_grpo_advantages(
            step.rewards, group_ids=step.samples.group_ids, scale_by_std=True
        ), None


@variant("dr_grpo")
class DrGrpo(AdvantageEstimator):
    """Mean of the group, without dividing by its standard deviation (arXiv:2503.20783)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_grpo_advantages``."""
        return formulas.compute_grpo_advantages(
            step.rewards, group_ids=step.samples.group_ids, scale_by_std=False
        ), None


@variant("rloo")
class Rloo(AdvantageEstimator):
    """Mean of the group's other completions (arXiv:2402.14740)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_rloo_advantages``."""
        return formulas.compute_rloo_advantages(
            step.rewards, group_ids=step.samples.group_ids
        ), None


@variant("opo")
class Opo(AdvantageEstimator):
    """Mean of the group weighted by length (arXiv:2505.23585)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_opo_advantages``."""
        lengths = sum_per_sequence(step.samples.loss_mask.double(), step.samples)
        return formulas.compute_opo_advantages(
            step.rewards, lengths=lengths, group_ids=step.samples.group_ids
        ), None


@variant("gpg")
class Gpg(AdvantageEstimator):
    """Mean of the group, scaled up for zero-std groups (arXiv:2504.02546)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_gpg_advantages``."""
        return formulas.compute_gpg_advantages(step.rewards, group_ids=step.samples.group_ids), None


@variant("reinforce_plus_plus_baseline")
class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """Mean of the group, whitened over the step (arXiv:2501.03262)."""

    whitens: ClassVar[bool] = True

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_reinforce_plus_plus_baseline_advantages``."""
        return formulas.compute_reinforce_plus_plus_baseline_advantages(
            step.rewards, samples=step.samples
        ), None


@variant("remax")
class ReMax(AdvantageEstimator):
    """Reward of the prompt's greedy completion (arXiv:2310.10505)."""

    inputs: ClassVar[frozenset[str]] = frozenset({"baselines"})
    compares_group: ClassVar[bool] = False

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_remax_advantages``."""
        assert step.baselines is not None
        return formulas.compute_remax_advantages(step.rewards, baselines=step.baselines), None


@variant("gdpo")
class Gdpo(AdvantageEstimator):
    """GRPO for each of reward.components, summed and whitened (arXiv:2601.05242)."""

    inputs: ClassVar[frozenset[str]] = frozenset({"components"})

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_gdpo_advantages``."""
        assert step.components is not None
        return formulas.compute_gdpo_advantages(
            step.components,
            weights=step.component_weights,
            penalty=step.penalty,
            samples=step.samples,
        ), None
