"""Samples that add nothing to a gradient need not be run; what losses are divided by stays as it was."""

from dataclasses import replace

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.plan import MiniBatchPlan, RankPlan, plan_mini_batch
from temper_engine_api.reduction import sequence_sum
from temper_trainer.batching.step_plan import MiniBatch, RoleLayout, StepPlan


def idle_samples(samples: SequenceBatch) -> Tensor:
    """[B] bool: samples whose advantages are all zero, as in a group whose completions were all right or all wrong."""
    return sequence_sum((samples.columns["advantages"] != 0).float(), samples) == 0


def without_idle(
    plan: StepPlan, samples: SequenceBatch, *, role: str, layout: RoleLayout, max_tokens: int
) -> StepPlan:
    """The plan with idle samples left out of a role's micro-batches; its denominators still count them, so gradients are the same.

    Only for an objective whose every term has the advantage as a factor, and only where no earlier pass used the same split. A
    mini-batch of idle samples alone keeps one of them, so that its update is the same update.
    """
    idle = idle_samples(samples)
    lengths: list[int] = samples.lengths.tolist()
    atoms: list[int] = samples.atom_ids.tolist()

    def thinned(mini_batch: MiniBatch) -> MiniBatch:
        busy = torch.nonzero(~idle[torch.tensor(mini_batch.indices)])[:, 0].tolist() or [0]
        members = [mini_batch.indices[i] for i in busy]
        smaller = plan_mini_batch(
            [lengths[i] for i in members],
            dp_size=layout.dp_size,
            max_tokens=max_tokens,
            atom_ids=[atoms[i] for i in members],
            constraints=layout.constraints,
        )
        return replace(mini_batch, plans={**mini_batch.plans, role: _translate(smaller, busy)})

    return replace(
        plan, mini_batches=tuple(thinned(mini_batch) for mini_batch in plan.mini_batches)
    )


def _translate(plan: MiniBatchPlan, places: list[int]) -> MiniBatchPlan:
    """A plan over a selection as one over the whole."""
    ranks = [
        RankPlan(
            micro_batches=tuple(tuple(places[i] for i in micro) for micro in rank.micro_batches)
        )
        for rank in plan.ranks
    ]
    return MiniBatchPlan(ranks=tuple(ranks))
