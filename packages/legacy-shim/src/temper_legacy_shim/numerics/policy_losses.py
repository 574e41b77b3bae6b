"""The old policy losses by their old names, with the metrics that each reports.

Formulas in the notation rho = exp(log p - log p_old), advantage A; every mean is over the micro-batch at hand.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.errors import ConfigError
from temper_legacy_shim.numerics.masked import EPSILON, aggregate, masked_mean
from temper_legacy_shim.numerics.settings import PolicyLossSettings

MAX_LOG_RATIO = 20.0

Numbers = dict[str, float]
"""Metrics of one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """What a policy loss reads, each [B, W]."""

    logprobs: Tensor
    """Of the current policy, with gradient."""
    old_logprobs: Tensor
    """Of the policy before the step."""
    advantages: Tensor
    """One a token."""
    mask: Tensor
    """0 and 1."""
    weights: Tensor | None = None
    """Importance weights that multiply the loss of each token."""
    agg_mode: str = "token-mean"
    """See ``masked.aggregate``."""

    def reduced(self, loss: Tensor, *, mode: str | None = None) -> Tensor:
        """The weighted loss per token as one number."""
        weighted = loss if self.weights is None else loss * self.weights
        return aggregate(weighted, self.mask, mode or self.agg_mode)

    def mean(self, values: Tensor) -> float:
        """Mean under the mask, for a metric."""
        return float(masked_mean(values.detach().float(), self.mask))

    def log_ratio(self) -> Tensor:
        """Log rho, held to [-20, 20]."""
        return torch.clamp(self.logprobs - self.old_logprobs, min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO)


PolicyLoss = Callable[[PolicyInputs, PolicyLossSettings], tuple[Tensor, Numbers]]


def clipped(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """``vanilla``: -min(rho A, clip(rho) A), and where A < 0 at most -c A (dual clip)."""
    log_ratio, advantages = inputs.log_ratio(), inputs.advantages
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    held = -advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    worse = torch.maximum(plain, held)
    bound = -advantages * settings.clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(bound, worse), worse)
    return inputs.reduced(loss), {
        "actor/pg_clipfrac": inputs.mean(held > plain),
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": inputs.mean((worse > bound) & (advantages < 0)),
    }


