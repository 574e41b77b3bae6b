"""GDPO: several rewards, each normalised within its group before they are added up."""

from collections.abc import Sequence

from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_trainer.algorithms.grpo import group_relative_advantage
from temper_trainer.algorithms.whitening import whiten


def decoupled_advantage(
    components: Tensor, *, weights: Sequence[float], penalty: Tensor, samples: SequenceBatch
) -> Tensor:
    """Weighted sum of group-relative advantages, whitened over the trained tokens of the step.

    S_i = sum over k of w_k * (r_ik - mean_k) / (std_k + 1e-6) within the group of i; A = (S - mean(S)) / std(S). So a combination of
    rewards keeps its own advantage where a sum of rewards would collapse it onto another's.

    Args:
        components: [B, K] rewards.
        weights: K factors.
        penalty: [B] taken from the sum before it is whitened: the KL to a reference.
        samples: the step's.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Liu et al. 2026, arXiv:2601.05242, section 3.
    """
    total = sum(
        weight
        * group_relative_advantage(components[:, k], group_ids=samples.group_ids, scale_by_std=True)
        for k, weight in enumerate(weights)
    )
    return whiten((total - penalty)[samples.sequence_index], mask=samples.loss_mask)
