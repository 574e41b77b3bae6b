"""How far the sampler's log-probs are from the trainer's, for the same tokens and nominally the same weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from temper_engine_api.metrics import Metric, weighted_mean
from temper_trainer.algorithms.kl import MAX_LOG_RATIO, estimate_kl

SQUARES = "mismatch/ratio_square_mean"
"""A piece of the effective sample share, not a number for the log."""


def mismatch_metrics(
    logprobs: Tensor, *, rollout_logprobs: Tensor, loss_mask: Tensor
) -> dict[str, Metric]:
    """Difference of two measurements of one policy, over trained tokens; large ones mean a stale, truncated or broken sampler.

    ``mismatch/abs_mean`` and ``mismatch/abs_max`` are of |log p - log q| in nats; ``mismatch/kl`` is the k3 estimate of KL(sampler,
    trainer), whose tokens the sampler drew. ``mismatch/ratio_mean`` and ``mismatch/ratio_square_mean`` are of w = p / q, from which
    ``effective_sample_share`` follows.

    Args:
        logprobs: [T] the trainer's, before this step's first update.
        rollout_logprobs: [T] the sampler's.
        loss_mask: [T] bool; nothing outside it leaks in, not even NaN.
    """
    ours = torch.where(loss_mask, logprobs.detach().float(), 0.0)
    theirs = torch.where(loss_mask, rollout_logprobs.float(), 0.0)
    distance = (ours - theirs).abs()
    ratio = (ours - theirs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "mismatch/abs_mean": weighted_mean(distance, loss_mask),
        "mismatch/abs_max": Metric(value=distance.max(), reduction="max"),
        "mismatch/kl": weighted_mean(
            estimate_kl(theirs, ref_logprobs=ours, estimator="k3"), loss_mask
        ),
        "mismatch/ratio_mean": weighted_mean(ratio, loss_mask),
        "mismatch/ratio_max": Metric(
            value=torch.where(loss_mask, ratio, 0.0).max(), reduction="max"
        ),
        SQUARES: weighted_mean(ratio.square(), loss_mask),
    }


def effective_sample_share(metrics: Mapping[str, Metric]) -> float:
    """Share of the tokens that the importance weights leave in effect: (sum w)^2 / (N * sum w^2), 1 where all weights are equal.

    Args:
        metrics: merged over all micro-batches and ranks; two means of ``mismatch_metrics`` are read.
    """
    return metrics["mismatch/ratio_mean"].result ** 2 / metrics[SQUARES].result
