"""Trainer against sampler."""

import math

import pytest
import torch

from temper_trainer.algorithms.importance_weights import compute_mismatch_metrics


def test_mismatch_is_measured_over_trained_tokens_only() -> None:
    # |log p - log q| = 0.1 and 0.3. k3 with d = log p - log q = 0.1 and -0.3:
    # (e^0.1 - 1.1) + (e^-0.3 - 1 + 0.3) = 0.005171 + 0.040818 = 0.045989, half of it 0.022995.
    trainer_logprobs = torch.tensor([math.nan, -0.9, -1.3, 5.0])
    sampler_logprobs = torch.tensor([0.0, -1.0, -1.0, math.nan])
    metrics = compute_mismatch_metrics(
        trainer_logprobs,
        rollout_logprobs=sampler_logprobs,
        loss_mask=torch.tensor([False, True, True, False]),
    )
    assert metrics["mismatch/abs_mean"].result == pytest.approx(0.2, abs=1e-6)
    assert metrics["mismatch/abs_max"].result == pytest.approx(0.3, abs=1e-6)
    assert metrics["mismatch/kl"].result == pytest.approx(0.022995, abs=1e-5)


def test_equal_logprobs_have_no_mismatch() -> None:
    logprobs = torch.tensor([0.0, -2.0])
    metrics = compute_mismatch_metrics(
        logprobs, rollout_logprobs=logprobs, loss_mask=torch.tensor([False, True])
    )
    distances = ("mismatch/abs_mean", "mismatch/abs_max", "mismatch/kl")
    assert [metrics[name].result for name in distances] == [0.0, 0.0, 0.0]
    assert metrics["mismatch/ratio_mean"].result == metrics["mismatch/ratio_max"].result == 1.0
