"""Estimators of KL(policy, reference) from single log-probs, and the controllers of its weight."""

from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch

KlEstimator = Literal["k1", "k2", "k3"]


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp: e^20 is 5e8, beyond which float32 products overflow. No gradient flows outside."""


def estimate_kl(logprobs: Tensor, *, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy, reference) at each token, from tokens that the policy drew.

    With d = log ref - log policy: k1 = -d (unbiased, either sign), k2 = d^2 / 2 (biased), k3 = exp(d) - 1 - d (unbiased, never
    negative). All are 0 where the two agree. In a loss, where the tokens' own probability has no gradient, the expected gradient of k1 is
    zero, that of k2 is the gradient of KL(policy, reference), that of k3 the gradient of KL(reference, policy).

    Args:
        logprobs: [T] float32 of the policy, with or without gradient.
        ref_logprobs: [T] float32 of the reference, without gradient.
        estimator: k1, k2 or k3.

    Returns:
        [T] float32.

    Source: Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html.
    """
    difference = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    return difference.exp() - 1 - difference


def mean_sequence_kl(kl: Tensor, *, samples: SequenceBatch) -> float:
    """Mean over the samples of the KL [T] summed over trained tokens, in nats, summed in float64: what a controller is shown."""
    return float(torch.where(samples.loss_mask, kl.double(), 0.0).sum()) / samples.num_sequences
