"""Test that gradients of objectives do not depend on the split into ranks and micro-batches.

Without an engine: log-probs, entropies and values are linear in three parameters, so a gradient has
three numbers.
"""

from collections.abc import Mapping
from typing import get_args

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch, from_sequences
from temper_engine_api.metrics import Metric, merge_metrics
from temper_engine_api.objective import (
    LOGPROB_AT_IDS,
    Aggregation,
    AggregationMode,
    HeadOutput,
    HeadOutputs,
    Objective,
    list_objectives,
)
from temper_engine_api.plan import build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import count_denominators, reduce_loss, sum_per_sequence
from temper_trainer.algorithms.distillation_losses.distillation_loss import DistillationLoss
from temper_trainer.algorithms.distillation_losses.top_k_losses import ForwardKl
from temper_trainer.algorithms.kl import KlLossEstimator
from temper_trainer.algorithms.objectives.distillation_objective import DistillationObjective
from temper_trainer.algorithms.objectives.objective_factory import CombinedObjective
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.objectives.preference_objective import PreferenceObjective
from temper_trainer.algorithms.objectives.prompt_mean import PromptMeanObjective
from temper_trainer.algorithms.objectives.supervised_losses import (
    RewardModelObjective,
    SftObjective,
)
from temper_trainer.algorithms.objectives.value_loss import ValueObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Cispo, Gmpo, Gspo, Ppo, Sapo
from temper_trainer.algorithms.policy_losses.covariance_losses import ClipCov, KlCov
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.algorithms.preference_losses.preference_loss import PreferenceLoss
from temper_trainer.algorithms.preference_losses.reference_losses import Dpo
from temper_trainer.algorithms.sft_losses import SftLoss
from temper_trainer.settings.variants import list_variants

TOKEN_LEVEL = (
    Aggregation(mode=AggregationMode.TOKEN_MEAN),
    Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN),
    Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_SUM),
    Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM, horizon=9),
    Aggregation(mode=AggregationMode.TOKEN_SUM),
)
OBJECTIVES: tuple[Objective, ...] = (
    *(SftObjective(aggregation=a) for a in TOKEN_LEVEL),
    *(ValueObjective(clip=0.2, aggregation=a) for a in TOKEN_LEVEL),
    *(
        PolicyObjective(loss=Ppo(dual_clip=2.0), entropy_coef=0.1, kl_coef=0.1, aggregation=a)
        for a in TOKEN_LEVEL
    ),
    ValueObjective(),
    PolicyObjective(old_is_current=True),
    *(
        PolicyObjective(kl_coef=0.5, kl_estimator=estimator)
        for estimator in get_args(KlLossEstimator)
        if estimator != "k1"
    ),
    PolicyObjective(kl_coef=0.5, kl_estimator="k3_ratio", old_is_current=True),
    PolicyObjective(uses_correction_weights=True),
    # All with their defaults, so that a new one is covered.
    *(PolicyObjective(loss=cls()) for cls in list_variants(PolicyLoss).values()),
    *(PolicyObjective(loss=Gspo(), aggregation=a) for a in TOKEN_LEVEL),
    *(PolicyObjective(loss=Gmpo(clip_low=0.1, clip_high=0.1), aggregation=a) for a in TOKEN_LEVEL),
    PolicyObjective(loss=Cispo(), aggregation=TOKEN_LEVEL[1]),
    PolicyObjective(
        loss=ClipCov(fraction=0.2, min_covariance=0.0, max_covariance=9.0),
        uses_correction_weights=True,
    ),
    PolicyObjective(loss=KlCov(fraction=0.2)),
    PolicyObjective(loss=Sapo(), kl_coef=0.1),
    *(DistillationObjective(clamp=0.5, aggregation=a) for a in TOKEN_LEVEL),
    *(
        DistillationObjective(loss=cls())
        for cls in list_variants(DistillationLoss).values()
        if not cls.is_reward
    ),
    DistillationObjective(loss=ForwardKl(tail=False), clamp=0.5),
    DistillationObjective(uses_correction_weights=True),
    *(SftObjective(loss=cls()) for cls in list_variants(SftLoss).values()),
    *(SftObjective(has_weights=True, aggregation=a) for a in TOKEN_LEVEL),
    *(PreferenceObjective(loss=cls()) for cls in list_variants(PreferenceLoss).values()),
    PreferenceObjective(loss=Dpo(sft_coef=0.1)),
    RewardModelObjective(center_coef=0.1, label_smoothing=0.1, has_margin=True),
    CombinedObjective(
        parts=(PolicyObjective(), DistillationObjective()),
        coefs=(1.0, 0.3),
        aggregation=Aggregation(),
    ),
    PromptMeanObjective(objective=PolicyObjective(aggregation=TOKEN_LEVEL[-1], kl_coef=0.1)),
)
LENGTHS = (7, 2, 9, 4, 9, 5)
PAIRS = (0, 0, 1, 1, 2, 2)


