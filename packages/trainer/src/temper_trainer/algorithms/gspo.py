"""GSPO: the ratio of a whole completion is what is clipped."""

from dataclasses import dataclass

from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import register_objective
from temper_trainer.algorithms.policy_loss import ClippedObjective
from temper_trainer.algorithms.surrogate import sequence_mean


@register_objective("gspo")
@dataclass(frozen=True, slots=True, kw_only=True)
class GspoObjective(ClippedObjective):
    """PPO's clip on the geometric mean of a completion's ratios.

    s = exp(mean over the completion of (log p - log p_old)); each token has s_t = sg(s) * p / sg(p), so that advantages may differ within
    a completion; loss_t = -min(s_t * A_t, clip(s_t, 1 - clip_low, 1 + clip_high) * A_t). With sequence_mean_token_mean and equal
    advantages this is the published sequence-level loss and its gradient. Clips are small here: 3e-4 and 4e-4 in the paper.

    Source: Zheng et al. 2025, arXiv:2507.18071, equations 5, 7, 13 and 14 (GSPO-token).
    """

    def effective_log_ratio(self, log_ratio: Tensor, batch: SequenceBatch) -> Tensor:
        """The completion's mean as a number, each token's own gradient."""
        return sequence_mean(log_ratio, batch).detach() + (log_ratio - log_ratio.detach())
