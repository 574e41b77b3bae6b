"""Estimators of KL(policy, reference) from single log-probs, and the controllers of its weight."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_trainer.config.algorithm import AlgorithmConfig

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KlController:
    """Weight of a KL penalty; goes into checkpoints as it is."""

    coef: float
    """Current weight."""
    target: float | None
    """KL per completion, in nats, that the weight is steered to; None keeps the weight fixed."""
    horizon: int
    """Completions over which a lasting error of 20 % or more multiplies the weight by about e^0.2."""

    def updated(self, *, kl: float, num_samples: int) -> "KlController":
        """The controller after a step.

        coef' = coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

        Args:
            kl: mean over the step's completions of the KL summed over trained tokens, in nats.
            num_samples: completions of the step.

        Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
        """
        if self.target is None or not math.isfinite(
            kl
        ):  # such a step's update is skipped; its weight would be no number ever after
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_samples / self.horizon))


def kl_controller(config: AlgorithmConfig) -> KlController:
    """The controller a run begins with: fixed unless algorithm.kl_target is set."""
    return KlController(
        coef=config.kl_reward_coef, target=config.kl_target, horizon=config.kl_horizon
    )


def sequence_kl(kl: Tensor, *, samples: SequenceBatch) -> float:
    """Mean over the samples of the KL [T] summed over trained tokens, in nats, summed in float64: what a controller is shown."""
    return float(torch.where(samples.loss_mask, kl.double(), 0.0).sum()) / samples.num_sequences
