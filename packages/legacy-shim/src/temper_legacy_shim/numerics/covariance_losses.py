"""The two old losses that pick tokens by the covariance of log-prob and advantage, within the micro-batch at hand.

Source: Cui et al. 2025, arXiv:2505.22617.
"""

import torch
from torch import Tensor

from temper_legacy_shim.numerics.masked import masked_mean
from temper_legacy_shim.numerics.policy_losses import Numbers, PolicyInputs
from temper_legacy_shim.numerics.settings import PolicyLossSettings


def clip_cov(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """The clipped loss, where a random share of the unclipped tokens between two bounds of covariance has no loss.

    Which ones is drawn from torch's global generator, once for each micro-batch.
    """
    log_ratio, mask = inputs.logprobs - inputs.old_logprobs, inputs.mask
    ratio = log_ratio.exp()
    plain = -inputs.advantages * ratio
    held = -inputs.advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    centred = inputs.advantages - masked_mean(inputs.advantages, mask)
    covariance = centred * (inputs.logprobs.detach() - masked_mean(inputs.logprobs.detach(), mask))
    may_go = (mask > 0) & ~((held > plain) & (mask > 0))
    places = torch.nonzero(may_go & (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub))
    kept = torch.ones_like(ratio)
    if len(places):
        count = max(int(settings.clip_cov_ratio * mask.sum().item()), 1)
        drawn = places[torch.randperm(len(places))[: min(count, len(places))]]
        kept[drawn[:, 0], drawn[:, 1]] = 0
    return inputs.reduced(torch.maximum(plain, held) * kept), {
        "actor/pg_clipfrac": inputs.mean(kept == 0),
        "actor/ppo_kl": inputs.mean(-log_ratio),
    }


def kl_cov(inputs: PolicyInputs, settings: PolicyLossSettings) -> tuple[Tensor, Numbers]:
    """The unclipped loss; the share of tokens with the largest covariance pays for |log rho| too, which is what ``ppo_kl`` reports."""
    log_ratio, mask = inputs.logprobs - inputs.old_logprobs, inputs.mask
    loss = -inputs.advantages * log_ratio.exp()
    valid = torch.nonzero(mask.reshape(-1) > 0)[:, 0]
    if len(valid) and settings.kl_cov_ratio:
        advantages, logprobs = (x.detach().reshape(-1)[valid] for x in (inputs.advantages, inputs.logprobs))
        covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
        count = max(1, int(len(covariance) * settings.kl_cov_ratio))
        chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
        chosen[valid[covariance.topk(count).indices]] = True
        loss = loss + torch.where(chosen.reshape(mask.shape), settings.ppo_kl_coef * log_ratio.abs(), 0.0)
    return inputs.reduced(loss), {"actor/ppo_kl": inputs.mean(log_ratio.abs())}
