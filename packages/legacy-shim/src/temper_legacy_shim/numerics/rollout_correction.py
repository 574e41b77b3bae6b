"""Correction for a sampler that differs from the policy, inside the loss ``bypass_mode``, where old log-probs are the sampler's.

Log-ratios here are log p - log p_sampler. Tensors are [B, W] under a mask of 0 and 1; every statistic is the micro-batch's.
"""

import torch
from torch import Tensor

from temper_engine_api.errors import ConfigError
from temper_legacy_shim.numerics.masked import masked_mean, masked_sum
from temper_legacy_shim.numerics.policy_losses import MAX_LOG_RATIO, Numbers, PolicyInputs, clipped
from temper_legacy_shim.numerics.rejection import rejected
from temper_legacy_shim.numerics.settings import PolicyLossSettings, RolloutCorrectionSettings

PREFIX = "rollout_corr/"


def bypass(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """``bypass_mode``: the clipped loss, or -w A log p, on the tokens that no rule rejects; w is the cut importance weight."""
    chosen = settings.rollout_correction
    weights, mask, found = correct(inputs, chosen)
    kept = PolicyInputs(
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        mask=mask,
        weights=weights if chosen.loss_type == "reinforce" else None,
        agg_mode=inputs.agg_mode,
    )
    if chosen.loss_type == "ppo_clip":
        loss, metrics = clipped(kept, settings)
    elif chosen.loss_type == "reinforce":
        loss = kept.reduced(-inputs.advantages * inputs.logprobs)
        metrics = {"actor/ppo_kl": kept.mean(inputs.old_logprobs - inputs.logprobs)}
    else:
        raise ConfigError(f"rollout_correction.loss_type is {chosen.loss_type!r}, but must be ppo_clip or reinforce.")
    return loss, {**metrics, **found}


@torch.no_grad()
def correct(inputs: PolicyInputs, settings: RolloutCorrectionSettings) -> tuple[Tensor | None, Tensor, Numbers]:
    """Weights or None, the mask of what is not rejected, and the metrics of both.

    Raises:
        ValueError: no token is masked in, as the old release did.
    """
    mask = inputs.mask
    if not bool(mask.any()):
        raise ValueError("response_mask has no token in this micro-batch, and rollout correction divides by their number.")
    log_ratio = inputs.logprobs.detach() - inputs.old_logprobs
    weights, numbers = None, Numbers()
    if settings.rollout_is is not None:
        weights, numbers = importance_weights(log_ratio, mask=mask, settings=settings)
    kept = mask
    if settings.rollout_rs is not None:
        kept, rejections = rejected(log_ratio, mask=mask, rules=settings.rollout_rs, thresholds=settings.rollout_rs_threshold)
        numbers |= rejections
    prefixed = {PREFIX + name: value for name, value in numbers.items()}
    return weights, kept, prefixed | mismatch(inputs.logprobs.detach(), rollout_logprobs=inputs.old_logprobs, mask=mask)


def importance_weights(log_ratio: Tensor, *, mask: Tensor, settings: RolloutCorrectionSettings) -> tuple[Tensor, Numbers]:
    """[B, W] exp of each token's log-ratio, or of its sequence's sum, cut at the threshold; its metrics see it before the cut."""
    threshold = float(settings.rollout_is_threshold)
    if threshold <= 0 or settings.rollout_is not in ("token", "sequence"):
        raise ConfigError(f"rollout_is is {settings.rollout_is!r} (token or sequence) and its threshold {threshold} (above 0).")
    is_token = settings.rollout_is == "token"
    level = log_ratio if is_token else masked_sum(log_ratio, mask, dim=-1)[:, None]
    weights = level.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(log_ratio) * mask
    numbers = _weight_numbers(weights, level=level, mask=mask, threshold=threshold, is_token=is_token)
    weights = weights.clamp(max=threshold)
    if settings.rollout_is_batch_normalize:
        if is_token:
            mean = masked_mean(weights, mask)
        else:
            has_tokens = (mask.sum(-1) > 0).float()
            mean = (masked_mean(weights, mask, dim=-1) * has_tokens).sum() / has_tokens.sum().clamp(min=1e-8)
        factor = float(mean)
        numbers["rollout_is_batch_norm_factor"] = factor if factor > 1e-8 else 1.0
        weights = weights / mean if factor > 1e-8 else weights
    return weights, numbers


def _weight_numbers(weights: Tensor, *, level: Tensor, mask: Tensor, threshold: float, is_token: bool) -> Numbers:
    low = 1.0 / threshold
    numbers = {"rollout_is_mean": float(masked_mean(weights, mask))}
    if is_token:
        numbers["rollout_is_ratio_fraction_high"] = float(masked_mean((weights > threshold).float(), mask))
        numbers["rollout_is_ratio_fraction_low"] = float(masked_mean((weights < low).float(), mask))
        numbers["rollout_is_max"] = float(weights[mask.bool()].max())
        numbers["rollout_is_min"] = float(weights[mask.bool()].min())
    else:
        bounds = torch.tensor([low, threshold]).log()
        numbers["rollout_is_max"] = float(level.max().clamp(max=MAX_LOG_RATIO).exp())
        numbers["rollout_is_min"] = float(level.min().exp())
        numbers["rollout_is_ratio_fraction_high"] = float((level > bounds[1]).float().mean())
        numbers["rollout_is_ratio_fraction_low"] = float((level < bounds[0]).float().mean())
    held = weights.clamp(low, threshold)
    mean = masked_mean(held, mask)
    variance = (masked_mean(held.square(), mask) - mean.square()).clamp(min=0.0)
    numbers["rollout_is_std"] = float(variance.sqrt()) if int(mask.sum()) > 1 else 0.0
    numbers["rollout_is_eff_sample_size"] = 1.0 / float(masked_mean((held / (mean + 1e-8)).square(), mask))
    rows = masked_mean(weights, mask, dim=-1)
    numbers["rollout_is_seq_mean"] = float(rows.mean())
    numbers["rollout_is_seq_std"] = float(rows.std()) if rows.numel() > 1 else 0.0
    numbers["rollout_is_seq_max"] = float(rows.max())
    numbers["rollout_is_seq_min"] = float(rows.min())
    numbers["rollout_is_seq_max_deviation"] = float((rows - 1.0).abs().max())
    numbers["rollout_is_seq_fraction_high"] = float((rows > threshold).float().mean())
    numbers["rollout_is_seq_fraction_low"] = float((rows < low).float().mean())
    return numbers


@torch.no_grad()
def mismatch(logprobs: Tensor, *, rollout_logprobs: Tensor, mask: Tensor) -> Numbers:
    """How far the policy is from the sampler: perplexities, KL estimates and chi-square, averaged over tokens or over rows."""
    log_ratio = logprobs - rollout_logprobs
    own, theirs = masked_mean(logprobs, mask, dim=-1), masked_mean(rollout_logprobs, mask, dim=-1)
    gap = theirs - own
    safe = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    whole = masked_sum(log_ratio, mask, dim=-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    numbers = {
        "training_ppl": (-own).exp().mean(),
        "training_log_ppl": (-own).mean(),
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(log_ratio.exp() - log_ratio - 1, mask),
        "rollout_ppl": (-theirs).exp().mean(),
        "rollout_log_ppl": (-theirs).mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": masked_mean(safe.exp().square(), mask) - 1.0,
        "chi2_seq": (2.0 * whole).exp().mean() - 1.0,
    }
    return {PREFIX + name: float(value) for name, value in numbers.items()}
