"""SkyRL's policy losses and off-policy corrections, computed by our algorithms.

Names and arguments are those of ppo_utils and off_policy_correction_utils in
skyrl.backends.skyrl_train.utils.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from temper_engine_api.objective import Aggregation, AggregationMode, HeadOutput, HeadOutputs
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.importance_weights import compute_rollout_correction
from temper_trainer.algorithms.objectives.policy_objective import (
    CORRECTION_WEIGHTS,
    PolicyObjective,
)
from temper_trainer.algorithms.policy_losses.clipped_losses import Cispo, Gspo, Ppo, Sapo
from temper_trainer.algorithms.policy_losses.covariance_losses import ClipCov, KlCov
from temper_trainer.algorithms.policy_losses.divergence_losses import Dppo
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.config.rollout_correction import (
    Mask,
    RejectionBounds,
    RolloutCorrection,
    SequenceWeights,
    TokenWeights,
)
from tools.peers.padded import NoCounterpartError, build_batch, flatten, unflatten

Corrected = tuple[Tensor, dict[str, float]]
"""Weights or a mask, and metrics."""

_BUILDERS: Mapping[str, Callable[[Any], PolicyLoss]] = {
    "regular": lambda config: Ppo(clip_low=config.eps_clip_low, clip_high=config.eps_clip_high),
    "dual_clip": lambda config: Ppo(
        clip_low=config.eps_clip_low,
        clip_high=config.eps_clip_high,
        dual_clip=config.clip_ratio_c,
    ),
    "gspo": lambda config: Gspo(clip_low=config.eps_clip_low, clip_high=config.eps_clip_high),
    "cispo": lambda config: Cispo(
        clip_low=config.cispo.cispo_eps_clip_low, clip_high=config.cispo.cispo_eps_clip_high
    ),
    "clip_cov": lambda config: ClipCov(
        clip_low=config.eps_clip_low,
        clip_high=config.eps_clip_high,
        fraction=config.clip_cov.clip_ratio,
        min_covariance=config.clip_cov.clip_cov_lb,
        max_covariance=config.clip_cov.clip_cov_ub,
    ),
    "kl_cov": lambda config: KlCov(
        fraction=config.kl_cov.kl_cov_frac, kl_cov_coef=config.kl_cov.ppo_kl_coef
    ),
    "sapo": lambda config: Sapo(
        positive_temperature=config.sapo.tau_pos, negative_temperature=config.sapo.tau_neg
    ),
    "dppo": lambda config: Dppo(
        divergence=config.dppo.dppo_type.removeprefix("binary_"),
        clip_low=config.dppo.delta_low,
        clip_high=config.dppo.delta_high,
    ),
}
"""Our losses by SkyRL's names, from its configuration."""


class PolicyLossRegistry:
    """Our losses with the arguments of SkyRL's."""

    @staticmethod
    def repopulate_registry() -> None:
        """Do nothing: nothing can remove our losses."""

    @staticmethod
    def get(name: str) -> Callable[..., tuple[Tensor, dict[str, float]]]:
        """Return a function that computes a loss, summed over tokens, and its metrics."""
        if name not in _BUILDERS:
            raise NoCounterpartError(f"policy loss {name}")

        def compute(
            log_probs: Tensor,
            old_log_probs: Tensor,
            advantages: Tensor,
            config: Any,
            loss_mask: Tensor | None = None,
            rollout_logprobs: Tensor | None = None,
        ) -> tuple[Tensor, dict[str, float]]:
            mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
            weights = None
            if name == "cispo" and config.cispo.cispo_anchor == "rollout":
                if rollout_logprobs is None or config.off_policy_correction.tis_ratio_type:
                    raise NoCounterpartError("SkyRL's message about the anchor of CISPO")
                # Our rollout_correction=rollout_ratio.
                old_log_probs = rollout_logprobs
            elif name == "dppo" and rollout_logprobs is not None:
                raise NoCounterpartError("the divergence of DPPO from the sampler's policy")
            elif rollout_logprobs is not None:
                weights, _, kept = compute_off_policy_correction(
                    old_log_probs, rollout_logprobs, mask, config.off_policy_correction
                )
                weights = kept if weights is None else weights * kept
            return _compute_loss(
                _BUILDERS[name](config),
                log_probs=log_probs,
                old_log_probs=old_log_probs,
                advantages=advantages,
                mask=mask,
                weights=weights,
            )

        return compute


def _compute_loss(
    loss: PolicyLoss,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, dict[str, float]]:
    columns = {"advantages": advantages, "old_logprobs": old_log_probs}
    if weights is not None:
        columns[CORRECTION_WEIGHTS] = weights
    objective = PolicyObjective(
        loss=loss,
        uses_correction_weights=weights is not None,
        aggregation=Aggregation(mode=AggregationMode.TOKEN_SUM),
    )
    batch = build_batch(mask, columns=columns)
    batch = batch.with_columns(objective.prepare(batch, seed=0))
    terms = objective(HeadOutputs(columns={HeadOutput.LOGPROB: flatten(log_probs)}), batch)
    fractions = [terms.metrics.get(f"policy/clip_fraction_{side}") for side in ("low", "high")]
    reduced = reduce_loss(
        terms,
        batch,
        denominators=count_denominators(batch),
        aggregation=objective.aggregation,
    )
    return reduced, {"clip_ratio": sum(each.result for each in fractions if each is not None)}


def _correct(
    config: RolloutCorrection, old: Tensor, rollout: Tensor, mask: Tensor
) -> tuple[Tensor, Mapping[str, float]]:
    correction = compute_rollout_correction(
        config,
        samples=build_batch(mask),
        old_logprobs=flatten(old),
        rollout_logprobs=flatten(rollout),
    )
    return unflatten(correction.weights, mask), correction.metrics


