"""verl's functions for advantages, losses and rollout correction, computed by our algorithms.

Names and arguments are those of verl.trainer.ppo.core_algos and rollout_corr_helper.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from temper_engine_api.batch import Denominators, SequenceBatch
from temper_engine_api.objective import Aggregation, AggregationMode, HeadOutput, LossTerms
from temper_engine_api.reduction import count_denominators, reduce_loss, sum_per_sequence
from temper_trainer.algorithms.advantages import advantage_statistics
from temper_trainer.algorithms.advantages.estimators import group_estimators, token_estimators
from temper_trainer.algorithms.importance_weights import (
    compute_mismatch_metrics,
    compute_rollout_correction,
)
from temper_trainer.algorithms.kl import KlEstimator, estimate_kl, estimate_kl_loss
from temper_trainer.algorithms.objectives.policy_objective import (
    CORRECTION_WEIGHTS,
    PolicyObjective,
)
from temper_trainer.algorithms.objectives.value_loss import ValueObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo
from temper_trainer.config.rollout_correction import (
    Mask,
    RejectionBounds,
    SequenceWeights,
    TokenWeights,
)
from tools.peers.padded import (
    NoCounterpartError,
    build_batch,
    compute_loss,
    flatten,
    unflatten,
)

_MODES = {
    "token-mean": AggregationMode.TOKEN_MEAN,
    "token-sum": AggregationMode.TOKEN_SUM,
    "seq-mean-token-sum": AggregationMode.SEQUENCE_MEAN_TOKEN_SUM,
    "seq-mean-token-sum-norm": AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM,
    "seq-mean-token-mean": AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN,
}


def number_groups(index: Sequence[object]) -> Tensor:
    """Return the number of each row's group, from any labels of groups."""
    numbers = {label: i for i, label in enumerate(dict.fromkeys(index))}
    return torch.tensor([numbers[label] for label in index])


def _spread(advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages [B] at all trained tokens, twice: verl's returns are the same."""
    column = advantages.float()[:, None] * mask
    return column, column


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[object],
    norm_adv_by_std_in_grpo: bool = True,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Return GRPO's advantages."""
    advantages = group_estimators.compute_grpo_advantages(
        token_level_rewards.sum(dim=-1),
        group_ids=number_groups(index),
        scale_by_std=norm_adv_by_std_in_grpo,
    )
    return _spread(advantages, response_mask)


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[object], **_: object
) -> tuple[Tensor, Tensor]:
    """Return RLOO's advantages."""
    advantages = group_estimators.compute_rloo_advantages(
        token_level_rewards.sum(dim=-1), group_ids=number_groups(index)
    )
    return _spread(advantages, response_mask)


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return whitened GAE advantages, and returns."""
    batch = build_batch(response_mask)
    advantages, returns = token_estimators.compute_gae(
        torch.where(batch.loss_mask, flatten(token_level_rewards), 0.0),
        values=flatten(values),
        samples=batch,
        gamma=gamma,
        gae_lambda=lam,
    )
    whitened = advantage_statistics.whiten(advantages, mask=batch.loss_mask)
    return unflatten(whitened, response_mask), unflatten(returns, response_mask)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any, **_: object
) -> tuple[Tensor, Tensor]:
    """Return REINFORCE++'s advantages, and the returns before whitening."""
    batch = build_batch(response_mask)
    rewards = torch.where(batch.loss_mask, flatten(token_level_rewards), 0.0)
    advantages = token_estimators.compute_reinforce_plus_plus_advantages(
        rewards, samples=batch, gamma=config.gamma
    )
    returns = advantage_statistics.compute_discounted_sums(
        rewards, samples=batch, decay=config.gamma
    )
    return unflatten(advantages, response_mask), unflatten(returns, response_mask)


def build_aggregation(mode: str, *, mask: Tensor, horizon: int | None = None) -> Aggregation:
    """Return our aggregation of one of verl's modes."""
    needs_horizon = mode == "seq-mean-token-sum-norm"
    return Aggregation(
        mode=_MODES[mode], horizon=(horizon or mask.shape[1]) if needs_horizon else None
    )


