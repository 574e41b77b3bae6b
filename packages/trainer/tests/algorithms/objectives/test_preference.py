"""Losses of pairs, worked by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import Aggregation, HeadOutput, HeadOutputs, Objective
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.objectives.preference_objective import PreferenceObjective
from temper_trainer.algorithms.objectives.supervised_losses import RewardModelObjective
from temper_trainer.algorithms.preference_losses.preference_loss import PreferenceLoss
from temper_trainer.algorithms.preference_losses.reference_free_losses import Orpo, SimPo
from temper_trainer.algorithms.preference_losses.reference_losses import Dpo, Hinge, Ipo
from temper_trainer.algorithms.preference_losses.unpaired_losses import Kto
from temper_trainer.types import KL_BASELINE, MARGIN

LOGPROBS = torch.tensor([0.0, -1.0, -1.0, 0.0, -2.0])
"""Chosen: two tokens, sum -2, mean -1; rejected: one token, -2."""


def pair() -> SequenceBatch:
    return from_sequences(
        [torch.arange(3), torch.arange(2)],
        loss_masks=[torch.arange(3) > 0, torch.arange(2) > 0],
        group_ids=[0, 0],
        pack_group_ids=[0, 0],
        columns={
            "ref_logprobs": [torch.tensor([math.nan, -1.5, -1.5]), torch.tensor([math.nan, -1.0])]
        },
        sequence_columns={"is_chosen": torch.tensor([True, False])},
    )


def loss_of(objective: Objective, head_outputs: HeadOutputs) -> Tensor:
    batch = pair()
    return reduce_loss(
        objective(head_outputs, batch),
        batch,
        denominators=count_denominators(batch),
        aggregation=objective.aggregation,
    )


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # h = (-2 + 3) - (-2 + 1) = 2; beta h = 1: -ln sigmoid(1) = ln(1 + e^-1) = 0.313262.
        (Dpo(beta=0.5), 0.313262),
        # 0.9 * 0.313262 + 0.1 * (1 + 0.313262) = 0.413262.
        (Dpo(beta=0.5, label_smoothing=0.1), 0.413262),
        # Means: (-1 + 1.5) - (-2 + 1) = 1.5; (1.5 - 1 / (2 * 0.5))^2 = 0.25.
        (Ipo(beta=0.5), 0.25),
        # 1 - 0.2 * 2 = 0.6.
        (Hinge(beta=0.2), 0.6),
        # Without a reference: h = -2 + 2 = 0: ln 2 = 0.693147; plus 0.1 * 1, the chosen one's mean.
        (Dpo(beta=0.5, reference="none", sft_coef=0.1), 0.793147),
        # Means: -1 and -2; 2 * 1 - 1 = 1: 0.313262; plus 0.5 * 1, the chosen one's mean.
        (SimPo(beta=2.0, gamma=1.0), 0.313262),
        (SimPo(beta=2.0, gamma=1.0, sft_coef=0.5), 0.813262),
        # Log-odds: -1 - ln(1 - e^-1) = -0.541325 and -2 - ln(1 - e^-2) = -1.854587, difference
        # 1.313262: ln(1 + e^-1.313262) = 0.238183; 1 + 0.1 * 0.238183 = 1.023818.
        (Orpo(beta=0.1), 1.023818),
    ],
)
def test_preference_losses_of_a_pair_computed_by_hand(
    loss: PreferenceLoss, expected: float
) -> None:
    head_outputs = HeadOutputs(columns={HeadOutput.LOGPROB: LOGPROBS})
    reduced = loss_of(PreferenceObjective(loss=loss), head_outputs)
    assert float(reduced) == pytest.approx(expected, abs=1e-6)


def test_odds_of_a_certain_completion_have_a_finite_loss_and_gradient() -> None:
    logprobs = torch.zeros(5, requires_grad=True)
    head_outputs = HeadOutputs(columns={HeadOutput.LOGPROB: logprobs})
    loss = loss_of(PreferenceObjective(loss=Orpo()), head_outputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    # Equal odds: 0.1 * ln 2 = 0.0693147; the chosen one's mean of two tokens has the gradient -1/2.
    assert float(loss.detach()) == pytest.approx(0.0693147, abs=1e-6)
    assert gradient.tolist() == [0.0, -0.5, -0.5, 0.0, 0.0]


def test_kto_of_labeled_completions_computed_by_hand() -> None:
    batch = replace(pair(), group_ids=torch.tensor([0, 1]), pack_group_ids=torch.tensor([0, 1]))
    batch = batch.with_columns({}, {KL_BASELINE: torch.full((2,), 0.4)})
    objective = PreferenceObjective(loss=Kto(beta=0.5, undesirable_weight=2.0))
    terms = objective(HeadOutputs(columns={HeadOutput.LOGPROB: LOGPROBS}), batch)
    # h = -2 + 3 = 1 desirable, -2 + 1 = -1 undesirable; 1 - sigmoid(0.5 * (1 - 0.4)) = 0.425557,
    # 2 * (1 - sigmoid(0.5 * (0.4 + 1))) = 2 * 0.331812.
    assert terms.loss.tolist() == pytest.approx([0.425557, 0.663624], abs=1e-6)
    loss = reduce_loss(
        terms,
        batch,
        denominators=count_denominators(batch),
        aggregation=objective.aggregation,
    )
    assert float(loss) == pytest.approx(0.544591, abs=1e-6), "the mean over both completions"
    assert terms.metrics["preference/accuracy"].result == 1.0
    # 0.5 * (0.6 + 1.4) / 2
    assert terms.metrics["preference/margin"].result == pytest.approx(0.5)


def test_reward_models_loss_of_a_pair() -> None:
    # s = 1.5 and 0.5: ln(1 + e^-1) = 0.313262, plus 0.1 * (1.5 + 0.5)^2 = 0.4.
    head_outputs = HeadOutputs(columns={HeadOutput.SCORE: torch.tensor([1.5, 0.5])})
    assert float(loss_of(RewardModelObjective(center_coef=0.1), head_outputs)) == pytest.approx(
        0.713262, abs=1e-6
    )
    assert RewardModelObjective()(head_outputs, pair()).metrics["preference/accuracy"].result == 1.0


def test_margin_of_a_pair_is_subtracted_from_the_difference_of_its_scores() -> None:
    head_outputs = HeadOutputs(columns={HeadOutput.SCORE: torch.tensor([1.5, 0.5])})
    batch = pair().with_columns({}, {MARGIN: torch.full((2,), 3.0)})
    terms = RewardModelObjective(has_margin=True)(head_outputs, batch)
    # 1 - 3 = -2: ln(1 + e^2) = 2.126928, half of it on each sequence.
    assert terms.loss.tolist() == pytest.approx([1.063464, 1.063464], abs=1e-6)
    smoothed = RewardModelObjective(has_margin=True, label_smoothing=0.25)(head_outputs, batch)
    # 0.75 * 2.126928 + 0.25 * ln(1 + e^4) = 0.75 * 2.126928 + 0.25 * 4.018150 = 2.599734.
    assert float(smoothed.loss.sum()) == pytest.approx(2.599734, abs=1e-6)
    assert terms.metrics["preference/margin"].result == 1.0, "the difference of the scores alone"


def test_preference_loss_is_the_mean_over_pairs() -> None:
    with pytest.raises(ConfigError, match="mean over pairs"):
        PreferenceObjective(aggregation=Aggregation())


def test_accuracy_counts_equal_rewards_or_scores_half() -> None:
    # Before the first update the policy is its own reference, so the rewards of a pair are equal.
    batch = pair().with_columns({"ref_logprobs": LOGPROBS})
    policy = PreferenceObjective()(HeadOutputs(columns={HeadOutput.LOGPROB: LOGPROBS}), batch)
    scores = HeadOutputs(columns={HeadOutput.SCORE: torch.tensor([1.5, 1.5])})
    for terms in (policy, RewardModelObjective()(scores, pair())):
        assert terms.metrics["preference/accuracy"].result == 0.5