def compute_tis_ratio(
    old_log_probs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    tis_ratio_type: str,
    off_policy_correction: Any,
) -> Corrected:
    """Return truncated weights of tokens [B, L], or of rows [B, 1]."""
    if tis_ratio_type == "token":
        config: RolloutCorrection = TokenWeights(
            truncate_at=off_policy_correction.token_tis_ratio_clip_high
        )
    elif tis_ratio_type == "sequence":
        config = SequenceWeights(truncate_at=off_policy_correction.sequence_tis_ratio_clip_high)
    else:
        raise NoCounterpartError("SkyRL's message about an unknown type of weights")
    weights, metrics = _correct(config, old_log_probs, rollout_logprobs, loss_mask)
    fraction = metrics["correction/truncated_fraction"]
    if tis_ratio_type == "token":
        return weights, {"tis_token_clip_high_ratio": fraction}
    # All tokens of a row have the same weight, and untrained ones have 1 here.
    first = loss_mask.argmax(dim=-1, keepdim=True)
    return weights.gather(-1, first), {"tis_seq_clip_high_ratio": fraction}


def _reject(
    rule: str,
    low: float | None,
    high: float | None,
    *,
    columns: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Mapping[str, float]]:
    """Return 1 at kept and at untrained tokens, and our metrics; without bounds all are kept."""
    old, rollout, mask = columns
    if low is None and high is None:
        return torch.ones_like(mask), {"correction/rejected_fraction": 0.0}
    config = Mask(reject={rule: RejectionBounds(low=low, high=high)})
    weights, metrics = _correct(config, old, rollout, mask)
    # SkyRL does not reject untrained tokens.
    return torch.where(mask > 0, (weights > 0).float(), 1.0), metrics


def _reject_rows(
    rule: str,
    low: float | None,
    high: float | None,
    *,
    name: str,
    columns: tuple[Tensor, Tensor, Tensor],
) -> Corrected:
    """Return [B, 1], 0 at rejected rows, and the fractions that both bounds and each one reject."""
    bounds = {"masked": (low, high), "over_high": (None, high), "under_low": (low, None)}
    rejected = {side: _reject(rule, *each, columns=columns) for side, each in bounds.items()}
    metrics = {
        f"{name}_{side}_ratio": metrics["correction/rejected_fraction"]
        for side, (_, metrics) in rejected.items()
    }
    return rejected["masked"][0].amin(dim=-1, keepdim=True), metrics


def compute_token_mask(
    old_log_probs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    off_policy_correction: Any,
) -> Corrected:
    """Return 0 at tokens whose ratio is outside the bounds."""
    kept, metrics = _reject(
        "ratio_token",
        off_policy_correction.token_mask_is_threshold_low,
        off_policy_correction.token_mask_is_threshold_high,
        columns=(old_log_probs, rollout_logprobs, loss_mask),
    )
    return kept, {"token_mask_ratio": metrics["correction/masked_fraction"]}


def compute_outlier_token_mask(
    old_log_probs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    off_policy_correction: Any,
) -> Corrected:
    """Return [B, 1], 0 at rows with a token whose ratio is outside the bounds."""
    return _reject_rows(
        "ratio_max",
        off_policy_correction.outlier_token_is_threshold_low,
        off_policy_correction.outlier_token_is_threshold_high,
        name="outlier_seq",
        columns=(old_log_probs, rollout_logprobs, loss_mask),
    )


def compute_sequence_mask(
    old_log_probs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_mask_metric: str,
    off_policy_correction: Any,
) -> Corrected:
    """Return [B, 1], 0 at rows whose product or geometric mean of ratios is outside the bounds."""
    rules = {"geometric": ("ratio_mean", "geo"), "product": ("ratio_sum", "product")}
    if sequence_mask_metric not in rules:
        raise NoCounterpartError("SkyRL's message about an unknown metric of rows")
    rule, name = rules[sequence_mask_metric]
    return _reject_rows(
        rule,
        getattr(off_policy_correction, f"{name}_mask_low"),
        getattr(off_policy_correction, f"{name}_mask_high"),
        name=f"{name}_sequence_mask",
        columns=(old_log_probs, rollout_logprobs, loss_mask),
    )


def compute_off_policy_correction(
    old_log_probs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    off_policy_correction: Any,
) -> tuple[Tensor | None, dict[str, float], Tensor]:
    """Return weights, metrics, and the mask without what is rejected."""
    columns = (old_log_probs, rollout_logprobs, loss_mask)
    config, metrics, mask = off_policy_correction, dict[str, float](), loss_mask
    weights = None
    low, high = config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high
    if low is not None or high is not None:
        kept, own = compute_outlier_token_mask(*columns, config)
        mask, metrics = mask * kept, metrics | own
    if config.token_mask_is_threshold_low is not None:
        kept, own = compute_token_mask(*columns, config)
        mask, metrics = mask * kept, metrics | own
    if config.tis_ratio_type is not None:
        weights, own = compute_tis_ratio(*columns, config.tis_ratio_type, config)
        metrics |= own
    if config.sequence_mask_metric is not None:
        kept, own = compute_sequence_mask(*columns, config.sequence_mask_metric, config)
        mask, metrics = mask * kept, metrics | own
    if metrics:
        metrics["is_ratio_mean"] = float(
            ((old_log_probs - rollout_logprobs).exp() * loss_mask).sum() / loss_mask.sum()
        )
    return weights, metrics, mask