def _build_denominators(
    mask: Tensor, *, batch_num_tokens: int | None, global_batch_size: int | None
) -> Denominators:
    counted = count_denominators(build_batch(mask))
    return Denominators(
        tokens=counted.tokens if batch_num_tokens is None else int(batch_num_tokens),
        sequences=counted.sequences if global_batch_size is None else int(global_batch_size),
        groups=counted.groups,
    )


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """Return the reduced loss, times the number of ranks over which verl averages."""
    loss = reduce_loss(
        LossTerms(loss=flatten(loss_mat)),
        build_batch(loss_mask),
        denominators=_build_denominators(
            loss_mask, batch_num_tokens=batch_num_tokens, global_batch_size=global_batch_size
        ),
        aggregation=build_aggregation(loss_agg_mode, mask=loss_mask, horizon=loss_scale_factor),
    )
    # verl averages the gradients of data-parallel ranks, and we add them.
    return loss * dp_size


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[Tensor, None]:
    """Return the clipped value loss; the clip fraction is a metric here."""
    loss = compute_loss(
        ValueObjective(
            clip=cliprange_value,
            aggregation=build_aggregation(
                loss_agg_mode, mask=response_mask, horizon=loss_scale_factor
            ),
        ),
        mask=response_mask,
        output=(HeadOutput.VALUE, vpreds),
        columns={"returns": returns, "values": values},
        denominators=_build_denominators(
            response_mask, batch_num_tokens=batch_num_tokens, global_batch_size=global_batch_size
        ),
    )
    return loss * dp_size, None


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return PPO's loss with dual clip and correction weights."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    columns = {"advantages": advantages, "old_logprobs": old_log_prob}
    if rollout_is_weights is not None:
        columns[CORRECTION_WEIGHTS] = rollout_is_weights
    loss = compute_loss(
        PolicyObjective(
            loss=Ppo(
                clip_low=config.clip_ratio if low is None else low,
                clip_high=config.clip_ratio if high is None else high,
                dual_clip=config.clip_ratio_c,
            ),
            aggregation=build_aggregation(loss_agg_mode, mask=response_mask),
            uses_correction_weights=rollout_is_weights is not None,
        ),
        mask=response_mask,
        output=(HeadOutput.LOGPROB, log_prob),
        columns=columns,
    )
    return loss, {}


_KL_NAMES: Mapping[str, KlEstimator] = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
KL_CLAMP = 10.0
"""verl's bound on k3."""


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Return the KL estimate of each token; a + takes the gradient of k2."""
    name = kl_penalty.removesuffix("+")
    if name not in _KL_NAMES:
        raise NoCounterpartError(f"KL estimator {name}")
    estimator = _KL_NAMES[name]
    clamp = KL_CLAMP if estimator == "k3" else None
    if not kl_penalty.endswith("+"):
        return estimate_kl(logprob, ref_logprobs=ref_logprob, estimator=estimator, clamp=clamp)
    return estimate_kl_loss(
        logprob,
        ref_logprobs=ref_logprob,
        log_ratio=torch.zeros_like(logprob),
        estimator="k1+" if estimator == "k1" else "k3+",
        clamp=clamp,
    )


def _parse_bounds(threshold: str | float) -> tuple[float | None, float]:
    """Return the bounds of a threshold: a number, or two as in 0.5_2.0."""
    low, separator, high = str(threshold).partition("_")
    return (float(low), float(high)) if separator else (None, float(low))


def translate_rule(option: str, threshold: str | float) -> tuple[str, RejectionBounds]:
    """Return our rule of one of verl's options of rollout_rs."""
    scope, _, estimator = option.rpartition("_")
    over = scope.removeprefix("seq_")
    low, high = _parse_bounds(threshold)
    if estimator != "k1":
        return f"{estimator}_{over}", RejectionBounds(high=high)
    # verl's k1 is -log(old / rollout), so its bounds are of the inverse ratio.
    low = 1 / high if low is None else low
    return f"ratio_{over}", RejectionBounds(low=1 / high, high=1 / low)


