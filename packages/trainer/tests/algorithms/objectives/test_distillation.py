"""Distillation's losses and rewards, token by token."""

import math

import pytest
import torch

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import LOGPROB_AT_IDS, Aggregation, HeadOutput, HeadOutputs
from temper_trainer.algorithms.distillation_losses.sampled_token_losses import (
    ReverseKlReward,
)
from temper_trainer.algorithms.distillation_losses.top_k_losses import (
    ForwardKl,
    JensenShannon,
    TopKReverseKl,
)
from temper_trainer.algorithms.objectives.distillation_objective import (
    DistillationObjective,
    compute_teacher_reward,
)
from temper_trainer.algorithms.objectives.objective_factory import CombinedObjective
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective

LOG = math.log


def top_k_batch(teacher: list[list[float]], *, weights: list[float]) -> SequenceBatch:
    """Build one sequence whose first token is the prompt."""
    rows = torch.tensor([[math.nan] * len(teacher[0]), *teacher])
    columns = {
        LOGPROB_AT_IDS: [torch.zeros(len(rows), rows.shape[1], dtype=torch.int64)],
        "teacher_top_logprobs": [rows],
        "teacher_weights": [torch.tensor([math.nan, *weights])],
    }
    return from_sequences(
        [torch.arange(len(rows))], loss_masks=[torch.arange(len(rows)) > 0], columns=columns
    )


def make_outputs(rows: list[list[float]]) -> HeadOutputs:
    return HeadOutputs(
        columns={
            HeadOutput.LOGPROB_AT: torch.tensor([[0.0] * len(rows[0]), *rows], requires_grad=True)
        }
    )


def test_forward_kl_sums_the_top_k_tokens_and_the_tail() -> None:
    # Teacher 0.5, 0.25 and a rest of 0.25; policy 0.25, 0.5 and a rest of 0.25.
    # 0.5 ln 2 - 0.25 ln 2 + 0 = 0.25 ln 2 = 0.173287; the second token has weight 2.
    teacher, policy = [LOG(0.5), LOG(0.25)], [LOG(0.25), LOG(0.5)]
    terms = DistillationObjective(loss=ForwardKl())(
        make_outputs([policy, policy]), top_k_batch([teacher, teacher], weights=[1.0, 2.0])
    )
    assert terms.loss[1:].tolist() == pytest.approx([0.173287, 0.346574], abs=1e-5)
    assert terms.metrics["distill/top_k_mass"].result == pytest.approx(0.75)


def test_top_k_reverse_kl_sums_the_top_k_tokens_and_the_tail() -> None:
    # Policy 0.5, 0.25 and a rest of 0.25; teacher 0.25, 0.25 and a rest of 0.5:
    # 0.5 ln 2 + 0 + 0.25 ln 0.5 = 0.25 ln 2 = 0.173287.
    # The derivative by log p is p (ln(p/q) + 1) - p (ln(r_p/r_q) + 1): for the first token
    # 0.5 (ln 2 + ln 2) = 0.693147, for the second 0.25 (0 + ln 2) = 0.173287.
    head_outputs = make_outputs([[LOG(0.5), LOG(0.25)]])
    batch = top_k_batch([[LOG(0.25), LOG(0.25)]], weights=[1.0])
    terms = DistillationObjective(loss=TopKReverseKl())(head_outputs, batch)
    assert float(terms.loss[1].detach()) == pytest.approx(0.173287, abs=1e-5)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), head_outputs[HeadOutput.LOGPROB_AT])
    assert gradient.tolist() == [[0.0, 0.0], pytest.approx([0.693147, 0.173287], abs=1e-5)]


