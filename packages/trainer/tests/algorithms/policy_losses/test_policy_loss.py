"""The clipped policy objective, token by token."""

import math

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import HeadOutput, HeadOutputs, LossTerms
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo


def batch_of(**columns: list[float]) -> SequenceBatch:
    """Build one sequence whose first token is a prompt token with NaN columns."""
    length = len(next(iter(columns.values()))) + 1
    padded = {name: [torch.tensor([math.nan, *column])] for name, column in columns.items()}
    return from_sequences(
        [torch.arange(length)], loss_masks=[torch.arange(length) >= 1], columns=padded
    )


def answers_of(logprobs: list[float], **others: list[float]) -> HeadOutputs:
    columns = {HeadOutput.LOGPROB: torch.tensor([0.0, *logprobs], requires_grad=True)}
    return HeadOutputs(
        columns=columns
        | {HeadOutput(name): torch.tensor([0.0, *column]) for name, column in others.items()}
    )


def gradient(objective: PolicyObjective, head_outputs: HeadOutputs, batch: SequenceBatch) -> Tensor:
    loss = reduce_loss(
        objective(head_outputs, batch),
        batch,
        denominators=count_denominators(batch),
        aggregation=objective.aggregation,
    )
    return torch.autograd.grad(loss, head_outputs[HeadOutput.LOGPROB])[0]


def trained(terms: LossTerms) -> list[float]:
    losses: list[float] = terms.loss[1:].tolist()
    return losses


def test_clip_limits_gains_but_not_losses() -> None:
    # Ratios e^0.5 = 1.648721 and e^-0.5 = 0.606531, clip [0.8, 1.28].
    # A = 1: min(1.648721, 1.28) = 1.28; min(0.606531, 0.8) = 0.606531. A = -1: min(-1.648721,
    # -1.28); min(-0.606531, -0.8) = -0.8.
    batch = batch_of(advantages=[1.0, 1.0, -1.0, -1.0], old_logprobs=[-1.0] * 4)
    objective = PolicyObjective(loss=Ppo(clip_low=0.2, clip_high=0.28))
    terms = objective(answers_of([-0.5, -1.5, -0.5, -1.5]), batch)
    assert trained(terms) == pytest.approx([-1.28, -0.606531, 1.648721, 0.8], abs=1e-6)
    assert terms.metrics["policy/clip_fraction_high"].result == pytest.approx(0.25)
    assert terms.metrics["policy/clip_fraction_low"].result == pytest.approx(0.25)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    # Ratios e^2 = 7.389: A = -1 at most 3; A = 1 is clipped at 1.2 as before.
    batch = batch_of(advantages=[-1.0, 1.0], old_logprobs=[-3.0, -3.0])
    terms = PolicyObjective(loss=Ppo(dual_clip=3.0))(answers_of([-1.0, -1.0]), batch)
    assert trained(terms) == pytest.approx([3.0, -1.2])
    assert terms.metrics["policy/dual_clip_fraction"].result == pytest.approx(0.5)


def test_clipped_tokens_have_no_gradient_and_others_ratio_times_advantage() -> None:
    # Mean over 2 tokens: the first is clipped; the second has -ratio * A / 2 = -e^0.1 * 2 / 2.
    batch = batch_of(advantages=[1.0, 2.0], old_logprobs=[-1.0, -1.0])
    token_gradients = gradient(PolicyObjective(), answers_of([-0.5, -0.9]), batch)
    assert token_gradients.tolist() == pytest.approx([0.0, 0.0, -math.exp(0.1)], abs=1e-6)


def test_ratio_is_exactly_one_for_equal_logprobs() -> None:
    batch = batch_of(advantages=[1.0, -2.0, 0.3], old_logprobs=[-0.123, -4.567, -9.1])
    metrics = PolicyObjective()(answers_of([-0.123, -4.567, -9.1]), batch).metrics
    assert metrics["policy/ratio_mean"].result == 1.0
    assert metrics["policy/ratio_error_max"].result == 0.0
    assert metrics["policy/old_kl"].result == 0.0


