"""Estimators for KL(policy, reference) from log-probs of sampled tokens."""

from typing import Literal, cast

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch

KlEstimator = Literal["k1", "k2", "k3"]
"""Schulman's estimators of a KL divergence."""
KlLossEstimator = Literal["k1", "k2", "k3", "k1+", "k3+", "k3_ratio"]
"""Estimators for a KL loss; see `estimate_kl` and `estimate_kl_loss`."""


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to [-20, 20] before exp.

e^20 is 5e8; with larger ratios, sums in float32 would lose all smaller terms. No gradient flows
outside the bounds.
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

    All are 0 where the two agree. A loss does not differentiate the sampling probability, so an
    estimator's expected gradient differs from the gradient of its expected value. The gradient of
    k1 is zero, k2 has that of KL(policy, reference), and k3 that of KL(reference, policy).

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


def get_value_estimator(estimator: KlLossEstimator) -> KlEstimator:
    """Return k1, k2 or k3: the estimator with the value of a loss estimator, without gradient."""
    return cast(KlEstimator, estimator[:2])


def estimate_kl_loss(
    logprobs: Tensor,
    *,
    ref_logprobs: Tensor,
    log_ratio: Tensor,
    estimator: KlLossEstimator,
    clamp: float | None = None,
) -> Tensor:
    """Estimate KL(policy, reference) at each token, with a gradient to minimize it.

    With the ratio rho = policy / old policy, stop-gradient sg, and k1, k2, k3 of `estimate_kl`:

        k2, k3    as they are
        k1+       k2 - sg(k2) + sg(k1): the value of k1 with the gradient of k2
        k3+       k2 - sg(k2) + sg(k3): the value of k3 with the gradient of k2
        k3_ratio  rho * k3, with the gradient of both factors

    For tokens from the old policy, k3_ratio has the value and the gradient of KL(policy, reference)
    in expectation. k2 has that gradient only for tokens from the current policy, and k3 never.

    Args:
        logprobs: [T] float32 of the policy with gradient.
        ref_logprobs: [T] float32 of the reference, without gradient.
        log_ratio: [T] log p - log p_old with gradient, clamped to `MAX_LOG_RATIO`.
        estimator: Not k1, whose expected gradient is zero.
        clamp: Upper bound on k3, k3+ and k3_ratio; None is off. Beyond it k3 and k3_ratio have no
            gradient, and k3+ keeps the gradient of k2.

    Returns:
        [T] float32.

    Source: k3_ratio: DeepSeek-AI 2025, arXiv:2512.02556, section 3.1, equation 7; the gradients:
    Tang and Munos 2025, arXiv:2506.09477.
    """
    if estimator == "k3_ratio":
        kl = log_ratio.exp() * estimate_kl(logprobs, ref_logprobs=ref_logprobs, estimator="k3")
        return kl if clamp is None else kl.clamp(max=clamp)
    if estimator == "k1+" or estimator == "k3+":
        value = estimate_kl(
            logprobs.detach(),
            ref_logprobs=ref_logprobs,
            estimator="k1" if estimator == "k1+" else "k3",
            clamp=clamp,
        )
        slope = estimate_kl(logprobs, ref_logprobs=ref_logprobs, estimator="k2")
        # The difference is exactly 0 and has the gradient of k2.
        return value + (slope - slope.detach())
    return estimate_kl(logprobs, ref_logprobs=ref_logprobs, estimator=estimator, clamp=clamp)


def compute_mean_sequence_kl(kl: Tensor, *, samples: SequenceBatch) -> float:
    """Return the mean over samples of the KL [T] summed over trained tokens, in nats.

    Summed in float64. This is the number that ``KlController`` is given.
    """
    return float(torch.where(samples.loss_mask, kl.double(), 0.0).sum()) / samples.num_sequences
