"""Estimators of KL(policy, reference) from the log-probs of sampled tokens."""

from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch

KlEstimator = Literal["k1", "k2", "k3"]


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to [-20, 20] before exp.

e^20 is 5e8; products of larger ratios lose all precision in float32. No gradient flows outside.
"""


def estimate_kl(
    logprobs: Tensor,
    *,
    ref_logprobs: Tensor,
    estimator: KlEstimator,
    clamp: float | None = None,
) -> Tensor:
    """Estimate KL(policy, reference) at each token that the policy sampled.

    With d = log ref - log policy:

        k1 = -d                 unbiased, either sign
        k2 = d^2 / 2            biased
        k3 = exp(d) - 1 - d     unbiased, never negative

    All are 0 where the two agree. Used as a loss, where the sampling probability has no gradient,
    the expected gradient of k1 is zero, of k2 that of KL(policy, reference), and of k3 that of
    KL(reference, policy).

    Args:
        logprobs: [T] float32 of the policy, with or without gradient.
        ref_logprobs: [T] float32 of the reference, without gradient.
        estimator: k1, k2 or k3.
        clamp: Bound on k3, which grows like the ratio: one token can otherwise decide an update.
            No gradient flows beyond it. None is off.

    Returns:
        [T] float32.

    Source: Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html.
    """
    # k3 contains exp(d): one token with a large d would dominate the mean or overflow.
    difference = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    kl = difference.exp() - 1 - difference
    return kl if clamp is None else kl.clamp(max=clamp)


def mean_sequence_kl(kl: Tensor, *, samples: SequenceBatch) -> float:
    """Return the mean over samples of the KL [T] summed over trained tokens, in nats.

    Summed in float64. This is the number that ``KlController`` is given.
    """
    return float(torch.where(samples.loss_mask, kl.double(), 0.0).sum()) / samples.num_sequences
