"""How far the sampler's log-probs are from the trainer's, for the same tokens and nominally the same weights."""

import torch
from torch import Tensor

from temper_engine_api.metrics import Metric, weighted_mean
from temper_trainer.algorithms.kl import estimate_kl


def mismatch_metrics(logprobs: Tensor, *, rollout_logprobs: Tensor, loss_mask: Tensor) -> dict[str, Metric]:
    """Difference of two measurements of one policy, over trained tokens; large ones mean a stale, truncated or broken sampler.

    ``mismatch/abs_mean`` and ``mismatch/abs_max`` are of |log p - log q| in nats; ``mismatch/kl`` is the k3 estimate of KL(sampler,
    trainer), whose tokens the sampler drew.

    Args:
        logprobs: [T] the trainer's, before this step's first update.
        rollout_logprobs: [T] the sampler's.
        loss_mask: [T] bool; nothing outside it leaks in, not even NaN.
    """
    ours = torch.where(loss_mask, logprobs.detach().float(), 0.0)
    theirs = torch.where(loss_mask, rollout_logprobs.float(), 0.0)
    distance = (ours - theirs).abs()
    return {
        "mismatch/abs_mean": weighted_mean(distance, loss_mask),
        "mismatch/abs_max": Metric(value=distance.max(), reduction="max"),
        "mismatch/kl": weighted_mean(estimate_kl(theirs, ref_logprobs=ours, estimator="k3"), loss_mask),
    }
