"""SkyRL's functions for advantages, KL and reductions, computed by our algorithms.

Names and arguments are those of skyrl.backends.skyrl_train.utils.ppo_utils.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from temper_engine_api.objective import Aggregation, AggregationMode, LossTerms
from temper_engine_api.reduction import count_denominators
from temper_engine_api.reduction import reduce_loss as reduce_our_loss
from temper_trainer.algorithms.adaptive_coefficients import KlController
from temper_trainer.algorithms.advantages import advantage_statistics
from temper_trainer.algorithms.advantages.estimators import token_estimators
from temper_trainer.algorithms.advantages.estimators.pass_rate_estimators import (
    compute_maxrl_advantages,
)
from temper_trainer.algorithms.kl import KlEstimator, estimate_kl
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.objectives.prompt_mean import PROMPT_WEIGHTS, PromptMeanObjective
from tools.peers import verl_adapters
from tools.peers.padded import NoCounterpartError, build_batch, flatten, unflatten

_ESTIMATORS: dict[str, KlEstimator] = {"k1": "k1", "k2": "k2", "k3": "k3"}
_MODES = {
    "token_mean": AggregationMode.TOKEN_MEAN,
    "sequence_mean": AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN,
    "seq_mean_token_sum_norm": AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM,
}
_TOKEN_SUM = Aggregation(mode=AggregationMode.TOKEN_SUM)

compute_rloo_outcome_advantage = verl_adapters.compute_rloo_outcome_advantage


class AdaptiveKLController:
    """Our controller with SkyRL's names."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        self._controller = KlController(coef=init_kl_coef, target=target, horizon=horizon)

    @property
    def value(self) -> float:
        """Current weight."""
        return self._controller.coef

    def update(self, current: float, n_steps: int) -> None:
        """Adapt the weight to the KL of a step."""
        self._controller = self._controller.adapt(kl=current, num_samples=n_steps)


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    loss_mask: Tensor | None = None,
    kl_estimator_type: str = "k3",
) -> Tensor:
    """Return the KL estimate of each token, times the mask."""
    if kl_estimator_type not in _ESTIMATORS:
        raise NoCounterpartError(f"KL estimator {kl_estimator_type}")
    estimator = _ESTIMATORS[kl_estimator_type]
    clamp = verl_adapters.KL_CLAMP if estimator == "k3" else None
    kl = estimate_kl(log_probs, ref_logprobs=log_probs_base, estimator=estimator, clamp=clamp)
    # Our masks are of bool; the factors of a soft mask are SkyRL's.
    return kl if loss_mask is None else torch.where(loss_mask.bool(), kl * loss_mask, 0.0)


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[object],
    grpo_norm_by_std: bool = True,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Return GRPO's advantages; a test gives more labels of groups than rows."""
    return verl_adapters.compute_grpo_outcome_advantage(
        token_level_rewards,
        response_mask,
        index[: len(token_level_rewards)],
        norm_adv_by_std_in_grpo=grpo_norm_by_std,
    )


def compute_maxrl_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[object], **_: object
) -> tuple[Tensor, Tensor]:
    """Return MaxRL's advantages."""
    advantages = compute_maxrl_advantages(
        token_level_rewards.sum(dim=-1).double(), group_ids=verl_adapters.number_groups(index)
    )
    column = advantages.float()[:, None] * response_mask
    return column, column


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lambd: float,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Return whitened GAE advantages, and returns."""
    return verl_adapters.compute_gae_advantage_return(
        token_level_rewards, values, response_mask, gamma, lambd
    )


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float, **_: object
) -> tuple[Tensor, Tensor]:
    """Return REINFORCE++'s advantages, and the returns before whitening."""
    batch = build_batch(response_mask)
    rewards = torch.where(batch.loss_mask, flatten(token_level_rewards), 0.0)
    advantages = token_estimators.compute_reinforce_plus_plus_advantages(
        rewards, samples=batch, gamma=gamma
    )
    returns = advantage_statistics.compute_discounted_sums(rewards, samples=batch, decay=gamma)
    return unflatten(advantages, response_mask), unflatten(returns, response_mask)


def reduce_loss(loss: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Return the sum over trained tokens."""
    batch = build_batch(torch.ones_like(loss) if loss_mask is None else loss_mask)
    return reduce_our_loss(
        LossTerms(loss=flatten(loss)),
        batch,
        denominators=count_denominators(batch),
        aggregation=_TOKEN_SUM,
    )


def apply_loss_reduction_to_advantages_minibatch(
    advantages: Tensor,
    loss_mask: Tensor,
    loss_reduction: str,
    micro_batch_size: int,
    max_seq_len: int,
    prompt_boundaries: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Return advantages whose sum over trained tokens is our reduced loss."""
    if loss_reduction == "prompt_mean" and prompt_boundaries is not None:
        prompts = [i for i, (start, end) in enumerate(prompt_boundaries) for _ in range(start, end)]
        batch = build_batch(loss_mask, group_ids=prompts)
        objective = PromptMeanObjective(objective=PolicyObjective(aggregation=_TOKEN_SUM))
        weights = objective.prepare(batch, seed=0)[PROMPT_WEIGHTS]
        return advantages * unflatten(weights, loss_mask)
    if loss_reduction not in _MODES:
        raise NoCounterpartError(f"loss reduction {loss_reduction} without its settings")
    batch = build_batch(loss_mask)
    losses = flatten(advantages).requires_grad_()
    needs_horizon = loss_reduction == "seq_mean_token_sum_norm"
    reduced = reduce_our_loss(
        LossTerms(loss=losses),
        batch,
        denominators=count_denominators(batch),
        aggregation=Aggregation(
            mode=_MODES[loss_reduction], horizon=max_seq_len if needs_horizon else None
        ),
    )
    # The reduction is linear, so its gradient is the factor of each loss.
    (factors,) = torch.autograd.grad(reduced, losses)
    return advantages * unflatten(factors, loss_mask)
