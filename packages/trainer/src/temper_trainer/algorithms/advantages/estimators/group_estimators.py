"""Estimators that compare a completion with its group, or with another completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from temper_trainer.algorithms.advantages.advantage_statistics import (
    STD_EPSILON,
    compute_group_statistics,
    whiten,
)
from temper_trainer.algorithms.advantages.estimators.estimator import (
    AdvantageEstimator,
    StepRewards,
)
from temper_trainer.settings.lazy_torch import sum_per_sequence, torch
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch


@variant("grpo")
class Grpo(AdvantageEstimator):
    """Reward minus the group's mean, divided by the group's deviation (arXiv:2402.03300)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_grpo_advantages``."""
        return compute_grpo_advantages(
            step.rewards, group_ids=step.samples.group_ids, scale_by_std=True
        ), None


@variant("dr_grpo")
class DrGrpo(AdvantageEstimator):
    """Reward minus the group's mean (arXiv:2503.20783)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_grpo_advantages``."""
        return compute_grpo_advantages(
            step.rewards, group_ids=step.samples.group_ids, scale_by_std=False
        ), None


@variant("rloo")
class Rloo(AdvantageEstimator):
    """Reward minus the mean of the group's other completions (arXiv:2402.14740)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_rloo_advantages``."""
        return compute_rloo_advantages(step.rewards, group_ids=step.samples.group_ids), None


@variant("opo")
class Opo(AdvantageEstimator):
    """Reward minus the group's mean, which is weighted by length (arXiv:2505.23585)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_opo_advantages``."""
        lengths = sum_per_sequence(step.samples.loss_mask.double(), step.samples)
        return compute_opo_advantages(
            step.rewards, lengths=lengths, group_ids=step.samples.group_ids
        ), None


@variant("gpg")
class Gpg(AdvantageEstimator):
    """Reward minus the group's mean, times a factor for zero-std groups (arXiv:2504.02546)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_gpg_advantages``."""
        return compute_gpg_advantages(step.rewards, group_ids=step.samples.group_ids), None


@variant("reinforce_plus_plus_baseline")
class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """Reward minus the group's mean, whitened over the step (arXiv:2501.03262)."""

    whitens: ClassVar[bool] = True

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_reinforce_plus_plus_baseline_advantages``."""
        return compute_reinforce_plus_plus_baseline_advantages(
            step.rewards, samples=step.samples
        ), None


@variant("remax")
class ReMax(AdvantageEstimator):
    """Reward minus that of the prompt's greedy completion (arXiv:2310.10505)."""

    inputs: ClassVar[frozenset[str]] = frozenset({"baselines"})
    compares_group: ClassVar[bool] = False

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_remax_advantages``."""
        assert step.baselines is not None
        return compute_remax_advantages(step.rewards, baselines=step.baselines), None


@variant("gdpo")
class Gdpo(AdvantageEstimator):
    """GRPO for each of reward.components; their sum is whitened (arXiv:2601.05242)."""

    inputs: ClassVar[frozenset[str]] = frozenset({"components"})

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_gdpo_advantages``."""
        assert step.components is not None
        return compute_gdpo_advantages(
            step.components,
            weights=step.component_weights,
            penalty=step.penalty,
            samples=step.samples,
        ), None


def compute_grpo_advantages(rewards: Tensor, *, group_ids: Tensor, scale_by_std: bool) -> Tensor:
    """Return rewards minus the group's mean, optionally divided by the group's standard deviation.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)

    The mean and the unbiased std are over one prompt's completions.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B] equal for all completions of a prompt; any order, any group size.
        scale_by_std: True is GRPO. False is Dr. GRPO, which does not divide and so does not
            overweight prompts with a small spread.

    Returns:
        [B] float64. Exactly 0 in a group of one and in a group with equal rewards, also where
        rounding makes their mean differ from them.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision); Liu et al.
    2025, arXiv:2503.20783.
    """
    group = compute_group_statistics(rewards, group_ids=group_ids)
    centered = torch.where(group.is_zero_std, 0.0, rewards.double() - group.mean)
    return centered / (group.std + STD_EPSILON) if scale_by_std else centered