def test_old_is_current_has_the_gradient_of_measured_old_logprobs_without_reading_them() -> None:
    values = [-0.5, -2.0, -3.0]
    measured = batch_of(advantages=[1.0, -2.0, 0.5], old_logprobs=values)
    skipped = batch_of(advantages=[1.0, -2.0, 0.5], rollout_logprobs=[-0.5, -2.1, -3.0])
    expected = gradient(PolicyObjective(), answers_of(values), measured)
    assert (
        gradient(PolicyObjective(old_is_current=True), answers_of(values), skipped).tolist()
        == expected.tolist()
    )
    assert expected.tolist() == pytest.approx([0.0, -1 / 3, 2 / 3, -0.5 / 3])


def test_old_is_current_reports_the_mismatch_and_no_ratio() -> None:
    batch = batch_of(advantages=[1.0, 1.0], rollout_logprobs=[-0.5, -2.2])
    metrics = PolicyObjective(old_is_current=True)(answers_of([-0.5, -2.0]), batch).metrics
    assert metrics["mismatch/abs_max"].result == pytest.approx(0.2, abs=1e-6)
    assert not [name for name in metrics if name.startswith("policy/")]


def test_entropy_without_a_weight_is_reported_and_has_no_gradient() -> None:
    batch = batch_of(advantages=[1.0, 1.0], old_logprobs=[-1.0, -1.0])
    answers = answers_of([-1.0, -1.0], entropy=[2.0, 4.0])
    entropy = answers[HeadOutput.ENTROPY].requires_grad_()
    objective = PolicyObjective()
    assert objective.required_outputs == {HeadOutput.LOGPROB, HeadOutput.ENTROPY}
    terms = objective(answers, batch)
    assert terms.metrics["policy/entropy"].result == pytest.approx(3.0)
    terms.loss.sum().backward()
    assert entropy.grad is None


def test_entropy_bonus_lowers_the_loss() -> None:
    # Ratio 1 and advantage 0: what is left is -0.1 * H.
    batch = batch_of(advantages=[0.0, 0.0], old_logprobs=[-1.0, -1.0])
    terms = PolicyObjective(entropy_coef=0.1)(answers_of([-1.0, -1.0], entropy=[2.0, 4.0]), batch)
    assert trained(terms) == pytest.approx([-0.2, -0.4])
    assert terms.metrics["policy/entropy"].result == pytest.approx(3.0)


def test_kl_to_the_reference_is_added_and_its_column_is_declared() -> None:
    # Advantage 0, d = log ref - log policy = 0.5: 2 * k2 = 2 * 0.125.
    batch = batch_of(advantages=[0.0], old_logprobs=[-1.5], ref_logprobs=[-1.0])
    objective = PolicyObjective(kl_coef=2.0, kl_estimator="k2")
    assert objective.columns == {"advantages", "old_logprobs", "ref_logprobs"}
    assert trained(objective(answers_of([-1.5]), batch)) == pytest.approx([0.25])


def test_k1_in_the_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero expected gradient"):
        PolicyObjective(kl_coef=0.1, kl_estimator="k1")


def test_nan_at_untrained_positions_reaches_neither_loss_nor_gradient_nor_metrics() -> None:
    # batch_of puts NaN into every column at the prompt's position.
    batch = batch_of(advantages=[1.0], old_logprobs=[-1.0], ref_logprobs=[-2.0])
    objective = PolicyObjective(loss=Ppo(dual_clip=3.0), kl_coef=0.1, entropy_coef=0.1)
    head_outputs = answers_of([-1.1], entropy=[1.0])
    assert bool(gradient(objective, head_outputs, batch).isfinite().all())
    assert all(
        math.isfinite(metric.result) for metric in objective(head_outputs, batch).metrics.values()
    )


def test_ratio_beyond_float32_stays_finite() -> None:
    batch = batch_of(advantages=[0.0, -1.0], old_logprobs=[-500.0, -500.0])
    head_outputs = answers_of([0.0, 0.0])
    assert bool(PolicyObjective()(head_outputs, batch).loss.isfinite().all())
    assert bool(gradient(PolicyObjective(), head_outputs, batch).isfinite().all())


def test_all_masked_batch_has_zero_loss_and_zero_gradient() -> None:
    nan = torch.full((3,), math.nan)
    batch = from_sequences(
        [torch.arange(3)],
        loss_masks=[torch.zeros(3, dtype=torch.bool)],
        columns={"advantages": [nan], "old_logprobs": [nan]},
    )
    assert gradient(PolicyObjective(), answers_of([-1.0, -1.0]), batch).tolist() == [0.0, 0.0, 0.0]
