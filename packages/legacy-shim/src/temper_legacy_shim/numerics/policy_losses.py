"""The old policy losses by old name, with the metrics of each.

Formulas in the notation rho = exp(log p - log p_old), advantage A; every mean is over the
micro-batch at hand.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.errors import ConfigError
from temper_legacy_shim.numerics.masked_losses import EPSILON, aggregate, masked_mean, masked_sum
from temper_legacy_shim.numerics.rejection import rejected

MAX_LOG_RATIO = 20.0

Numbers = dict[str, float]
"""Metrics of one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionSettings:
    """``policy_loss.rollout_correction``: weights and rejection by the sampler's distance."""

    rollout_is: str | None = "sequence"
    """token, sequence, or None for no weights."""
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean."""
    rollout_rs: str | None = None
    """Rejection rules, separated by commas; None does not reject."""
    rollout_rs_threshold: str | float | None = None
    """A bound for all rules, or a bound for each, separated by commas."""
    bypass_mode: bool = False
    """True if old_log_probs are the sampler's."""
    loss_type: str = "ppo_clip"
    """ppo_clip or reinforce; of the loss ``bypass_mode``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSettings:
    loss_mode: str = "vanilla"
    """See ``policy_loss``."""
    clip_low: float = 0.2
    """clip_ratio_low, or clip_ratio where that is null."""
    clip_high: float = 0.2
    """clip_ratio_high, or clip_ratio where that is null."""
    clip_ratio_c: float = 3.0
    """Dual clip; above 1."""
    tau_pos: float = 1.0
    """sapo, for positive advantages."""
    tau_neg: float = 1.05
    """sapo, for the others."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: share of tokens without loss."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of covariance."""
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    """kl_cov: share of tokens that pay."""
    ppo_kl_coef: float = 0.1
    """kl_cov: coefficient of the penalty on these tokens."""
    rollout_correction: RolloutCorrectionSettings = RolloutCorrectionSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Inputs of a policy loss, each [B, W]."""

    logprobs: Tensor
    """Log-probs of the current policy, with gradient."""
    old_logprobs: Tensor
    """Log-probs of the policy before the step."""
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None
    """Importance weights that multiply the loss of each token."""
    agg_mode: str = "token-mean"
    """See ``masked.aggregate``."""

    def reduced(self, loss: Tensor, *, mode: str | None = None) -> Tensor:
        """Return the weighted loss per token as one number."""
        weighted = loss if self.weights is None else loss * self.weights
        return aggregate(weighted, self.mask, mode or self.agg_mode)

    def mean(self, values: Tensor) -> float:
        """Return the mean under the mask, for a metric."""
        return float(masked_mean(values.detach().float(), self.mask))

    def log_ratio(self) -> Tensor:
        """Log rho, held to [-20, 20]."""
        return torch.clamp(self.logprobs - self.old_logprobs, min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO)


PolicyLoss = Callable[[PolicyInputs, PolicyLossSettings], tuple[Tensor, Numbers]]


