"""A mini-batch of a role as what its workers get: one packed batch per data-parallel rank."""

from dataclasses import replace

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.errors import BatchError
from temper_engine_api.objective import LOGPROB_AT_IDS, Objective, Query
from temper_engine_api.plan import pack_rank
from temper_trainer.batching.step_plan import MiniBatch


def pack(
    samples: SequenceBatch, mini_batch: MiniBatch, role: str, *, objective: Objective | None = None
) -> list[PackedBatch]:
    """Each data-parallel rank's share, by rank.

    With an objective, its ``prepare`` runs here, once for the whole mini-batch, and workers get the columns it reads; without one
    (a forward pass) they get none.

    Args:
        samples: the step's, with every column the objective reads.
        mini_batch: of the plan.
        role: whose layout.
        objective: what the role trains with.

    Raises:
        BatchError: a column that the objective reads is missing.
    """
    chosen = samples.select(mini_batch.indices)
    extra = {} if objective is None else dict(objective.prepare(chosen, seed=mini_batch.seed))
    read = frozenset[str]() if objective is None else objective.columns
    if objective is not None and Query.LOGPROB_AT in objective.needs:
        read |= {LOGPROB_AT_IDS}
    missing = read - chosen.columns.keys() - chosen.sequence_columns.keys() - extra.keys()
    if missing:
        assert objective is not None
        raise BatchError(
            f"objective {objective.name!r} reads columns that the samples lack: {', '.join(sorted(missing))}."
        )
    lean = replace(
        chosen,
        columns={name: column for name, column in chosen.columns.items() if name in read} | extra,
        sequence_columns={
            name: column for name, column in chosen.sequence_columns.items() if name in read
        },
    )
    plan = mini_batch.plans[role]
    return [
        pack_rank(lean, plan=plan, rank=rank, denominators=mini_batch.denominators)
        for rank in range(len(plan.ranks))
    ]
