"""Estimators of the KL divergence, and the controller of its weight."""

import math

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.adaptive_coefficients import build_kl_controller
from temper_trainer.algorithms.kl import (
    KlEstimator,
    KlLossEstimator,
    compute_mean_sequence_kl,
    estimate_kl,
    estimate_kl_loss,
    get_value_estimator,
)
from temper_trainer.config.algorithm import AlgorithmConfig, KlControllerConfig

EVERY: tuple[KlEstimator, ...] = ("k1", "k2", "k3")


ADAPTIVE = AlgorithmConfig(kl_reward_coef=0.2, kl_controller=KlControllerConfig(target=6.0))


def test_three_kl_estimators_computed_by_hand() -> None:
    # d = log ref - log policy = -1.0 - (-1.5) = 0.5: k1 = -0.5; k2 = 0.125; k3 = e^0.5 - 1 - 0.5 =
    # 0.148721.
    estimates = [
        float(estimate_kl(torch.tensor([-1.5]), ref_logprobs=torch.tensor([-1.0]), estimator=name))
        for name in EVERY
    ]
    assert estimates == pytest.approx([-0.5, 0.125, 0.148721], abs=1e-6)


def test_clamped_k3_is_bounded_and_has_no_gradient_beyond_the_bound() -> None:
    # d = log ref - log policy is 19 and 0.5: k3 is 1.8e8 and 0.148721.
    logprobs = torch.tensor([-20.0, -1.5], requires_grad=True)
    kl = estimate_kl(logprobs, ref_logprobs=torch.tensor([-1.0, -1.0]), estimator="k3", clamp=10.0)
    assert kl.tolist() == pytest.approx([10.0, 0.148721], abs=1e-6)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.0, 1 - math.exp(0.5)], abs=1e-6)


def test_estimators_that_only_change_a_gradient_are_refused_without_a_loss() -> None:
    with pytest.raises(ConfigError, match=r"kl_loss_coef is 0: use k3"):
        AlgorithmConfig(kl_reward_coef=0.1, kl_estimator="k3_ratio")
    config = AlgorithmConfig(
        kl_reward_coef=0.1, kl_loss_coef=0.1, kl_estimator="k1+", kl_reference="ref"
    )
    assert get_value_estimator(config.kl_estimator) == "k1"
    assert AlgorithmConfig(kl_loss_coef=0.1, kl_estimator="k3+", kl_clamp=10.0).kl_clamp == 10.0


@pytest.mark.parametrize("estimator", EVERY)
def test_kl_of_a_policy_to_itself_is_zero(estimator: KlEstimator) -> None:
    logprobs = torch.tensor([-0.1, -3.0, -12.0])
    assert estimate_kl(logprobs, ref_logprobs=logprobs, estimator=estimator).tolist() == [
        0.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_gradient_moves_each_logprob_toward_the_reference(estimator: KlEstimator) -> None:
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    estimate_kl(
        logprobs, ref_logprobs=torch.tensor([-2.0, -2.0]), estimator=estimator
    ).sum().backward()
    assert logprobs.grad is not None
    # Descent lowers the first, which is above its reference, and raises the second.
    assert float(logprobs.grad[0]) > 0 > float(logprobs.grad[1])


def test_k1_and_k3_are_unbiased_and_k2_is_close_for_near_distributions() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    exact = float((policy * (policy / reference).log()).sum())
    estimates = {
        name: float(
            (policy * estimate_kl(policy.log(), ref_logprobs=reference.log(), estimator=name)).sum()
        )
        for name in EVERY
    }
    assert estimates["k1"] == pytest.approx(exact, abs=1e-6)
    assert estimates["k3"] == pytest.approx(exact, abs=1e-6)
    assert estimates["k2"] == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("estimator", EVERY)
def test_kl_of_a_huge_difference_is_finite(estimator: KlEstimator) -> None:
    logprobs = torch.tensor([-1000.0, 0.0], requires_grad=True)
    kl = estimate_kl(logprobs, ref_logprobs=torch.tensor([0.0, -1000.0]), estimator=estimator)
    kl.sum().backward()
    assert bool(kl.isfinite().all())
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [("k1", "none"), ("k2", "policy_reference"), ("k3", "reference_policy")],
)
def test_expected_gradient_of_each_estimator_is_that_of_its_divergence(
    estimator: KlEstimator, divergence: str
) -> None:
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], requires_grad=True)
    policy, reference = logits.softmax(0), torch.tensor([0.4, 0.3, 0.2, 0.1])
    exact = {
        "none": policy.sum(),
        "policy_reference": (policy * (policy / reference).log()).sum(),
        "reference_policy": (reference * (reference / policy).log()).sum(),
    }
    (expected,) = torch.autograd.grad(exact[divergence], logits, retain_graph=True)
    kl = estimate_kl(policy.log(), ref_logprobs=reference.log(), estimator=estimator)
    (gradient,) = torch.autograd.grad((policy.detach() * kl).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_controller_without_a_target_does_not_change() -> None:
    controller = build_kl_controller(AlgorithmConfig(kl_reward_coef=0.1))
    assert controller.adapt(kl=100.0, num_samples=64) == controller


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.6, 0.2 * (1 + 0.1 * 0.01)), (60.0, 0.2 * 1.002), (0.0, 0.2 * 0.998), (6.0, 0.2)],
)
def test_controller_follows_the_error_clipped_to_one_fifth(kl: float, expected: float) -> None:
    # 100 samples over a horizon of 10,000 is 0.01; errors of 6.6, 60, 0 and 6 over 6 are 0.1, 9
    # (held at 0.2), -1 (held) and 0.
    controller = build_kl_controller(ADAPTIVE)
    assert controller.adapt(kl=kl, num_samples=100).coef == pytest.approx(expected)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_step_with_nan_kl_does_not_change_the_controller(kl: float) -> None:
    controller = build_kl_controller(ADAPTIVE)
    assert controller.adapt(kl=kl, num_samples=100) == controller


