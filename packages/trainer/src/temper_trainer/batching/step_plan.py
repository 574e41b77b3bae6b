"""Assign the samples of a step to mini-batches, and for each role to ranks and micro-batches.

All roles use the same mini-batches; ranks and micro-batches are planned per role. Cutting one
mini-batch is the arithmetic of ``temper_engine_api.plan``. This module adds what a step needs:
several passes, several roles, and leaving out zero-advantage samples.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from temper_engine_api.batch import Denominators, PackedBatch, SequenceBatch
from temper_engine_api.errors import BatchError
from temper_engine_api.objective import LOGPROB_AT_IDS, ROUTED_EXPERTS, HeadOutput, Objective
from temper_engine_api.plan import (
    MiniBatchPlan,
    RankPlan,
    build_packed_batch,
    plan_mini_batch,
    split_mini_batches,
)
from temper_engine_api.plan import format_plan as describe_mini_batch
from temper_engine_api.reduction import (
    count_denominators,
    find_trained_sequences,
    sum_per_sequence,
)
from temper_engine_api.topology import PlanConstraints, Topology
from temper_trainer.config.algorithm import BatchingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLayout:
    """The properties of a role's topology that its plan depends on.

    Example:
        >>> from temper_engine_api.topology import Axis
        >>> RoleLayout.from_topology(Topology(world_size=2, dp=Axis(size=2))).dp_size
        2
    """

    dp_size: int = 1
    """Number of data-parallel ranks."""
    constraints: PlanConstraints = field(default_factory=PlanConstraints)
    """Restrictions of the engine on micro-batches."""

    @classmethod
    def from_topology(cls, topology: Topology) -> "RoleLayout":
        """Return a topology's layout."""
        return cls(dp_size=topology.dp.size, constraints=topology.plan_constraints)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The samples for one optimizer update, and each role's plan for them.

    Example:
        Samples 2 and 3 of a step, in one micro-batch of the actor's only rank:

        >>> from temper_engine_api.plan import plan_mini_batch
        >>> mini_batch = MiniBatch(
        ...     indices=(2, 3),
        ...     denominators=Denominators(tokens=9, sequences=2, groups=1),
        ...     plans={"actor": plan_mini_batch([5, 6], dp_size=1, max_tokens=16)},
        ...     seed=7,
        ... )
        >>> mini_batch.plans["actor"].ranks[0].micro_batches
        ((0, 1),)
    """

    indices: tuple[int, ...]
    """Ascending indices into the step's samples."""
    denominators: Denominators
    """Counts over all samples in the mini-batch; losses are divided by them."""
    plans: Mapping[str, MiniBatchPlan]
    """Plan by role. Its indices point into ``indices``, not into the step's samples."""
    seed: int
    """Seed in [0, 2**63) that is passed to ``Objective.prepare``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All optimizer updates of a step, in order.

    Example:
        Four samples in two groups, two mini-batches, one rank with at most 8 tokens per
        micro-batch. Groups are assigned at random to mini-batches, but never split:

        >>> import torch
        >>> from temper_engine_api.batch import from_sequences
        >>> samples = from_sequences(
        ...     [torch.arange(n) for n in (3, 4, 5, 6)],
        ...     loss_masks=[torch.arange(n) >= 1 for n in (3, 4, 5, 6)],
        ...     group_ids=[0, 0, 1, 1],
        ... )
        >>> config = BatchingConfig(num_mini_batches=2, max_tokens=8)
        >>> plan = plan_step(samples, config, layouts={"actor": RoleLayout()}, seed=0)
        >>> [mini_batch.indices for mini_batch in plan.mini_batches]
        [(2, 3), (0, 1)]
        >>> plan.mini_batches[1].denominators
        Denominators(tokens=5, sequences=2, groups=1)
        >>> [rank.micro_batches for rank in plan.mini_batches[1].plans["actor"].ranks]
        [((0, 1),)]
    """

    mini_batches: tuple[MiniBatch, ...]
    """``num_passes * num_mini_batches`` mini-batches; fewer if there are fewer groups."""
    num_passes: int
    """Number of passes over the samples; each pass contains every sample once."""

    @property
    def first_pass(self) -> tuple[MiniBatch, ...]:
        """The mini-batches of the first pass, which together contain every sample once.

        The forward passes for old and reference log-probs and for values use them. Equal
        micro-batches give bitwise equal results, so the ratio of the first update is exactly 1.
        """
        return self.mini_batches[: len(self.mini_batches) // self.num_passes]


def plan_step(
    samples: SequenceBatch,
    config: BatchingConfig,
    *,
    layouts: Mapping[str, RoleLayout],
    seed: int,
) -> StepPlan:
    """Plan all updates in a step.

    Args:
        samples: Samples of the step. Their loss mask must be final, because it determines the
            denominators.
        config: Number of passes and mini-batches, and the token limit per micro-batch.
        layouts: Layout by role. Roles with equal layouts get the same plan object.
        seed: Seed of the step; each pass distributes the groups differently.

    Raises:
        PlanError: If a sample exceeds the token limit; names the configuration keys.
    """
    # Python's generator, whose stream does not depend on the version of torch.
    rng = random.Random(seed)
    mini_batches = [
        _plan_mini_batch(
            samples,
            indices,
            max_tokens=config.max_tokens,
            layouts=layouts,
            seed=rng.getrandbits(63),
        )
        for _ in range(config.num_passes)
        for indices in _split_samples(samples, config, seed=rng.getrandbits(63))
    ]
    return StepPlan(mini_batches=tuple(mini_batches), num_passes=config.num_passes)


def _split_samples(samples: SequenceBatch, config: BatchingConfig, *, seed: int) -> list[list[int]]:
    """Return the sample indices per mini-batch in one pass."""
    groups, pack_groups = samples.group_ids.tolist(), samples.pack_group_ids.tolist()
    if config.num_mini_batches == 1:
        return [list(range(samples.num_sequences))]
    # If the rewards of some groups failed, there may be fewer groups than mini-batches. The step
    # then makes fewer updates instead of ending the run; `batch/updates` reports it.
    count = min(config.num_mini_batches, len(set(groups)))
    return split_mini_batches(groups, num_mini_batches=count, seed=seed, pack_group_ids=pack_groups)


def _plan_mini_batch(
    samples: SequenceBatch,
    indices: list[int],
    *,
    max_tokens: int,
    layouts: Mapping[str, RoleLayout],
    seed: int,
) -> MiniBatch:
    selected = samples.select(indices)
    lengths, pack_groups = selected.lengths.tolist(), selected.pack_group_ids.tolist()
    plan_by_layout = {
        layout: plan_mini_batch(
            lengths,
            dp_size=layout.dp_size,
            max_tokens=max_tokens,
            pack_group_ids=pack_groups,
            constraints=layout.constraints,
        )
        # Once per layout and not per role, because the plan depends only on the layout.
        for layout in set(layouts.values())
    }
    return MiniBatch(
        indices=tuple(indices),
        # Over all samples: `drop_zero_advantage_samples` must not change the loss.
        denominators=count_denominators(selected),
        plans={role: plan_by_layout[layout] for role, layout in layouts.items()},
        seed=seed,
    )


def find_zero_advantage_samples(samples: SequenceBatch) -> Tensor:
    """Return a [B] bool mask of samples whose advantages are all zero.

    These are samples in groups where all completions have the same reward.
    """
    return sum_per_sequence((samples.columns["advantages"] != 0).float(), samples) == 0


def drop_zero_advantage_samples(
    plan: StepPlan, samples: SequenceBatch, *, role: str, layout: RoleLayout, max_tokens: int
) -> StepPlan:
    """Return the plan without zero-advantage samples in one role's micro-batches.

    The denominators still count these samples, so the gradient does not change. That holds only if
    every term of the objective has the advantage as a factor, and if no earlier forward pass used
    the same micro-batches.
    """
    is_zero, is_trained = find_zero_advantage_samples(samples), find_trained_sequences(samples)
    lengths: list[int] = samples.lengths.tolist()
    pack_groups: list[int] = samples.pack_group_ids.tolist()

    def plan_without(mini_batch: MiniBatch) -> MiniBatch:
        # A mini-batch with only zero-advantage samples keeps its first trained one: the update must
        # still happen, because it decays the optimizer's moments and advances the schedule.
        is_kept = ~is_zero[torch.tensor(mini_batch.indices)]
        # The first trained sample, not the first one: the overlong filter may have left that one
        # untrained, and a mini-batch without trained tokens has metrics of NaN.
        first = int(is_trained[torch.tensor(mini_batch.indices)].int().argmax())
        positions = torch.nonzero(is_kept)[:, 0].tolist() or [first]
        kept = [mini_batch.indices[i] for i in positions]
        smaller = plan_mini_batch(
            [lengths[i] for i in kept],
            dp_size=layout.dp_size,
            max_tokens=max_tokens,
            pack_group_ids=[pack_groups[i] for i in kept],
            constraints=layout.constraints,
        )
        role_plan = _map_indices(smaller, positions)
        return replace(mini_batch, plans={**mini_batch.plans, role: role_plan})

    return replace(
        plan, mini_batches=tuple(plan_without(mini_batch) for mini_batch in plan.mini_batches)
    )


def _map_indices(plan: MiniBatchPlan, positions: list[int]) -> MiniBatchPlan:
    """Translate a plan's indices, which count selected samples, back to mini-batch indices."""
    ranks = [
        RankPlan(
            micro_batches=tuple(tuple(positions[i] for i in micro) for micro in rank.micro_batches)
        )
        for rank in plan.ranks
    ]
    return MiniBatchPlan(ranks=tuple(ranks))


def pack_mini_batch(
    samples: SequenceBatch, mini_batch: MiniBatch, role: str, *, objective: Objective | None = None
) -> list[PackedBatch]:
    """Return a packed batch for each of a role's data-parallel ranks.

    With an objective, this calls ``Objective.prepare`` once for the full mini-batch and sends the
    workers only the columns that the objective reads. Without an objective (a forward pass), the
    workers get no columns. The actor also gets the experts that the sampler chose, if any.

    Args:
        samples: Samples of the step, with every column that the objective reads.
        mini_batch: A mini-batch in the step's plan.
        role: Role whose plan is used.
        objective: Objective that the role trains with.

    Raises:
        BatchError: If a column that the objective reads is missing.
    """
    selected = samples.select(mini_batch.indices)
    # Do this on the driver, before the split across ranks, so that `prepare` can compute mini-batch
    # statistics that no single rank could.
    prepared = {} if objective is None else dict(objective.prepare(selected, seed=mini_batch.seed))
    required = frozenset[str]() if objective is None else objective.columns
    if objective is not None and HeadOutput.LOGPROB_AT in objective.required_outputs:
        # No column of the objective, but the head needs it to know which tokens to look up.
        required |= {LOGPROB_AT_IDS}
    if role == "actor":
        # The sampler has chosen experts of the actor's model; other roles have other weights.
        required |= selected.columns.keys() & {ROUTED_EXPERTS}
    missing = (
        required - selected.columns.keys() - selected.sequence_columns.keys() - prepared.keys()
    )
    if missing:
        assert objective is not None
        raise BatchError(
            f"objective {objective.name!r} reads columns that the samples lack: "
            f"{', '.join(sorted(missing))}."
        )
    columns = {name: column for name, column in selected.columns.items() if name in required}
    # The batches travel to the workers, so they contain only what those read.
    trimmed = replace(
        selected,
        columns=columns | prepared,
        sequence_columns={
            name: column for name, column in selected.sequence_columns.items() if name in required
        },
    )
    plan = mini_batch.plans[role]
    return [
        build_packed_batch(trimmed, plan=plan, rank=rank, denominators=mini_batch.denominators)
        for rank in range(len(plan.ranks))
    ]


def measure_plan(plan: StepPlan, samples: SequenceBatch, *, role: str) -> dict[str, float]:
    """Return the ``batch/*`` metrics of a step for one role.

    Args:
        plan: Plan of the step.
        samples: Samples of the step.
        role: A trained role, such as ``actor``. The ranks of another role may get other samples.

    Returns:
        ``batch/tokens`` and ``batch/trained_tokens``: tokens in one pass. ``batch/updates``:
        mini-batches in all passes. ``batch/micro_batches``: micro-batches of each rank in one
        pass. ``batch/dummy_fraction``: fraction of micro-batches that contain only a dummy token.
        ``batch/imbalance``: tokens on the fullest rank divided by the average per rank, minus 1;
        the maximum over mini-batches.
    """
    lengths: list[int] = samples.lengths.tolist()
    plans = [mini_batch.plans[role] for mini_batch in plan.first_pass]
    micro_batches = [micro for p in plans for rank in p.ranks for micro in rank.micro_batches]
    return {
        "batch/tokens": float(samples.num_tokens),
        "batch/trained_tokens": float(samples.loss_mask.sum()),
        "batch/updates": float(len(plan.mini_batches)),
        "batch/micro_batches": float(sum(p.num_micro_batches for p in plans)),
        "batch/dummy_fraction": sum(not micro for micro in micro_batches) / len(micro_batches),
        "batch/imbalance": max(
            _imbalance(mini_batch, role_plan, lengths)
            for mini_batch, role_plan in zip(plan.first_pass, plans, strict=True)
        ),
    }


def _imbalance(mini_batch: MiniBatch, plan: MiniBatchPlan, lengths: list[int]) -> float:
    tokens = [
        sum(lengths[mini_batch.indices[i]] for micro in rank.micro_batches for i in micro)
        for rank in plan.ranks
    ]
    return max(tokens) * len(tokens) / sum(tokens) - 1.0


def describe_plan(plan: StepPlan, samples: SequenceBatch) -> str:
    """Return the sizes of a step as text; printed at the first step.

    It lists the number of updates, the first one's denominators, and a table of ranks for each
    distinct plan.
    """
    lengths: list[int] = samples.lengths.tolist()
    first = plan.mini_batches[0]
    first_lengths = [lengths[i] for i in first.indices]
    counts = first.denominators
    passes = f"passes: {plan.num_passes}, mini-batches per pass: {len(plan.first_pass)}"
    sizes = f"samples: {samples.num_sequences}, tokens: {samples.num_tokens}"
    trained = f"trained tokens: {counts.tokens} of {sum(first_lengths)}"
    lines = [
        f"{sizes}; updates: {len(plan.mini_batches)} ({passes})",
        f"first update: {trained}, sequences: {counts.sequences}, groups: {counts.groups}",
    ]
    # Roles with equal layouts have the same plan object: see `plan_step`.
    roles_by_plan: dict[int, list[str]] = {}
    for role, role_plan in first.plans.items():
        roles_by_plan.setdefault(id(role_plan), []).append(role)
    for roles in roles_by_plan.values():
        table = describe_mini_batch(first.plans[roles[0]], first_lengths)
        lines += [f"{', '.join(roles)}:", table]
    return "\n".join(lines)
