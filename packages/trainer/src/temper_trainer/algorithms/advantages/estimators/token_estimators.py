"""Estimators that work token by token: GAE, VAPO and REINFORCE++."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from temper_trainer.algorithms.advantages.advantage_statistics import (
    compute_discounted_sums,
    gather_next_trained,
    whiten,
)
from temper_trainer.algorithms.advantages.estimators.estimator import (
    AdvantageEstimator,
    StepRewards,
)
from temper_trainer.algorithms.advantages.estimators.turn_estimators import select_token_rewards
from temper_trainer.settings.lazy_torch import sum_per_sequence, torch
from temper_trainer.settings.ranges import PositiveFloat, UnitFloat
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch


@variant("gae")
class Gae(AdvantageEstimator):
    """Generalized advantage estimation (arXiv:1506.02438); needs a critic."""

    inputs: ClassVar[frozenset[str]] = frozenset({"values"})
    compares_group: ClassVar[bool] = False
    is_per_token: ClassVar[bool] = True

    gamma: UnitFloat = 1.0
    """Discount per trained token."""
    gae_lambda: UnitFloat = 1.0
    """0 bootstraps from the value model only, 1 uses the rewards only."""
    value_lambda: UnitFloat | None = None
    """The same for the returns that the critic is trained on (arXiv:2503.01491). None takes
    gae_lambda.
    """
    turn_rewards: bool = False
    """Put the environment's reward of a turn at the turn's last token, not at the rollout's. It is
    multiplied by reward.shaping.scale; other shaping stays at the rollout's last token.
    """
    value_clip: PositiveFloat | None = None
    """The value loss is clipped to this range around the old value. None is off."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages and returns of ``compute_gae``."""
        assert step.values is not None
        return compute_gae(
            select_token_rewards(step, turn_rewards=self.turn_rewards),
            values=step.values,
            samples=step.samples,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            value_lambda=self.value_lambda,
        )


@variant("vapo")
class Vapo(AdvantageEstimator):
    """GAE whose lambda grows with the length; the critic has its own (arXiv:2504.05118)."""

    inputs: ClassVar[frozenset[str]] = frozenset({"values"})
    compares_group: ClassVar[bool] = False
    is_per_token: ClassVar[bool] = True

    gamma: UnitFloat = 1.0
    """Discount per trained token."""
    length_factor: PositiveFloat = 0.05
    """Lambda is 1 - 1 / (length_factor * trained tokens of the rollout), at least 0."""
    value_lambda: UnitFloat = 1.0
    """Lambda of the returns that the critic is trained on."""
    turn_rewards: bool = False
    """Put the environment's reward of a turn at the turn's last token, as with gae."""
    value_clip: PositiveFloat | None = None
    """The value loss is clipped to this range around the old value. None is off."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages and returns of ``compute_gae`` with both lambdas."""
        assert step.values is not None
        return compute_gae(
            select_token_rewards(step, turn_rewards=self.turn_rewards),
            values=step.values,
            samples=step.samples,
            gamma=self.gamma,
            gae_lambda=compute_length_adaptive_lambdas(
                step.samples, length_factor=self.length_factor
            ),
            value_lambda=self.value_lambda,
        )


@variant("reinforce_plus_plus")
class ReinforcePlusPlus(AdvantageEstimator):
    """Discounted return of each token, whitened over the step (arXiv:2501.03262)."""

    compares_group: ClassVar[bool] = False
    whitens: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = True

    gamma: UnitFloat = 1.0
    """Discount per trained token."""
    turn_rewards: bool = False
    """Put the environment's reward of a turn at the turn's last token, as with gae."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_reinforce_plus_plus_advantages``."""
        rewards = select_token_rewards(step, turn_rewards=self.turn_rewards)
        return compute_reinforce_plus_plus_advantages(
            rewards, samples=step.samples, gamma=self.gamma
        ), None


def compute_gae(
    token_rewards: Tensor,
    *,
    values: Tensor,
    samples: SequenceBatch,
    gamma: float,
    gae_lambda: float | Tensor,
    value_lambda: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute GAE advantages, and the returns that the value model is trained on.

        delta_i = r_i + gamma * V_(i+1) - V_i
        A_i = delta_i + gamma * lambda * A_(i+1)
        R_i = A_i + V_i   with lambda = value_lambda

    The index i runs over a sample's trained tokens; tool results and other untrained tokens
    between them are skipped. V and A are 0 after the last trained token, also if a completion was
    truncated at its token limit.

    Args:
        token_rewards: [T], see ``advantages.compute_token_rewards``.
        values: [T] value of the state before each token; entries at untrained tokens are ignored,
            even NaN.
        samples: B sequences, T tokens.
        gamma: Discount per trained token.
        gae_lambda: 0 bootstraps from the value model only, 1 uses the rewards only. One number, or
            [B] one per sample, see `compute_length_adaptive_lambdas`.
        value_lambda: Lambda of the returns; None takes gae_lambda.

    Returns:
        (advantages, returns), both [T] float64, 0 at untrained tokens.

    Source: Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16; another lambda for the
    returns: Yuan et al. 2025, arXiv:2503.01491, section 4.2.
    """
    trained_values = torch.where(samples.loss_mask, values.double(), 0.0)
    deltas = (
        token_rewards.double()
        + gamma * gather_next_trained(values, samples=samples)
        - trained_values
    )
    advantages = compute_discounted_sums(deltas, samples=samples, decay=gamma * gae_lambda)
    value_advantages = (
        advantages
        if value_lambda is None
        else compute_discounted_sums(deltas, samples=samples, decay=gamma * value_lambda)
    )
    return advantages, torch.where(samples.loss_mask, value_advantages + trained_values, 0.0)


def compute_length_adaptive_lambdas(samples: SequenceBatch, *, length_factor: float) -> Tensor:
    """Return a GAE lambda for each sample that grows with its length.

        lambda = 1 - 1 / (length_factor * l), at least 0

    l is the trained token count. The deltas' weights then add up to 1 / (1 - lambda), which is
    proportional to the length, so that a reward at the end also reaches the first tokens of long
    completions.

    Returns:
        [B] float64 in [0, 1).

    Source: Yue et al. 2025, arXiv:2504.05118, section 4.2 (VAPO), with length_factor 0.05.
    """
    lengths = sum_per_sequence(samples.loss_mask.double(), samples)
    # The product is below 1 for short completions, and 0 for one without trained tokens.
    return 1.0 - 1.0 / (length_factor * lengths).clamp(min=1.0)


def compute_reinforce_plus_plus_advantages(
    token_rewards: Tensor, *, samples: SequenceBatch, gamma: float
) -> Tensor:
    """Return the discounted reward-to-go, whitened over the step's trained tokens.

        R_t = r_t + gamma * R_(t+1)
        A_t = (R_t - mean(R)) / std(R)

    Args:
        token_rewards: [T] with the KL penalty subtracted, see ``advantages.compute_token_rewards``.
        samples: B sequences, T tokens.
        gamma: Discount per trained token.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Hu et al. 2025, arXiv:2501.03262, section 3.
    """
    return whiten(
        compute_discounted_sums(token_rewards, samples=samples, decay=gamma), mask=samples.loss_mask
    )
