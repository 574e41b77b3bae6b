"""Test the policy losses other than PPO's, token by token."""

import pytest
import torch

from packages.trainer.tests.algorithms.policy_losses.surrogates_for_tests import (
    answers_of,
    batch_of,
    gradient,
    losses,
)
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import Aggregation, AggregationMode
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Cispo, Gmpo, Gspo, Sapo
from temper_trainer.algorithms.policy_losses.covariance_losses import (
    IS_SELECTED,
    ClipCov,
    KlCov,
    compute_covariances,
)

PER_SEQUENCE = Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN)


def test_gspo_clips_the_geometric_mean_of_a_completions_ratios() -> None:
    # Log-ratios 0.1 and 0.3: mean 0.2, s = e^0.2 = 1.221403 on both tokens. A = 1: min(1.221403,
    # 1.1). A = -1: -min(-1.221403, -1.1).
    objective = PolicyObjective(loss=Gspo(clip_low=0.1, clip_high=0.1), aggregation=PER_SEQUENCE)
    up, down = (
        {"advantages": [1.0, 1.0], "old_logprobs": [-1.0, -1.0]},
        {"advantages": [-1.0, -1.0], "old_logprobs": [-1.0, -1.0]},
    )
    answers, batch = answers_of([-0.9, -0.7], [-0.9, -0.7]), batch_of(up, down)
    assert losses(objective, answers, batch) == pytest.approx(
        [-1.1, -1.1, 1.221403, 1.221403], abs=1e-6
    )
    # Clipped: nothing. Else s * (-A) / 2 tokens / 2 sequences = 1.221403 / 4.
    assert gradient(objective, answers, batch) == pytest.approx(
        [0.0, 0.0, 0.305351, 0.305351], abs=1e-6
    )


def test_gspo_with_a_dual_clip_bounds_the_loss_of_negative_completions() -> None:
    # s = e^0.2 = 1.221403 as above, above the dual clip of 1.2; e^0.1 = 1.105171 is below it.
    objective = PolicyObjective(
        loss=Gspo(clip_low=0.1, clip_high=0.1, dual_clip=1.2), aggregation=PER_SEQUENCE
    )
    down = {"advantages": [-1.0, -1.0], "old_logprobs": [-1.0, -1.0]}
    answers, batch = answers_of([-0.9, -0.7], [-0.9, -0.9]), batch_of(down, down)
    assert losses(objective, answers, batch) == pytest.approx(
        [1.2, 1.2, 1.105171, 1.105171], abs=1e-6
    )
    assert gradient(objective, answers, batch) == pytest.approx(
        [0.0, 0.0, 0.276293, 0.276293], abs=1e-6
    )
    assert objective(answers, batch).metrics["policy/dual_clip_fraction"].result == 0.5


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    # rho = e^1 = 2.718 is clipped to 1.5; A = 2, log p = -0.5: loss -1.5 * 2 * -0.5 = 1.5, gradient
    # -3.
    objective, batch = (
        PolicyObjective(loss=Cispo(clip_high=0.5)),
        batch_of({"advantages": [2.0], "old_logprobs": [-1.5]}),
    )
    answers = answers_of([-0.5])
    assert losses(objective, answers, batch) == pytest.approx([1.5])
    assert gradient(objective, answers, batch) == pytest.approx([-3.0])


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    # A = 1: c = min(0.6, 0.4), -0.2, mean 0.1, e^0.1 = 1.105171. A = -1: c = max(0.6, 0.4), -0.2,
    # mean 0.2, e^0.2 = 1.221403.
    objective = PolicyObjective(loss=Gmpo(), aggregation=PER_SEQUENCE)
    up, down = (
        {"advantages": [1.0, 1.0], "old_logprobs": [-1.0, -1.0]},
        {"advantages": [-1.0, -1.0], "old_logprobs": [-1.0, -1.0]},
    )
    answers, batch = answers_of([-0.4, -1.2], [-0.4, -1.2]), batch_of(up, down)
    assert losses(objective, answers, batch) == pytest.approx(
        [-1.105171] * 2 + [1.221403] * 2, abs=1e-6
    )
    # Each token's share of a mean over 2, in a mean over 2 sequences; the clipped one has none:
    # -1.105171 / 4 and 1.221403 / 4.
    assert gradient(objective, answers, batch) == pytest.approx(
        [0.0, -0.276293, 0.305351, 0.305351], abs=1e-6
    )


