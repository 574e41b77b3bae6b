"""OpenRLHF's losses, computed by our algorithms; see openrlhf.models.loss."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from temper_engine_api.batch import Denominators
from temper_engine_api.objective import Aggregation, AggregationMode, HeadOutput, LossTerms
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.importance_weights import compute_rollout_correction
from temper_trainer.algorithms.objectives.policy_objective import (
    CORRECTION_WEIGHTS,
    PolicyObjective,
)
from temper_trainer.algorithms.policy_losses.clipped_losses import Gspo, Ppo
from temper_trainer.config.rollout_correction import RejectionBounds, TokenWeights
from tools.peers.padded import (
    NoCounterpartError,
    build_batch,
    compute_loss,
    flatten,
    unflatten,
)


def _build_denominators(
    mask: Tensor, *, batch_num_tokens: float | None, global_batch_size: float | None
) -> Denominators:
    counted = count_denominators(build_batch(mask))
    given = {"tokens": batch_num_tokens, "sequences": global_batch_size}
    # Counts are integers here, also where OpenRLHF divides them by the accumulated micro-batches.
    return replace(counted, **{name: int(n) for name, n in given.items() if n is not None})


def _build_aggregation(token_level_loss: bool) -> Aggregation:
    return Aggregation(
        mode=AggregationMode.TOKEN_MEAN
        if token_level_loss
        else AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN
    )


def aggregate_loss(
    loss: Tensor,
    loss_mask: Tensor,
    token_level_loss: bool = True,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
) -> Tensor:
    """Return the reduced loss, times the number of ranks over which OpenRLHF averages."""
    reduced = reduce_loss(
        LossTerms(loss=flatten(loss)),
        build_batch(loss_mask),
        denominators=_build_denominators(
            loss_mask, batch_num_tokens=batch_num_tokens, global_batch_size=global_batch_size
        ),
        aggregation=_build_aggregation(token_level_loss),
    )
    return reduced * dp_size


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """PPO's and GSPO's loss with the correction of the sampler's log-probs."""

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float | None = None
    token_level_loss: bool = True
    policy_loss_type: str = "ppo"
    enable_vllm_is_correction: bool = False
    vllm_is_truncated_threshold: list[float] | None = None
    vllm_is_correction_type: str = "tis"

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[Tensor, None, Tensor, Tensor | None]:
        """Return the loss, and the means of two log-ratios."""
        is_gspo = self.policy_loss_type == "gspo"
        columns = {"advantages": advantages, "old_logprobs": old_log_probs}
        mask = action_mask.bool()
        rollout_kl = None
        if self.enable_vllm_is_correction:
            assert rollout_log_probs is not None
            columns[CORRECTION_WEIGHTS] = self._compute_weights(
                old_log_probs, rollout_log_probs, mask=mask
            )
            rollout_kl = (rollout_log_probs - old_log_probs)[mask].mean()
        loss = Gspo if is_gspo else Ppo
        reduced = compute_loss(
            PolicyObjective(
                loss=loss(
                    clip_low=self.clip_eps_low,
                    clip_high=self.clip_eps_high,
                    dual_clip=self.dual_clip,
                ),
                aggregation=_build_aggregation(self.token_level_loss and not is_gspo),
                uses_correction_weights=self.enable_vllm_is_correction,
            ),
            mask=mask,
            output=(HeadOutput.LOGPROB, log_probs),
            columns=columns,
            denominators=_build_denominators(
                mask, batch_num_tokens=batch_num_tokens, global_batch_size=global_batch_size
            ),
        )
        policy_kl = (old_log_probs - log_probs.detach())[mask].mean()
        return reduced * dp_size, None, policy_kl, rollout_kl

    def _compute_weights(self, old: Tensor, rollout: Tensor, *, mask: Tensor) -> Tensor:
        assert self.vllm_is_truncated_threshold is not None
        low, high = self.vllm_is_truncated_threshold
        bounds = RejectionBounds(low=low or None, high=high)
        rules = {"icepop": "ratio_token", "seq-mask-tis": "ratio_mean"}
        if self.vllm_is_correction_type in rules:
            config = TokenWeights(
                truncate_at=None, reject={rules[self.vllm_is_correction_type]: bounds}
            )
        elif bool(((old - rollout).exp()[mask] < low).any()):
            raise NoCounterpartError("weights that are raised to a lower bound")
        else:
            config = TokenWeights(truncate_at=high)
        weights = compute_rollout_correction(
            config,
            samples=build_batch(mask),
            old_logprobs=flatten(old),
            rollout_logprobs=flatten(rollout),
        ).weights
        return torch.where(mask, unflatten(weights, mask), 0.0)