def _measure_statistic(option: str, *, batch: SequenceBatch, log_ratio: Tensor) -> float:
    """Return the mean of an option's statistic, which verl logs."""
    scope, _, estimator = option.rpartition("_")
    kl = estimate_kl(
        torch.zeros_like(log_ratio),
        ref_logprobs=log_ratio,
        estimator=_KL_NAMES[estimator],
    )
    kl = torch.where(batch.loss_mask, kl, 0.0)
    if scope == "token":
        return float(kl.sum() / batch.loss_mask.sum())
    if scope == "seq_max":
        return float(kl.reshape(batch.num_sequences, -1).amax(dim=1).mean())
    total = sum_per_sequence(kl, batch)
    if scope == "seq_mean":
        total = total / sum_per_sequence(batch.loss_mask.float(), batch)
    return float(total.mean())


_CORRECTION_METRICS = {
    "correction/weight_mean": "rollout_is_mean",
    "correction/weight_max": "rollout_is_max",
    "correction/effective_sample_fraction": "rollout_is_eff_sample_size",
    "correction/masked_fraction": "rollout_is_oob_ratio",
}
"""verl's names of our metrics."""


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> tuple[object, Tensor, dict[str, float]]:
    """Return importance weights, the mask without rejected tokens, and metrics."""
    batch = build_batch(response_mask)
    old, rollout = flatten(old_log_prob), flatten(rollout_log_prob)
    options = rollout_rs.split(",") if rollout_rs else []
    thresholds = str(rollout_rs_threshold).split(",") if rollout_rs else []
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    metrics |= {
        f"rollout_rs_{option}_mean": _measure_statistic(
            option, batch=batch, log_ratio=old - rollout
        )
        for option in options
    }
    mask, weights = response_mask, None
    if options:
        rules = dict(map(translate_rule, options, thresholds))
        correction = compute_rollout_correction(
            Mask(reject=rules),
            samples=batch,
            old_logprobs=old,
            rollout_logprobs=rollout,
        )
        mask = response_mask * (unflatten(correction.weights, response_mask) > 0)
        metrics["rollout_rs_masked_fraction"] = correction.metrics["correction/masked_fraction"]
    if rollout_is is not None:
        assert rollout_is_threshold is not None
        low, high = _parse_bounds(rollout_is_threshold)
        # Two bounds are IcePop's: weights outside them become 0 and are not truncated.
        reject = {} if low is None else {f"ratio_{rollout_is}": RejectionBounds(low=low, high=high)}
        weights_class = TokenWeights if rollout_is == "token" else SequenceWeights
        correction = compute_rollout_correction(
            weights_class(
                truncate_at=high if low is None else None,
                self_normalize=rollout_is_batch_normalize,
                reject=reject,
            ),
            samples=batch,
            old_logprobs=old,
            rollout_logprobs=rollout,
        )
        weights = unflatten(correction.weights, response_mask)
        metrics |= {
            name: correction.metrics[key]
            for key, name in _CORRECTION_METRICS.items()
            if reject or key != "correction/masked_fraction"
        }
    named = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    from verl.protocol import DataProto  # imported only where verl's tests run

    wrapped = (
        None if weights is None else DataProto.from_dict(tensors={"rollout_is_weights": weights})
    )
    return wrapped, mask, named


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Return our metrics of the mismatch that verl has, too."""
    if rollout_log_prob is None:
        return {}
    batch = build_batch(response_mask)
    old, rollout = flatten(old_log_prob), flatten(rollout_log_prob)
    metrics = compute_mismatch_metrics(old, rollout_logprobs=rollout, loss_mask=batch.loss_mask)
    kl = torch.where(batch.loss_mask, estimate_kl(rollout, ref_logprobs=old, estimator="k1"), 0.0)
    return {
        "k3_kl": metrics["mismatch/kl"].result,
        "kl": float(kl.sum() / batch.loss_mask.sum()),
    }
