"""CISPO: the importance weight is clipped, never the gradient."""

from dataclasses import dataclass

from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import register_objective
from temper_trainer.algorithms.policy_loss import ClippedObjective


@register_objective("cispo")
@dataclass(frozen=True, slots=True, kw_only=True)
class CispoObjective(ClippedObjective):
    """REINFORCE with a clipped importance weight: every token keeps a gradient, also those that PPO's clip would silence.

    loss = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A * log p. With clip_low = 1 only the upper side is clipped, as in the paper.

    Source: MiniMax 2025, arXiv:2506.13585, equations 4 and 5.
    """

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """-sg(clip(rho)) * A * log p."""
        weight = log_ratio.detach().exp().clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -weight * advantages * logprobs
