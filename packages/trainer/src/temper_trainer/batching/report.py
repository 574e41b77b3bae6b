"""A plan in numbers for the log, and in words for a person."""

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.plan import MiniBatchPlan
from temper_engine_api.plan import describe as describe_mini_batch
from temper_trainer.batching.step_plan import MiniBatch, StepPlan


def plan_metrics(plan: StepPlan, samples: SequenceBatch, *, role: str) -> dict[str, float]:
    """Sizes of a step for one role.

    ``batch/tokens`` and ``batch/trained_tokens`` of one pass; ``batch/updates``; ``batch/micro_batches`` of each rank over one pass;
    ``batch/dummy_share`` of micro-batches that hold only a dummy token; ``batch/imbalance``, the largest over mini-batches of the fullest
    rank's tokens over the mean rank's, minus 1.
    """
    lengths: list[int] = samples.lengths.tolist()
    plans = [mini_batch.plans[role] for mini_batch in plan.first_pass]
    slots = [micro for p in plans for rank in p.ranks for micro in rank.micro_batches]
    return {
        "batch/tokens": float(samples.num_tokens),
        "batch/trained_tokens": float(samples.loss_mask.sum()),
        "batch/updates": float(len(plan.mini_batches)),
        "batch/micro_batches": float(sum(p.num_micro_batches for p in plans)),
        "batch/dummy_share": sum(not micro for micro in slots) / len(slots),
        "batch/imbalance": max(
            _imbalance(mini_batch, plan_of, lengths)
            for mini_batch, plan_of in zip(plan.first_pass, plans, strict=True)
        ),
    }


def describe(plan: StepPlan, samples: SequenceBatch) -> str:
    """The derived sizes of a step for a person, printed at the first one: updates, denominators, and the table of each role's ranks."""
    lengths: list[int] = samples.lengths.tolist()
    first = plan.mini_batches[0]
    own = [lengths[i] for i in first.indices]
    counts = first.denominators
    passes = f"{plan.num_passes} passes of {len(plan.first_pass)} mini-batches"
    trained = f"{counts.tokens} trained tokens of {sum(own)}, {counts.sequences} sequences, {counts.groups} groups"
    lines = [
        f"{samples.num_sequences} samples of {samples.num_tokens} tokens; {len(plan.mini_batches)} updates ({passes})",
        f"first update: {trained}",
    ]
    by_plan: dict[int, list[str]] = {}
    for role, role_plan in first.plans.items():
        by_plan.setdefault(id(role_plan), []).append(role)
    for roles in by_plan.values():
        lines += [f"{', '.join(roles)}:", describe_mini_batch(first.plans[roles[0]], own)]
    return "\n".join(lines)


def _imbalance(mini_batch: MiniBatch, plan: MiniBatchPlan, lengths: list[int]) -> float:
    tokens = [
        sum(lengths[mini_batch.indices[i]] for micro in rank.micro_batches for i in micro)
        for rank in plan.ranks
    ]
    return max(tokens) * len(tokens) / sum(tokens) - 1.0
