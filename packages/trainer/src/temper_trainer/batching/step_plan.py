"""Which sample goes to which mini-batch, rank and micro-batch of a step, for every role, and each denominator.

Membership of mini-batches is shared by all roles; ranks and micro-batches are planned per role. The arithmetic is the contract's
(``temper_engine_api.plan``); here is what a step adds: several passes, several roles, one seed.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from temper_engine_api.batch import Denominators, SequenceBatch
from temper_engine_api.plan import MiniBatchPlan, plan_mini_batch, split_mini_batches
from temper_engine_api.reduction import count_denominators
from temper_engine_api.topology import PlanConstraints, Topology
from temper_trainer.config.algorithm import BatchingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLayout:
    """What of a role's topology its plan depends on; equal layouts get the same plan."""

    dp_size: int = 1
    """Data-parallel ranks."""
    constraints: PlanConstraints = field(default_factory=PlanConstraints)
    """Of the engine's layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The samples of one update, and how each role runs them."""

    indices: tuple[int, ...]
    """Into the step's samples, ascending."""
    denominators: Denominators
    """Counted over all of them, after all masking."""
    plans: Mapping[str, MiniBatchPlan]
    """By role; indices of a plan point into ``indices``."""
    seed: int
    """Of the objective's ``prepare``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Every update of a step, in order."""

    mini_batches: tuple[MiniBatch, ...]
    """num_passes x num_mini_batches, less where there are fewer groups; those of one pass hold every sample once."""
    num_passes: int
    """Passes over the samples."""

    @property
    def first_pass(self) -> tuple[MiniBatch, ...]:
        """Every sample once."""
        return self.mini_batches[: len(self.mini_batches) // self.num_passes]


def layout_of(topology: Topology) -> RoleLayout:
    """What a plan depends on."""
    return RoleLayout(dp_size=topology.dp.size, constraints=topology.plan_constraints)


def plan_step(
    samples: SequenceBatch,
    config: BatchingConfig,
    *,
    topologies: Mapping[str, RoleLayout],
    seed: int,
) -> StepPlan:
    """The step's plan: a pure function of lengths, groups, layouts and the seed.

    Args:
        samples: the step's; their loss mask must be final.
        config: numbers of passes and mini-batches, cap of a micro-batch.
        topologies: layout by role.
        seed: a step's own; every pass deals the groups anew.

    Raises:
        PlanError: a sample is longer than the cap; names the keys.
    """
    draw = random.Random(seed)
    mini_batches = [
        _plan_members(
            samples,
            members,
            max_tokens=config.max_tokens,
            topologies=topologies,
            seed=draw.getrandbits(63),
        )
        for _ in range(config.num_passes)
        for members in _split(samples, config, seed=draw.getrandbits(63))
    ]
    return StepPlan(mini_batches=tuple(mini_batches), num_passes=config.num_passes)


def plan_forward(plan: StepPlan) -> tuple[MiniBatch, ...]:
    """The passes for old log-probs, reference and values: the mini-batches of the first pass, with their very split.

    The same micro-batches give the same kernels the same numbers, so the ratio of the first update is exactly 1.
    """
    return plan.first_pass


def _split(samples: SequenceBatch, config: BatchingConfig, *, seed: int) -> list[list[int]]:
    """Members of each mini-batch of one pass.

    A step whose rewards failed for whole groups may hold fewer groups than mini-batches: it makes that many fewer updates, and a run goes
    on; ``batch/updates`` shows it.
    """
    groups, atoms = samples.group_ids.tolist(), samples.atom_ids.tolist()
    if config.num_mini_batches == 1:
        return [list(range(samples.num_sequences))]
    count = min(config.num_mini_batches, len(set(groups)))
    return split_mini_batches(groups, num_mini_batches=count, seed=seed, atom_ids=atoms)


def _plan_members(
    samples: SequenceBatch,
    members: list[int],
    *,
    max_tokens: int,
    topologies: Mapping[str, RoleLayout],
    seed: int,
) -> MiniBatch:
    chosen = samples.select(members)
    lengths, atoms = chosen.lengths.tolist(), chosen.atom_ids.tolist()
    by_layout = {
        layout: plan_mini_batch(
            lengths,
            dp_size=layout.dp_size,
            max_tokens=max_tokens,
            atom_ids=atoms,
            constraints=layout.constraints,
        )
        for layout in set(topologies.values())
    }
    return MiniBatch(
        indices=tuple(members),
        denominators=count_denominators(chosen),
        plans={role: by_layout[layout] for role, layout in topologies.items()},
        seed=seed,
    )