def compute_rloo_advantages(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
    """Return rewards minus the mean of the group's other completions (leave-one-out).

        A_i = r_i - sum_{j != i} r_j / (G - 1) = G / (G - 1) * (r_i - mean(r))

    Unbiased, because the baseline does not depend on r_i.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B] equal for all completions of a prompt; any order, any group size.

    Returns:
        [B] float64; exactly 0 in a group with equal rewards and in a group of one.

    Source: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al.
    2024, arXiv:2402.14740, section 3.
    """
    group = compute_group_statistics(rewards, group_ids=group_ids)
    scale = group.size / (group.size - 1).clamp(min=1)
    return torch.where(group.is_zero_std, 0.0, scale * (rewards.double() - group.mean))


def compute_opo_advantages(rewards: Tensor, *, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Return rewards minus the group's length-weighted mean, OPO's variance-minimizing baseline.

        A_i = r_i - sum_j l_j * r_j / sum_j l_j

    The sums are over the prompt's completions j. The baseline is optimal if the squared norm
    of a completion's gradient is proportional to its length.

    Args:
        rewards: [B] one scalar per completion.
        lengths: [B] number of trained tokens per completion.
        group_ids: [B] equal for all completions of a prompt; any order, any group size.

    Returns:
        [B] float64; exactly 0 in a group with equal rewards.

    Source: Hao et al. 2025, arXiv:2505.23585, equation 7.
    """
    group = compute_group_statistics(rewards, group_ids=group_ids)
    distinct, group_index = torch.unique(group_ids, return_inverse=True)
    weights = lengths.double()
    total = weights.new_zeros(len(distinct)).index_add(0, group_index, weights)
    weighted = weights.new_zeros(len(distinct)).index_add(
        0, group_index, weights * rewards.double()
    )
    # The clamp only matters for a group without trained tokens, which would be 0 / 0.
    baseline = weighted / total.clamp(min=1.0)
    return torch.where(group.is_zero_std, 0.0, rewards.double() - baseline[group_index])


def compute_gpg_advantages(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
    """Return rewards minus the group's mean, times a factor that makes up for zero-std groups.

        A_i = B / (B - M) * (r_i - mean(r))

    M is the number of completions in groups with equal rewards. Their advantages are 0, which makes
    the mean loss of the batch smaller. There is no division by the standard deviation.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B] equal for all completions of a prompt; any order, any group size.

    Returns:
        [B] float64; 0 in a group with equal rewards.

    Source: Chu et al. 2025, arXiv:2504.02546, equations 6 and 7 with F_norm = 1.
    """
    num_with_signal = float(
        (~compute_group_statistics(rewards, group_ids=group_ids).is_zero_std).sum()
    )
    scale = len(rewards) / num_with_signal if num_with_signal else 1.0
    return scale * compute_grpo_advantages(rewards, group_ids=group_ids, scale_by_std=False)


def compute_remax_advantages(rewards: Tensor, *, baselines: Tensor) -> Tensor:
    """Return rewards minus the reward of the same prompt's greedy completion.

        A_i = r_i - r_greedy

    Unbiased, because the greedy completion does not depend on the sampled one.

    Args:
        rewards: [B] one scalar per completion.
        baselines: [B] reward of the greedy completion for each sample's prompt.

    Returns:
        [B] float64.

    Source: Li et al. 2023, arXiv:2310.10505, algorithm 1.
    """
    return rewards.double() - baselines.double()


def compute_gdpo_advantages(
    components: Tensor, *, weights: Sequence[float], penalty: Tensor, samples: SequenceBatch
) -> Tensor:
    """Return the whitened weighted sum of per-reward GRPO advantages.

        S_i = sum_k w_k * (r_ik - mean_k) / (std_k + 1e-6)
        A = (S - mean(S)) / std(S)

    mean_k and std_k are over the group of i; mean(S) and std(S) are over the step's trained tokens.
    Normalizing each reward separately distinguishes reward combinations that a sum of raw rewards
    would map to the same value.

    Args:
        components: [B, K] rewards.
        weights: K weights.
        penalty: [B] KL penalty, subtracted from S before whitening.
        samples: B sequences, T tokens.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Liu et al. 2026, arXiv:2601.05242, section 3.
    """
    total = sum(
        weight
        * compute_grpo_advantages(components[:, k], group_ids=samples.group_ids, scale_by_std=True)
        for k, weight in enumerate(weights)
    )
    return whiten((total - penalty)[samples.sequence_index], mask=samples.loss_mask)


def compute_reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, *, samples: SequenceBatch
) -> Tensor:
    """Return rewards minus the group's mean on every trained token, whitened over the step.

    Args:
        rewards: [B] one scalar per completion.
        samples: B sequences, T tokens.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Hu et al. 2025, arXiv:2501.03262, section 3 (REINFORCE++-baseline).
    """
    advantages = compute_grpo_advantages(rewards, group_ids=samples.group_ids, scale_by_std=False)
    return whiten(advantages[samples.sequence_index], mask=samples.loss_mask)
