"""Generalised advantage estimation over the trained tokens of a sample."""

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_trainer.algorithms.trained_tokens import at_next_trained, discounted_sums


def generalised_advantage(
    token_rewards: Tensor,
    *,
    values: Tensor,
    samples: SequenceBatch,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Advantages, and the returns that the value model learns.

    delta_i = r_i + gamma * V_(i+1) - V_i, A_i = delta_i + gamma * lambda * A_(i+1), R_i = A_i + V_i

    over the trained tokens i of a sample, in order; what lies between two of them (tool and observation spans) is passed over. After the
    last one there is nothing: V = A = 0, also where a completion was cut at its token limit.

    Args:
        token_rewards: [T], see ``advantages.token_rewards``.
        values: [T] value of the state before each token; entries at untrained tokens are ignored, whatever they hold.
        samples: the step's.
        gamma: discount per trained token.
        gae_lambda: 0 trusts the value model, 1 the reward.

    Returns:
        (advantages, returns), both [T] float64, 0 at untrained tokens.

    Source: Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16.
    """
    own = torch.where(samples.loss_mask, values.double(), 0.0)
    deltas = token_rewards.double() + gamma * at_next_trained(values, samples=samples) - own
    advantages = discounted_sums(deltas, samples=samples, decay=gamma * gae_lambda)
    return advantages, torch.where(samples.loss_mask, advantages + own, 0.0)
