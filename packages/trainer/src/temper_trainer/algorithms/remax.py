"""ReMax: the reward of the greedy completion is the baseline."""

from torch import Tensor


def greedy_baseline_advantage(rewards: Tensor, *, baselines: Tensor) -> Tensor:
    """Reward above that of the same prompt's greedy completion.

    A_i = r_i - r_greedy: unbiased, since the greedy completion does not depend on the one that was drawn.

    Args:
        rewards: [B] one scalar per completion.
        baselines: [B] the reward of the greedy completion of each sample's prompt.

    Returns:
        [B] float64.

    Source: Li et al. 2023, arXiv:2310.10505, algorithm 1.
    """
    return rewards.double() - baselines.double()