def test_top_k_reverse_kl_over_all_tokens_is_the_exact_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, teacher = torch.randn(2, 6, generator=generator).log_softmax(-1)
    expected = float(
        torch.distributions.kl_divergence(
            torch.distributions.Categorical(logits=policy),
            torch.distributions.Categorical(logits=teacher),
        )
    )
    losses = []
    for k in (2, 6):
        top, ids = teacher.topk(k)
        batch = top_k_batch([top.tolist()], weights=[1.0])
        terms = DistillationObjective(loss=TopKReverseKl())(
            make_outputs([policy[ids].tolist()]), batch
        )
        losses.append(float(terms.loss[1].detach()))
    assert losses[1] == pytest.approx(expected, abs=1e-5)
    # Adding up the probabilities of tokens can only hide a difference.
    assert 0 < losses[0] < losses[1]


def test_without_tail_only_the_available_top_k_tokens_count() -> None:
    # 0.5 (ln 0.5 - ln 0.25) = 0.346574; the second token was not named.
    batch = top_k_batch([[LOG(0.5), -math.inf]], weights=[1.0])
    head_outputs = make_outputs([[LOG(0.25), LOG(0.5)]])
    loss = DistillationObjective(loss=ForwardKl(tail=False))(head_outputs, batch).loss
    assert float(loss[1].detach()) == pytest.approx(0.346574, abs=1e-5)
    (gradient,) = torch.autograd.grad(loss.sum(), head_outputs[HeadOutput.LOGPROB_AT])
    assert gradient.tolist() == [[0.0, 0.0], [pytest.approx(-0.5), 0.0]]


def test_jensen_shannon_is_symmetric_at_one_half_and_zero_for_equal_models() -> None:
    # Teacher 0.8 and 0.2, policy 0.4 and 0.6: M = 0.6, 0.4. KL(q, M) = 0.8 ln(4/3) + 0.2 ln(1/2) =
    # 0.230146 - 0.138629 = 0.091516; KL(p, M) = 0.4 ln(2/3) + 0.6 ln(3/2) = -0.162186 + 0.243279 =
    # 0.081093; half of the sum 0.086305.
    teacher, policy = [LOG(0.8)], [LOG(0.4)]
    objective = DistillationObjective(loss=JensenShannon())
    there = objective(make_outputs([policy]), top_k_batch([teacher], weights=[1.0])).loss[1]
    back = objective(make_outputs([teacher]), top_k_batch([policy], weights=[1.0])).loss[1]
    assert float(there.detach()) == pytest.approx(0.086305, abs=1e-5)
    assert float(back.detach()) == pytest.approx(float(there.detach()), abs=1e-6)
    assert float(
        objective(make_outputs([teacher]), top_k_batch([teacher], weights=[1.0])).loss[1].detach()
    ) == pytest.approx(0.0, abs=1e-6)


def test_jensen_shannon_is_finite_where_both_models_give_a_token_no_probability() -> None:
    # exp(-110) is 0 in float32, so the log of the mixture's probability would be -inf.
    teacher, policy = [LOG(0.5), -110.0], [LOG(0.25), -112.0]
    head_outputs = make_outputs([policy])
    loss = DistillationObjective(loss=JensenShannon())(
        head_outputs, top_k_batch([teacher], weights=[1.0])
    ).loss
    (gradient,) = torch.autograd.grad(loss.sum(), head_outputs[HeadOutput.LOGPROB_AT])
    # Teacher 0.5 and a rest of 0.5, policy 0.25 and 0.75: M = 0.375, 0.625. KL(q, M) =
    # 0.5 ln(4/3) + 0.5 ln(4/5) = 0.032269; KL(p, M) = 0.25 ln(2/3) + 0.75 ln(6/5) = 0.035375.
    assert float(loss[1].detach()) == pytest.approx(0.033822, abs=1e-5)
    assert gradient.isfinite().all()


def reverse_batch(teacher: list[float], weights: list[float]) -> SequenceBatch:
    columns = {
        "teacher_logprobs": [torch.tensor([math.nan, *teacher])],
        "teacher_weights": [torch.tensor([0.0, *weights])],
    }
    length = len(teacher) + 1
    return from_sequences(
        [torch.arange(length)], loss_masks=[torch.arange(length) > 0], columns=columns
    )