def test_sapo_gradient_decays_and_equals_the_unclipped_one_at_ratio_one() -> None:
    # rho = 1: -(4 / 1) * 0.5 * 3 = -6, and for A = -3, tau = 2: (4 / 2) * 0.5 * 3 = 3. Gradients -A
    # / 2 tokens.
    objective = PolicyObjective(loss=Sapo(negative_temperature=2.0))
    answers, batch = (
        answers_of([-1.0, -1.0]),
        batch_of({"advantages": [3.0, -3.0], "old_logprobs": [-1.0, -1.0]}),
    )
    assert losses(objective, answers, batch) == pytest.approx([-6.0, 3.0])
    assert gradient(objective, answers, batch) == pytest.approx([-1.5, 1.5])
    # rho = e: sigmoid(1.718282) = 1 / (1 + 0.179374) = 0.847907, times -4.
    assert losses(
        objective, answers_of([0.0]), batch_of({"advantages": [1.0], "old_logprobs": [-1.0]})
    ) == pytest.approx([-3.391628], abs=1e-5)


def test_sapo_refuses_a_temperature_of_zero() -> None:
    with pytest.raises(ConfigError, match=r"positive_temperature of Sapo is 0\.0, but must be"):
        PolicyObjective(loss=Sapo(positive_temperature=0.0))


def test_clip_cov_removes_the_loss_of_tokens_with_high_covariance() -> None:
    # Log-probs deviate by 1, 1, -1, -1, advantages by 1, -1, 1, -1: compute_covariances 1, -1, -1,
    # 1. Half of 4 tokens: both candidates are held.
    columns = {"advantages": [1.0, -1.0, 1.0, -1.0], "old_logprobs": [-1.0, -1.0, -3.0, -3.0]}
    objective, batch = (
        PolicyObjective(loss=ClipCov(fraction=0.5, min_covariance=0.5, max_covariance=2.0)),
        batch_of(columns),
    )
    assert compute_covariances(batch)[1:].tolist() == pytest.approx([1.0, -1.0, -1.0, 1.0])
    assert losses(objective, answers_of([-1.0, -1.0, -3.0, -3.0]), batch) == pytest.approx(
        [0.0, 1.0, -1.0, 0.0]
    )


def test_kl_cov_penalizes_the_token_with_the_highest_covariance() -> None:
    # Deviations 2, 1, 0, -3 and 1, 1, -1, -1: compute_covariances 2, 1, 0, 3; a quarter of 4 is the
    # last. rho = e^0.2 = 1.221403; 0.5 * 0.2 = 0.1.
    columns = {"advantages": [1.0, 1.0, -1.0, -1.0], "old_logprobs": [-1.0, -2.0, -3.0, -6.0]}
    objective = PolicyObjective(loss=KlCov(fraction=0.25, kl_cov_coef=0.5))
    token_losses = losses(objective, answers_of([-0.8, -1.8, -2.8, -5.8]), batch_of(columns))
    assert token_losses == pytest.approx([-1.221403, -1.221403, 1.221403, 1.321403], abs=1e-6)


def test_selected_tokens_do_not_depend_on_the_order_of_samples() -> None:
    draw = torch.Generator().manual_seed(3)
    sequences = [
        {name: torch.randn(5, generator=draw).tolist() for name in ("advantages", "old_logprobs")}
        for _ in range(6)
    ]
    batch = batch_of(*sequences)
    turned = batch.select([4, 0, 5, 2, 1, 3])
    for objective in (
        PolicyObjective(loss=ClipCov(fraction=0.2, min_covariance=0.0, max_covariance=9.0)),
        PolicyObjective(loss=KlCov(fraction=0.2)),
    ):
        is_selected, is_selected_permuted = (
            objective.prepare(b, seed=9)[IS_SELECTED] for b in (batch, turned)
        )
        assert float(is_selected.sum()) == 6.0
        assert torch.equal(
            batch.with_columns({IS_SELECTED: is_selected})
            .select([4, 0, 5, 2, 1, 3])
            .columns[IS_SELECTED],
            is_selected_permuted,
        )


def test_correction_weights_multiply_only_the_surrogate() -> None:
    # rho = 1, A = 2, weight 0.5: -1; less 0.1 * entropy 0.5.
    columns = {"advantages": [2.0], "old_logprobs": [-1.0], "correction_weights": [0.5]}
    token_losses = losses(
        PolicyObjective(entropy_coef=0.1, uses_correction_weights=True),
        answers_of([-1.0]),
        batch_of(columns),
    )
    assert token_losses == pytest.approx([-1.05])
