"""OPSM: leave out completions with a negative advantage that the policy would hardly write."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo
from temper_trainer.algorithms.policy_losses.policy_loss import compute_sequence_mean
from temper_trainer.settings.lazy_torch import compute_weighted_mean, torch
from temper_trainer.settings.ranges import PositiveFloat
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch
    from temper_engine_api.metrics import Metric


@variant("opsm")
class Opsm(Ppo):
    """PPO loss without the completions that are off-policy and have a negative advantage.

        M_t = 0   if A_t < 0 and mean over the completion of (log p_rollout - log p) > max_kl
        M_t = 1   otherwise
        loss = M * (loss of ppo)

    p_rollout is the sampler's probability, so the mean contains both the mismatch between sampler
    and trainer and the updates since the completion was sampled. It has no gradient.

    Source: DeepSeek-AI 2025, arXiv:2512.02556, section 3.1, equations 8 and 9.
    """

    own_columns: ClassVar[frozenset[str]] = frozenset({"rollout_logprobs"})

    max_kl: PositiveFloat = 0.1
    """Largest mean KL(sampler, policy) per token, in nats, of a completion that is trained although
    its advantage is negative.
    """

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return the loss of ppo, 0 at masked completions."""
        loss = Ppo.compute_surrogate(
            self, log_ratio, logprobs=logprobs, advantages=advantages, batch=batch
        )
        is_masked = self._find_masked(logprobs, advantages=advantages, batch=batch)
        return torch.where(is_masked, 0.0, loss)

    def mask_metrics(
        self, logprobs: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return the fraction of tokens in masked completions."""
        is_masked = self._find_masked(logprobs, advantages=advantages, batch=batch)
        return {"policy/opsm_fraction": compute_weighted_mean(is_masked, batch.loss_mask)}

    def _find_masked(self, logprobs: Tensor, *, advantages: Tensor, batch: SequenceBatch) -> Tensor:
        """Return [T] bool: True at the tokens of masked completions."""
        rollout = torch.where(batch.loss_mask, batch.columns["rollout_logprobs"], 0.0)
        kl = compute_sequence_mean(rollout - logprobs.detach(), batch)
        return (kl > self.max_kl) & (advantages < 0)