def test_every_objective_of_the_trainer_is_tested() -> None:
    registered = {
        cls for cls in list_objectives().values() if cls.__module__.startswith("temper_trainer.")
    }
    assert {type(objective) for objective in OBJECTIVES} == registered


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize(("dp_size", "max_tokens"), [(1, 14), (1, 23), (2, 36), (3, 14)])
def test_gradient_and_metrics_are_independent_of_the_split(
    objective: Objective, dp_size: int, max_tokens: int
) -> None:
    unsplit, metrics = run(objective, dp_size=1, max_tokens=sum(LENGTHS))
    split, split_metrics = run(objective, dp_size=dp_size, max_tokens=max_tokens)
    assert float(unsplit.abs().max()) > 1e-3
    torch.testing.assert_close(split, unsplit, rtol=1e-5, atol=1e-7)
    assert {name: m.result for name, m in split_metrics.items()} == pytest.approx(
        {name: m.result for name, m in metrics.items()}, rel=1e-5
    )


def run(
    objective: Objective, *, dp_size: int, max_tokens: int
) -> tuple[Tensor, Mapping[str, Metric]]:
    batch, theta = mini_batch(), torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    batch = batch.with_columns(objective.prepare(batch, seed=4))
    denominators = count_denominators(batch)
    plan = plan_mini_batch(
        batch.lengths.tolist(),
        dp_size=dp_size,
        max_tokens=max_tokens,
        pack_group_ids=batch.pack_group_ids.tolist(),
    )
    gradient, metrics = torch.zeros(3), []
    for rank in range(dp_size):
        rank_batch: PackedBatch = build_packed_batch(
            batch, plan=plan, rank=rank, denominators=denominators
        )
        for micro in rank_batch.iterate_micro_batches():
            terms = objective(answers_of(theta, micro), micro)
            loss = reduce_loss(
                terms, micro, denominators=denominators, aggregation=objective.aggregation
            )
            gradient += torch.autograd.grad(loss, theta)[0]
            metrics.append(terms.metrics)
    return gradient, merge_metrics(metrics)


def answers_of(theta: Tensor, micro: SequenceBatch) -> HeadOutputs:
    columns = {
        q: micro.columns[f"base_{q.value}"] + micro.columns["features"] @ theta
        for q in (HeadOutput.LOGPROB, HeadOutput.ENTROPY, HeadOutput.VALUE)
    }
    head_outputs = {q: torch.where(micro.loss_mask, column, 0.0) for q, column in columns.items()}
    named = micro.columns["base_top"] + 0.5 * (micro.columns["features"] @ theta)[:, None]
    scores = sum_per_sequence(
        micro.columns["base_value"] + micro.columns["features"] @ theta, micro
    )
    return HeadOutputs(
        columns={
            **head_outputs,
            HeadOutput.SCORE: scores,
            HeadOutput.LOGPROB_AT: torch.where(micro.loss_mask[:, None], named, 0.0),
        }
    )


def mini_batch() -> SequenceBatch:
    draw = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    names = ("advantages", "returns", "base_value", "base_entropy")
    columns = {name: torch.randn(total, generator=draw) for name in names}
    columns["base_logprob"] = -torch.rand(total, generator=draw)
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        columns[name] = columns["base_logprob"] + 0.3 * torch.randn(total, generator=draw)
    columns["values"] = columns["base_value"] + 0.3 * torch.randn(total, generator=draw)
    columns["correction_weights"] = torch.rand(total, generator=draw)
    columns["teacher_logprobs"] = columns["base_logprob"] + 0.5 * torch.randn(total, generator=draw)
    columns["loss_weights"] = torch.rand(total, generator=draw) * 3.0
    columns["teacher_weights"] = torch.rand(total, generator=draw).round(decimals=1)
    columns["teacher_top_logprobs"] = torch.log_softmax(
        torch.randn(total, 4, generator=draw), dim=1
    )[:, :3]
    columns[LOGPROB_AT_IDS] = torch.zeros(total, 3, dtype=torch.int64)
    columns["base_top"] = (
        torch.log_softmax(torch.randn(total, 4, generator=draw), dim=1)[:, :3] - 1.0
    )
    columns["features"] = 0.3 * torch.randn(total, 3, generator=draw)
    masks = [(torch.arange(n) >= 1) & (torch.arange(n) % 4 != 3) for n in LENGTHS]
    return from_sequences(
        [torch.arange(n) for n in LENGTHS],
        loss_masks=masks,
        group_ids=PAIRS,
        pack_group_ids=PAIRS,
        columns={name: column.split(LENGTHS) for name, column in columns.items()},
        sequence_columns={
            "is_chosen": torch.tensor([True, False, False, True, True, False]),
            "margin": torch.tensor([0.5, 0.5, 1.0, 1.0, 0.0, 0.0]),
            "kl_baseline": torch.full((len(LENGTHS),), 0.3),
        },
    )