def test_sequence_kl_sums_tokens_and_averages_samples() -> None:
    # (1 + 2) + 4 = 7 over two samples; the first entries are not trained.
    samples = from_sequences(
        [torch.arange(3), torch.arange(2)], loss_masks=[torch.arange(n) >= 1 for n in (3, 2)]
    )
    assert compute_mean_sequence_kl(
        torch.tensor([math.nan, 1.0, 2.0, math.nan, 4.0]), samples=samples
    ) == pytest.approx(3.5)


POLICY = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
OLD = torch.tensor([0.2, 0.2, 0.5, 0.1], dtype=torch.float64)
"""Policies over four tokens."""


def expect_kl_loss(
    estimator: KlLossEstimator, *, sampled_from: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Return value and gradient for the policy's logits, averaged over all tokens exactly."""
    logits = POLICY.log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    kl = estimate_kl_loss(
        logprobs,
        ref_logprobs=REFERENCE.log(),
        log_ratio=logprobs - sampled_from.log(),
        estimator=estimator,
    )
    expected = (sampled_from * kl).sum()
    return float(expected.detach()), torch.autograd.grad(expected, logits)[0]


def exact_kl() -> tuple[float, torch.Tensor]:
    logits = POLICY.log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    kl = (logprobs.exp() * (logprobs - REFERENCE.log())).sum()
    return float(kl.detach()), torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize("sampled_from", [POLICY, OLD])
def test_k3_times_ratio_has_the_exact_value_and_gradient_also_off_policy(
    sampled_from: torch.Tensor,
) -> None:
    value, gradient = expect_kl_loss("k3_ratio", sampled_from=sampled_from)
    expected, expected_gradient = exact_kl()
    assert value == pytest.approx(expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_straight_through_estimators_have_exact_value_and_gradient_on_policy(
    estimator: KlLossEstimator,
) -> None:
    value, gradient = expect_kl_loss(estimator, sampled_from=POLICY)
    expected, expected_gradient = exact_kl()
    assert value == pytest.approx(expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_plain_k2_and_k3_lack_the_value_or_the_gradient() -> None:
    expected, expected_gradient = exact_kl()
    value, gradient = expect_kl_loss("k2", sampled_from=POLICY)
    assert value != pytest.approx(expected, rel=0.05)
    torch.testing.assert_close(gradient, expected_gradient)
    value, gradient = expect_kl_loss("k3", sampled_from=POLICY)
    assert value == pytest.approx(expected)
    assert float((gradient - expected_gradient).norm()) > 0.1 * float(expected_gradient.norm())


def test_kl_losses_of_one_token_computed_by_hand() -> None:
    # d = 0.5 as above: k1 -0.5, k3 0.148721; gradient of k2 is -d = -0.5. With log rho = 0.2:
    # e^0.2 * 0.148721 = 0.181649, gradient e^0.2 * (0.148721 + 1 - e^0.5) = e^0.2 * -0.5 =
    # -0.610701.
    expected = {"k1+": (-0.5, -0.5), "k3+": (0.148721, -0.5), "k3_ratio": (0.181649, -0.610701)}
    for estimator, (value, slope) in expected.items():
        logprobs = torch.tensor([-1.5], requires_grad=True)
        kl = estimate_kl_loss(
            logprobs,
            ref_logprobs=torch.tensor([-1.0]),
            log_ratio=logprobs - torch.tensor([-1.7]),
            estimator=estimator,  # type: ignore[arg-type]
        )
        assert float(kl.detach()) == pytest.approx(value, abs=1e-6)
        assert float(torch.autograd.grad(kl.sum(), logprobs)[0]) == pytest.approx(slope, abs=1e-6)


def test_clamp_bounds_the_product_with_the_ratio() -> None:
    logprobs = torch.tensor([-20.0], requires_grad=True)
    kl = estimate_kl_loss(
        logprobs,
        ref_logprobs=torch.tensor([-1.0]),
        log_ratio=logprobs - torch.tensor([-20.0]),
        estimator="k3_ratio",
        clamp=10.0,
    )
    assert float(kl.detach()) == 10.0
    assert float(torch.autograd.grad(kl.sum(), logprobs)[0]) == 0.0
