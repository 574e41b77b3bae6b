"""The optimal token baseline, which minimizes the variance of the gradient at each position."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from temper_trainer.algorithms.advantages.advantage_statistics import compute_discounted_sums
from temper_trainer.algorithms.advantages.estimators.estimator import (
    AdvantageEstimator,
    StepRewards,
)
from temper_trainer.settings.lazy_torch import sum_per_sequence, torch
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch


@variant("optimal_token_baseline")
class OptimalTokenBaseline(AdvantageEstimator):
    """Reward-to-go minus the group's mean, weighted by gradient energy (arXiv:2602.07078)."""

    is_per_token: ClassVar[bool] = True

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_optimal_token_baseline_advantages``."""
        # Use the sampler's log-probs: the estimated squared gradient norm is unbiased only for the
        # policy that sampled the tokens.
        logprobs = step.samples.columns["rollout_logprobs"]
        return compute_optimal_token_baseline_advantages(
            step.token_rewards,
            energies=estimate_token_energies(logprobs),
            samples=step.samples,
        ), None


def estimate_token_energies(logprobs: Tensor) -> Tensor:
    """Estimate the squared norm of each token's gradient for the logits, from its log-prob.

        |e_y - p|^2 = 1 - 2 p_y + sum_v p_v^2,   estimated as 1 - p_y

    p_y is an unbiased estimate of sum_v p_v^2, because y is drawn from p. So both have the same
    expectation, and their sums over a completion differ by a martingale. The exact sum would need
    another output of the model's head.

    Args:
        logprobs: [T] of the policy that sampled the tokens.

    Returns:
        [T] float64 in [0, 1].
    """
    return 1.0 - logprobs.double().exp()


def compute_optimal_token_baseline_advantages(
    token_rewards: Tensor, *, energies: Tensor, samples: SequenceBatch
) -> Tensor:
    """Return the reward-to-go minus the energy-weighted mean of the group at the same position.

        G_t = sum_{s >= t} r_s            W_t = sum_{s <= t} w_s
        B_t = sum_j G_t^j W_t^j / sum_j W_t^j
        A_t = G_t - B_t

    t counts the trained tokens of a completion. The sums over j are over the completions of the
    prompt that have a t-th trained token. Where only one has, B_t is 0, because its own reward
    would be its baseline.

    Args:
        token_rewards: [T], see ``advantages.compute_token_rewards``.
        energies: [T] w_t, at least 0; entries at untrained tokens are ignored, even NaN.
        samples: B sequences, T tokens.

    Returns:
        [T] float64, 0 at untrained tokens; 0 in a group of one.

    Source: Li et al. 2026, arXiv:2602.07078, and the authors' code for the tail of the longest
    completion.
    """
    mask = samples.loss_mask
    position = torch.nonzero(mask)[:, 0]
    owner = samples.sequence_index[position]
    # t: the number of earlier trained tokens in the same completion.
    trained = sum_per_sequence(mask.long(), samples)
    index = torch.arange(len(position)) - (trained.cumsum(0) - trained)[owner]
    returns = compute_discounted_sums(token_rewards, samples=samples, decay=1.0)[position]
    energy = energies.double()[position]
    total = energy.cumsum(0)
    # The running sum over all samples, minus its value at the start of the token's own.
    first = position.new_zeros(samples.num_sequences).scatter_reduce(
        0, owner, torch.arange(len(position)), reduce="amin", include_self=False
    )
    total = total - (total - energy)[first[owner]]
    _, cell = torch.unique(
        torch.stack([samples.group_ids[owner], index]), dim=1, return_inverse=True
    )

    def sum_per_cell(column: Tensor) -> Tensor:
        size = int(cell.max()) + 1 if len(cell) else 0
        return column.new_zeros(size).index_add(0, cell, column)[cell]

    weights = sum_per_cell(total)
    # Where the policy is certain at every token, all energies are 0, and so is the gradient.
    baseline = sum_per_cell(returns * total) / torch.where(weights > 0, weights, 1.0)
    count = sum_per_cell(torch.ones_like(returns))
    baseline = torch.where(count > 1, baseline, 0.0)
    group_size = torch.unique(samples.group_ids, return_inverse=True, return_counts=True)
    has_group = (group_size[2][group_size[1]] > 1)[owner]
    advantages = torch.where(has_group, returns - baseline, 0.0)
    return mask.new_zeros(samples.num_tokens, dtype=torch.float64).index_copy(
        0, position, advantages
    )
