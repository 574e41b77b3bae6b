"""REINFORCE++: no critic; the whole batch is the yardstick, not the group."""

from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_trainer.algorithms.grpo import group_relative_advantage
from temper_trainer.algorithms.trained_tokens import discounted_sums
from temper_trainer.algorithms.whitening import whiten


def global_advantage(token_rewards: Tensor, *, samples: SequenceBatch, gamma: float) -> Tensor:
    """Discounted reward to go, whitened over the trained tokens of the step.

    A_t = (R_t - mean(R)) / std(R) with R_t = r_t + gamma * R_(t+1); the KL penalty is already in r.

    Args:
        token_rewards: [T], see ``advantages.token_rewards``.
        samples: the step's.
        gamma: discount per trained token.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Hu et al. 2025, arXiv:2501.03262, section 3.
    """
    return whiten(
        discounted_sums(token_rewards, samples=samples, decay=gamma), mask=samples.loss_mask
    )


def group_baseline_advantage(rewards: Tensor, *, samples: SequenceBatch) -> Tensor:
    """Reward above the group's mean, on every trained token, whitened over the trained tokens of the step.

    Args:
        rewards: [B] one scalar per completion.
        samples: the step's.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Hu et al. 2025, arXiv:2501.03262, section 3 (REINFORCE++-baseline).
    """
    above = group_relative_advantage(rewards, group_ids=samples.group_ids, scale_by_std=False)
    return whiten(above[samples.sequence_index], mask=samples.loss_mask)