def clipped(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute ``vanilla``: -min(rho A, clip(rho) A), for A < 0 at most -c A (dual clip)."""
    log_ratio, advantages = inputs.log_ratio(), inputs.advantages
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    worse = torch.maximum(plain, bounded)
    bound = -advantages * settings.clip_ratio_c
    # Without the bound, a token with a negative advantage and a large ratio has an unbounded loss
    # (dual clip: Ye et al. 2020, arXiv:1912.09729).
    loss = torch.where(advantages < 0, torch.minimum(bound, worse), worse)
    return inputs.reduced(loss), {
        "actor/pg_clipfrac": inputs.mean(bounded > plain),
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": inputs.mean((worse > bound) & (advantages < 0)),
    }


def sequence_ratio(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute ``gspo``: the clipped loss with the sequence's mean log-ratio, by rows."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    length = inputs.mask.sum(-1).clamp(min=1)
    mean = (log_ratio * inputs.mask).sum(-1) / length
    # The value is the sequence's, the gradient each token's own.
    shared = inputs.logprobs - inputs.logprobs.detach() + mean.detach()[:, None]
    # The old release bounded this log-ratio only from above, and at 10 instead of `MAX_LOG_RATIO`.
    ratio = torch.clamp(shared, max=10.0).exp()
    plain = -inputs.advantages * ratio
    bounded = -inputs.advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return inputs.reduced(torch.maximum(plain, bounded), mode="seq-mean-token-mean"), {
        "actor/pg_clipfrac": inputs.mean(bounded > plain),
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": 0.0,
    }


def soft_gate(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute ``sapo``: -A 4/tau sigmoid(tau (rho - 1)), one tau per sign of A, by rows."""
    log_ratio = inputs.log_ratio()
    tau = torch.where(inputs.advantages > 0, settings.tau_pos, settings.tau_neg)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    return inputs.reduced(-gate * inputs.advantages, mode="seq-mean-token-mean"), {
        "actor/pg_clipfrac": 0.0,
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": 0.0,
    }


def plain_gradient(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute ``gpg``: -A log p, without metrics."""
    return inputs.reduced(-inputs.logprobs * inputs.advantages), {}


def clipped_weight(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute ``cispo``: -clip(rho) A log p, the clipped ratio without gradient."""
    log_ratio = inputs.log_ratio()
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return inputs.reduced(-bounded.detach() * inputs.advantages * inputs.logprobs), {
        "actor/pg_clipfrac": inputs.mean(bounded != ratio),
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": 0.0,
    }


def geometric_mean(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute ``geo_mean``: a row's geometric mean of clipped ratios times mean advantage."""
    log_ratio, mask = inputs.log_ratio(), inputs.mask
    sign = inputs.advantages.sign()
    bounded = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    worse = sign * torch.minimum(sign * log_ratio, sign * bounded)
    count = mask.sum(-1) + EPSILON
    ratio = ((worse * mask).sum(-1) / count).exp()
    advantage = (inputs.advantages * mask).sum(-1) / count
    loss = -advantage * ratio
    if inputs.weights is not None:
        loss = loss * (((inputs.weights + 1e-10).log() * mask).sum(-1) / count).exp()
    is_kept = bounded != log_ratio
    return loss.mean(), {
        "actor/pg_clipfrac": inputs.mean(is_kept & (inputs.advantages > 0)),
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": inputs.mean(is_kept & (inputs.advantages < 0)),
    }


def total_variation(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute ``dppo_tv``: drop tokens whose probability moved too far toward A."""
    moved = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()
    return _drop_divergent(
        inputs, settings, is_over=moved > settings.clip_high, is_under=moved < -settings.clip_low
    )


def bernoulli_kl(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute ``dppo_kl``: ``dppo_tv`` with the binary KL of "this token or another"."""
    new, old = inputs.logprobs.detach().exp(), inputs.old_logprobs.exp()
    distance = _binary_kl(old, new, log_old=inputs.old_logprobs, log_new=inputs.logprobs.detach())
    is_over = (distance > settings.clip_high) & (new > old)
    is_under = (distance > settings.clip_low) & (new < old)
    return _drop_divergent(inputs, settings, is_over=is_over, is_under=is_under)


def _binary_kl(old: Tensor, new: Tensor, *, log_old: Tensor, log_new: Tensor) -> Tensor:
    rest = (1 - old) * ((1 - old + EPSILON).log() - (1 - new + EPSILON).log())
    return old * (log_old - log_new) + rest


def _drop_divergent(
    inputs: PolicyInputs, settings: PolicyLossSettings, *, is_over: Tensor, is_under: Tensor
) -> tuple[Tensor, Numbers]:
    log_ratio = inputs.log_ratio()
    is_dropped = torch.where(inputs.advantages > 0, is_over, is_under)
    ratio = log_ratio.exp().detach()
    loss = (
        -inputs.advantages
        * ratio.clamp(max=settings.clip_ratio_c)
        * (~is_dropped)
        * inputs.logprobs
    )
    return inputs.reduced(loss), {
        "actor/pg_clipfrac": inputs.mean(is_dropped),
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": inputs.mean((ratio > settings.clip_ratio_c) & ~is_dropped),
    }


def clip_cov(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute the clipped loss without random unclipped tokens in a covariance range."""
    # Which ones is drawn from torch's global generator, once for each micro-batch.
    log_ratio, mask = inputs.logprobs - inputs.old_logprobs, inputs.mask
    ratio = log_ratio.exp()
    plain = -inputs.advantages * ratio
    bounded = -inputs.advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    centred = inputs.advantages - masked_mean(inputs.advantages, mask)
    covariance = centred * (inputs.logprobs.detach() - masked_mean(inputs.logprobs.detach(), mask))
    may_go = (mask > 0) & ~((bounded > plain) & (mask > 0))
    positions = torch.nonzero(
        may_go & (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub)
    )
    kept = torch.ones_like(ratio)
    if len(positions):
        count = max(int(settings.clip_cov_ratio * mask.sum().item()), 1)
        drawn = positions[torch.randperm(len(positions))[: min(count, len(positions))]]
        kept[drawn[:, 0], drawn[:, 1]] = 0
    return inputs.reduced(torch.maximum(plain, bounded) * kept), {
        "actor/pg_clipfrac": inputs.mean(kept == 0),
        "actor/ppo_kl": inputs.mean(-log_ratio),
    }


def kl_cov(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute ``kl_cov``: unclipped, plus a penalty where the covariance is largest."""
    log_ratio, mask = inputs.logprobs - inputs.old_logprobs, inputs.mask
    loss = -inputs.advantages * log_ratio.exp()
    valid = torch.nonzero(mask.reshape(-1) > 0)[:, 0]
    if len(valid) and settings.kl_cov_ratio:
        advantages, logprobs = (
            x.detach().reshape(-1)[valid] for x in (inputs.advantages, inputs.logprobs)
        )
        covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
        count = max(1, int(len(covariance) * settings.kl_cov_ratio))
        chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
        chosen[valid[covariance.topk(count).indices]] = True
        loss = loss + torch.where(
            chosen.reshape(mask.shape), settings.ppo_kl_coef * log_ratio.abs(), 0.0
        )
    return inputs.reduced(loss), {"actor/ppo_kl": inputs.mean(log_ratio.abs())}


PREFIX = "rollout_corr/"


def bypass(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """Compute ``bypass_mode``: the clipped loss, or -w A log p with a truncated weight w."""
    chosen = settings.rollout_correction
    weights, mask, result = correct(inputs, chosen)
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
        raise ConfigError(
            f"rollout_correction.loss_type is {chosen.loss_type!r}, but must be ppo_clip or "
            "reinforce."
        )
    return loss, {**metrics, **result}


@torch.no_grad()
def correct(
    inputs: PolicyInputs, settings: RolloutCorrectionSettings
) -> tuple[Tensor | None, Tensor, Numbers]:
    """Return the weights or None, the mask of kept tokens, and the metrics of both.

    Raises:
        ValueError: no token is masked in, as the old release did.
    """
    mask = inputs.mask
    if not bool(mask.any()):
        raise ValueError(
            "response_mask has no token in this micro-batch, and rollout correction divides by "
            "their number."
        )
    log_ratio = inputs.logprobs.detach() - inputs.old_logprobs
    weights, numbers = None, Numbers()
    if settings.rollout_is is not None:
        weights, numbers = importance_weights(log_ratio, mask=mask, settings=settings)
    kept = mask
    if settings.rollout_rs is not None:
        kept, rejections = rejected(
            log_ratio,
            mask=mask,
            rules=settings.rollout_rs,
            thresholds=settings.rollout_rs_threshold,
        )
        numbers |= rejections
    prefixed = {PREFIX + name: value for name, value in numbers.items()}
    return (
        weights,
        kept,
        prefixed
        | mismatch(inputs.logprobs.detach(), rollout_logprobs=inputs.old_logprobs, mask=mask),
    )


def importance_weights(
    log_ratio: Tensor, *, mask: Tensor, settings: RolloutCorrectionSettings
) -> tuple[Tensor, Numbers]:
    """Return [B, W] truncated ratios of tokens or sequences, and metrics before the cut."""
    threshold = float(settings.rollout_is_threshold)
    if threshold <= 0 or settings.rollout_is not in ("token", "sequence"):
        raise ConfigError(
            f"rollout_is is {settings.rollout_is!r} (token or sequence) and its threshold "
            f"{threshold} (above 0)."
        )
    is_token = settings.rollout_is == "token"
    level = log_ratio if is_token else masked_sum(log_ratio, mask, dim=-1)[:, None]
    weights = level.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(log_ratio) * mask
    numbers = _weight_numbers(
        weights, level=level, mask=mask, threshold=threshold, is_token=is_token
    )
    weights = weights.clamp(max=threshold)
    if settings.rollout_is_batch_normalize:
        if is_token:
            mean = masked_mean(weights, mask)
        else:
            has_tokens = (mask.sum(-1) > 0).float()
            mean = (masked_mean(weights, mask, dim=-1) * has_tokens).sum() / has_tokens.sum().clamp(
                min=1e-8
            )
        factor = float(mean)
        numbers["rollout_is_batch_norm_factor"] = factor if factor > 1e-8 else 1.0
        weights = weights / mean if factor > 1e-8 else weights
    return weights, numbers


def _weight_numbers(
    weights: Tensor, *, level: Tensor, mask: Tensor, threshold: float, is_token: bool
) -> Numbers:
    """Return the metrics of importance weights before truncation, under verl's names.

    Args:
        weights: [B, W] weights, 0 where the mask is.
        level: log of the ratio: [B, W] of tokens, or [B, 1] of sequences.
        mask: [B, W] trained tokens.
        threshold: bound of the truncation; fractions also count weights below 1 / threshold.
        is_token: the weights are those of tokens.
    """
    low = 1.0 / threshold
    numbers = {"rollout_is_mean": float(masked_mean(weights, mask))}
    if is_token:
        numbers["rollout_is_ratio_fraction_high"] = float(
            masked_mean((weights > threshold).float(), mask)
        )
        numbers["rollout_is_ratio_fraction_low"] = float(masked_mean((weights < low).float(), mask))
        numbers["rollout_is_max"] = float(weights[mask.bool()].max())
        numbers["rollout_is_min"] = float(weights[mask.bool()].min())
    else:
        bounds = torch.tensor([low, threshold]).log()
        numbers["rollout_is_max"] = float(level.max().clamp(max=MAX_LOG_RATIO).exp())
        numbers["rollout_is_min"] = float(level.min().exp())
        numbers["rollout_is_ratio_fraction_high"] = float((level > bounds[1]).float().mean())
        numbers["rollout_is_ratio_fraction_low"] = float((level < bounds[0]).float().mean())
    bounded = weights.clamp(low, threshold)
    mean = masked_mean(bounded, mask)
    variance = (masked_mean(bounded.square(), mask) - mean.square()).clamp(min=0.0)
    numbers["rollout_is_std"] = float(variance.sqrt()) if int(mask.sum()) > 1 else 0.0
    numbers["rollout_is_eff_sample_size"] = 1.0 / float(
        masked_mean((bounded / (mean + 1e-8)).square(), mask)
    )
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
    """Return perplexities, KL estimates and chi-square of policy against sampler."""
    log_ratio = logprobs - rollout_logprobs
    own, other = masked_mean(logprobs, mask, dim=-1), masked_mean(rollout_logprobs, mask, dim=-1)
    gap = other - own
    safe = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    full = masked_sum(log_ratio, mask, dim=-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    numbers = {
        "training_ppl": (-own).exp().mean(),
        "training_log_ppl": (-own).mean(),
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(log_ratio.exp() - log_ratio - 1, mask),
        "rollout_ppl": (-other).exp().mean(),
        "rollout_log_ppl": (-other).mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": masked_mean(safe.exp().square(), mask) - 1.0,
        "chi2_seq": (2.0 * full).exp().mean() - 1.0,
    }
    return {PREFIX + name: float(value) for name, value in numbers.items()}


def policy_loss(name: str) -> PolicyLoss:
    """Return the loss of an old ``loss_mode``.

    Raises:
        ConfigError: there is none.
    """
    if name not in _LOSSES:
        raise ConfigError(
            f"policy_loss.loss_mode is {name!r}, but must be one of {', '.join(sorted(_LOSSES))}."
        )
    return _LOSSES[name]


_LOSSES: Mapping[str, PolicyLoss] = {
    "vanilla": clipped,
    "gspo": sequence_ratio,
    "sapo": soft_gate,
    "gpg": plain_gradient,
    "cispo": clipped_weight,
    "geo_mean": geometric_mean,
    "dppo_tv": total_variation,
    "dppo_kl": bernoulli_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "bypass_mode": bypass,
}