def sequence_ratio(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """``gspo``: the clipped loss with the sequence's mean log-ratio as value of every token's, always the mean of row means."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    length = inputs.mask.sum(-1).clamp(min=1)
    mean = (log_ratio * inputs.mask).sum(-1) / length
    # The value is the sequence's, the gradient each token's own.
    shared = inputs.logprobs - inputs.logprobs.detach() + mean.detach()[:, None]
    ratio = torch.clamp(shared, max=10.0).exp()
    plain = -inputs.advantages * ratio
    held = -inputs.advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return inputs.reduced(torch.maximum(plain, held), mode="seq-mean-token-mean"), {
        "actor/pg_clipfrac": inputs.mean(held > plain),
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": 0.0,
    }


def soft_gate(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """``sapo``: -A 4/tau sigmoid(tau (rho - 1)) with one tau for each sign of A, always the mean of row means."""
    log_ratio = inputs.log_ratio()
    tau = torch.where(inputs.advantages > 0, settings.tau_pos, settings.tau_neg)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    return inputs.reduced(-gate * inputs.advantages, mode="seq-mean-token-mean"), {
        "actor/pg_clipfrac": 0.0,
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": 0.0,
    }


def plain_gradient(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """``gpg``: -A log p, without metrics."""
    return inputs.reduced(-inputs.logprobs * inputs.advantages), {}


def clipped_weight(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """``cispo``: -clip(rho) A log p, the clipped ratio without gradient."""
    log_ratio = inputs.log_ratio()
    ratio = log_ratio.exp()
    held = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return inputs.reduced(-held.detach() * inputs.advantages * inputs.logprobs), {
        "actor/pg_clipfrac": inputs.mean(held != ratio),
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": 0.0,
    }


def geometric_mean(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """``geo_mean``: each row's geometric mean of clipped ratios times its mean advantage; the mean of all rows, masked ones too."""
    log_ratio, mask = inputs.log_ratio(), inputs.mask
    sign = inputs.advantages.sign()
    held = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    worse = sign * torch.minimum(sign * log_ratio, sign * held)
    count = mask.sum(-1) + EPSILON
    ratio = ((worse * mask).sum(-1) / count).exp()
    advantage = (inputs.advantages * mask).sum(-1) / count
    loss = -advantage * ratio
    if inputs.weights is not None:
        loss = loss * (((inputs.weights + 1e-10).log() * mask).sum(-1) / count).exp()
    is_held = held != log_ratio
    return loss.mean(), {
        "actor/pg_clipfrac": inputs.mean(is_held & (inputs.advantages > 0)),
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": inputs.mean(is_held & (inputs.advantages < 0)),
    }


def total_variation(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """``dppo_tv``: tokens whose probability moved further than the clip ratio in the direction of A are dropped."""
    moved = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()
    return _within_divergence(inputs, settings, is_over=moved > settings.clip_high, is_under=moved < -settings.clip_low)


def bernoulli_kl(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """``dppo_kl``: the same with the KL of "this token or another one" as distance."""
    new, old = inputs.logprobs.detach().exp(), inputs.old_logprobs.exp()
    distance = _binary_kl(old, new, log_old=inputs.old_logprobs, log_new=inputs.logprobs.detach())
    is_over = (distance > settings.clip_high) & (new > old)
    is_under = (distance > settings.clip_low) & (new < old)
    return _within_divergence(inputs, settings, is_over=is_over, is_under=is_under)


def _binary_kl(old: Tensor, new: Tensor, *, log_old: Tensor, log_new: Tensor) -> Tensor:
    rest = (1 - old) * ((1 - old + EPSILON).log() - (1 - new + EPSILON).log())
    return old * (log_old - log_new) + rest


def _within_divergence(inputs: PolicyInputs, settings: PolicyLossSettings, *, is_over: Tensor, is_under: Tensor) -> tuple[Tensor, Numbers]:
    log_ratio = inputs.log_ratio()
    is_dropped = torch.where(inputs.advantages > 0, is_over, is_under)
    ratio = log_ratio.exp().detach()
    loss = -inputs.advantages * ratio.clamp(max=settings.clip_ratio_c) * (~is_dropped) * inputs.logprobs
    return inputs.reduced(loss), {
        "actor/pg_clipfrac": inputs.mean(is_dropped),
        "actor/ppo_kl": inputs.mean(-log_ratio),
        "actor/pg_clipfrac_lower": inputs.mean((ratio > settings.clip_ratio_c) & ~is_dropped),
    }


def policy_loss(name: str) -> PolicyLoss:
    """The loss of an old ``loss_mode``.

    Raises:
        ConfigError: there is none.
    """
    losses = {**_LOSSES, **_others()}
    if name not in losses:
        raise ConfigError(f"policy_loss.loss_mode is {name!r}, but must be one of {', '.join(sorted(losses))}.")
    return losses[name]


def _others() -> Mapping[str, PolicyLoss]:
    from temper_legacy_shim.numerics.covariance_losses import clip_cov, kl_cov
    from temper_legacy_shim.numerics.rollout_correction import bypass

    return {"clip_cov": clip_cov, "kl_cov": kl_cov, "bypass_mode": bypass}


_LOSSES: Mapping[str, PolicyLoss] = {
    "vanilla": clipped,
    "gspo": sequence_ratio,
    "sapo": soft_gate,
    "gpg": plain_gradient,
    "cispo": clipped_weight,
    "geo_mean": geometric_mean,
    "dppo_tv": total_variation,
    "dppo_kl": bernoulli_kl,
}