def test_reverse_kl_with_k2_moves_toward_the_teacher_and_is_clamped() -> None:
    # d = log q - log p = -1 and 2: d^2 / 2 = 0.5 and 2, the latter clamped to 1.5; the third has no
    # teacher.
    head_outputs = HeadOutputs(
        columns={HeadOutput.LOGPROB: torch.tensor([0.0, -1.0, -3.0, -1.0], requires_grad=True)}
    )
    terms = DistillationObjective(clamp=1.5)(
        head_outputs, reverse_batch([-2.0, -1.0, math.nan], [1.0, 1.0, 0.0])
    )
    assert terms.loss.tolist() == pytest.approx([0.0, 0.5, 1.5, 0.0])
    assert terms.metrics["distill/clamped_fraction"].result == pytest.approx(0.5)
    assert terms.metrics["distill/teacher_token_fraction"].result == pytest.approx(2 / 3)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), head_outputs[HeadOutput.LOGPROB])
    assert gradient.tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0]), (
        "log p is above log q by 1: push it down"
    )


def test_correction_weights_multiply_the_loss_after_the_clamp() -> None:
    # d^2 / 2 = 0.5 with weight 2 * 0.5; 2, clamped to 1.5, with weight 1 * 2; a rejected token.
    batch = reverse_batch([-2.0, -1.0, -2.0], [2.0, 1.0, 1.0]).with_columns(
        {"correction_weights": torch.tensor([math.nan, 0.5, 2.0, 0.0])}
    )
    head_outputs = HeadOutputs(
        columns={HeadOutput.LOGPROB: torch.tensor([0.0, -1.0, -3.0, -1.0], requires_grad=True)}
    )
    objective = DistillationObjective(clamp=1.5, uses_correction_weights=True)
    terms = objective(head_outputs, batch)
    assert "correction_weights" in objective.columns
    assert terms.loss.tolist() == pytest.approx([0.0, 0.5, 3.0, 0.0])
    # The divergence is reported without the weights: 0.5, 2 and 0.5.
    assert terms.metrics["distill/divergence"].result == pytest.approx(1.0)


def test_k1_as_a_reward_is_the_log_ratio() -> None:
    reward = compute_teacher_reward(
        torch.tensor([0.0, -1.0, -3.0, -1.0]),
        teacher_logprobs=torch.tensor([0.0, -2.0, -1.0, math.nan]),
        weights=torch.tensor([1.0, 1.0, 0.5, 0.0]),
        loss_mask=torch.tensor([False, True, True, True]),
        loss=ReverseKlReward(),
        clamp=1.5,
    )
    # -2 + 1 = -1; -1 + 3 = 2, clamped to 1.5, times 0.5.
    assert reward.tolist() == pytest.approx([0.0, -1.0, 0.75, 0.0])


def test_distillation_loss_is_added_to_the_policy_loss() -> None:
    # -A * 1 = -2, plus 0.5 * d^2 / 2 with d = -1: 0.25.
    batch = reverse_batch([-2.0], [1.0]).with_columns(
        {"advantages": torch.tensor([0.0, 2.0]), "old_logprobs": torch.tensor([0.0, -1.0])}
    )
    objective = CombinedObjective(
        parts=(PolicyObjective(), DistillationObjective()),
        coefs=(1.0, 0.5),
        aggregation=Aggregation(),
    )
    head_outputs = HeadOutputs(columns={HeadOutput.LOGPROB: torch.tensor([0.0, -1.0])})
    assert float(objective(head_outputs, batch).loss[1].detach()) == pytest.approx(-1.75)
    assert objective.columns >= {"advantages", "teacher_logprobs"}


def test_parts_with_different_aggregations_are_refused() -> None:
    with pytest.raises(ConfigError, match="the same aggregation everywhere"):
        CombinedObjective(parts=(PolicyObjective(),), coefs=(1.0, 2.0), aggregation=Aggregation())
