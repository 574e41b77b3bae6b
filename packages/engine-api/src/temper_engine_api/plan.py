"""Assign the samples of a mini-batch to ranks and micro-batches.

Plans are pure functions of the sequence lengths, so every rank computes the same plan without
communication. `plan_mini_batch` makes a `MiniBatchPlan` from lengths, the number of data-parallel
ranks, a token cap and the engine's constraints; `build_packed_batch` makes one rank's `PackedBatch`
from it.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from temper_engine_api.balance import assign_to_ranks, balance_bins, pack_bins
from temper_engine_api.batch import (
    Denominators,
    PackedBatch,
    SequenceBatch,
    concatenate,
    make_dummy_sequence,
)
from temper_engine_api.errors import PlanError
from temper_engine_api.topology import PlanConstraints

NO_CONSTRAINTS = PlanConstraints()
"""Allow any number and size of micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Estimated cost for a sequence with l tokens, linear * l + quadratic * l^2, in any unit.

    The coefficients are integers so that sums are exact and every rank computes the same plan.

    Example:
        A sequence of 32,768 tokens costs as much as 72 of 1,024 tokens, not as 32:

        >>> cost = CostModel()
        >>> long, short = (cost.linear * n + cost.quadratic * n**2 for n in (32_768, 1_024))
        >>> long / short
        71.68
    """

    linear: int = 24576
    """Cost per token. A transformer layer of width D needs about 24 D^2 l + 4 D l^2 FLOPs, which is
    proportional to 6 D l + l^2. The default is for D = 4096."""
    quadratic: int = 1
    """Cost per squared token, from attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's micro-batches.

    Example:
        Sequences 0 and 1 in the first micro-batch, and a dummy token in the second:

        >>> RankPlan(micro_batches=((0, 1), ()))
        RankPlan(micro_batches=((0, 1), ()))
    """

    micro_batches: tuple[tuple[int, ...], ...]
    """Indices of sequences in the mini-batch, sorted by cost (largest first), so that all ranks run
    similarly expensive micro-batches at the same time. An empty one becomes one dummy token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchPlan:
    """Assignment of every sequence in a mini-batch to a rank and one of its micro-batches.

    Example:
        >>> plan = plan_mini_batch([6, 2, 3, 5], dp_size=2, max_tokens=8)
        >>> [rank.micro_batches for rank in plan.ranks]
        [((0, 1),), ((2, 3),)]
    """

    ranks: tuple[RankPlan, ...]
    """Plans by data-parallel rank; all have the same number of micro-batches."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per rank."""
        return len(self.ranks[0].micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackGroup:
    """Sequences that must share a micro-batch."""

    members: tuple[int, ...]
    tokens: int
    cost: int


def plan_mini_batch(
    lengths: Sequence[int],
    *,
    dp_size: int,
    max_tokens: int,
    pack_group_ids: Sequence[int] | None = None,
    constraints: PlanConstraints = NO_CONSTRAINTS,
    cost: CostModel = CostModel(),
) -> MiniBatchPlan:
    """Balance a mini-batch across ranks, and pack each rank's sequences into few micro-batches.

    Every rank gets about the same number of sequences and the same total cost. It gets as few
    micro-batches as the token cap allows, but the same number as all other ranks.

    Args:
        lengths: Number of tokens per sequence, at least 1.
        dp_size: Number of data-parallel ranks.
        max_tokens: Token cap of a micro-batch, including its padding to
            `constraints.token_multiple`.
        pack_group_ids: Sequences with the same id share a micro-batch. None puts each sequence into
            a separate group.
        constraints: Requirements of the engine, from `topology.plan_constraints`.
        cost: Cost to balance across ranks and micro-batches.

    Raises:
        PlanError: If there is no sequence, or a single sequence or pack group exceeds the cap.

    Example:
        >>> plan = plan_mini_batch(
        ...     [4, 4, 4, 4], dp_size=1, max_tokens=8, pack_group_ids=[0, 1, 1, 0]
        ... )
        >>> plan.ranks[0].micro_batches
        ((0, 3), (1, 2))
    """
    if not lengths or dp_size < 1:
        raise PlanError(
            f"can't plan {len(lengths)} sequences over {dp_size} ranks: both must be at least 1."
        )
    groups = _make_pack_groups(lengths, pack_group_ids, cost)
    # Engines pad a micro-batch to the multiple, and the padding counts against the cap.
    capacity = max_tokens // constraints.token_multiple * constraints.token_multiple
    _check_fits(
        groups,
        lengths,
        max_tokens=max_tokens,
        capacity=capacity,
        token_multiple=constraints.token_multiple,
    )
    rank_groups: list[list[_PackGroup]] = [[] for _ in range(dp_size)]
    # Balance costs instead of tokens, because attention is quadratic in the length.
    ranks = assign_to_ranks(torch.tensor([group.cost for group in groups]), num_ranks=dp_size)
    for group, rank in zip(groups, ranks.tolist(), strict=True):
        rank_groups[rank].append(group)
    filled = [
        pack_bins([group.tokens for group in own_groups], capacity=capacity)
        for own_groups in rank_groups
    ]
    # Every micro-batch is a collective, so all ranks run as many as the rank that needs most.
    count = _round_up_count(max(len(bins) for bins in filled), constraints)
    return MiniBatchPlan(
        ranks=tuple(
            _build_rank_plan(own_groups, bins, count=count, capacity=capacity)
            for own_groups, bins in zip(rank_groups, filled, strict=True)
        )
    )


def plan_single_micro_batch(num_sequences: int, *, constraints: PlanConstraints) -> MiniBatchPlan:
    """Plan one rank with all sequences in one micro-batch.

    Further micro-batches are empty, if constraints require a larger number of them.
    """
    count = _round_up_count(1, constraints)
    return MiniBatchPlan(
        ranks=(RankPlan(micro_batches=(tuple(range(num_sequences)), *[()] * (count - 1))),)
    )


def build_packed_batch(
    batch: SequenceBatch, *, plan: MiniBatchPlan, rank: int, denominators: Denominators
) -> PackedBatch:
    """Build one rank's packed batch; an empty micro-batch gets a dummy token.

    Args:
        batch: Mini-batch across all ranks; the plan's indices point into it.
        plan: Plan of this mini-batch.
        rank: Data-parallel rank.
        denominators: Counts of the full mini-batch, from `count_denominators(batch)`.

    Example:
        >>> from temper_engine_api.batch import from_sequences
        >>> from temper_engine_api.reduction import count_denominators
        >>> batch = from_sequences(
        ...     [torch.arange(n) for n in (6, 2, 3)],
        ...     loss_masks=[torch.arange(n) > 0 for n in (6, 2, 3)],
        ... )
        >>> plan = plan_mini_batch([6, 2, 3], dp_size=2, max_tokens=8)
        >>> packed = build_packed_batch(
        ...     batch, plan=plan, rank=1, denominators=count_denominators(batch)
        ... )
        >>> packed.sample_ids.tolist(), packed.denominators.tokens
        ([1, 2], 8)
    """
    micro_batches = plan.ranks[rank].micro_batches
    dummy = batch.num_sequences
    filled = [micro or (dummy,) for micro in micro_batches]
    source = batch if all(micro_batches) else concatenate([batch, make_dummy_sequence(batch)])
    chosen = source.select([i for micro in filled for i in micro])
    sizes = torch.tensor([0, *(len(micro) for micro in filled)])
    return PackedBatch(
        **{column.name: getattr(chosen, column.name) for column in fields(SequenceBatch)},
        micro_batch_starts=sizes.cumsum(0).int().to(chosen.tokens.device),
        denominators=denominators,
    )


def split_mini_batches(
    group_ids: Sequence[int],
    *,
    num_mini_batches: int,
    seed: int | None,
    pack_group_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split samples into mini-batches of similar size without splitting groups or pack groups.

    Args:
        group_ids: Group id per sequence.
        num_mini_batches: Number of mini-batches.
        seed: Seed of the shuffle, which depends on nothing else. None keeps the given order.
        pack_group_ids: Pack-group id per sequence. Groups that share a pack group stay
            together.

    Returns:
        Sequence indices per mini-batch, ascending.

    Raises:
        PlanError: If there are fewer groups than mini-batches.

    Example:
        >>> split_mini_batches([7, 7, 8, 8, 9, 9], num_mini_batches=3, seed=None)
        [[0, 1], [2, 3], [4, 5]]
    """
    units = _join_groups(group_ids, group_ids if pack_group_ids is None else pack_group_ids)
    if not 1 <= num_mini_batches <= len(units):
        raise PlanError(
            f"{len(units)} groups can't fill {num_mini_batches} mini-batches, because groups are "
            f"not split: use at most {len(units)} mini-batches, or more prompts."
        )
    if seed is None:
        return _cut_in_order(units, num_mini_batches)
    # Python keeps random() the same across versions, but not the algorithm behind shuffle().
    draw = random.Random(seed)
    keyed = sorted((draw.random(), i) for i in range(len(units)))
    shuffled = [units[i] for _, i in keyed]
    sizes = [len(unit) for unit in shuffled]
    ranks = assign_to_ranks(torch.tensor(sizes), num_ranks=num_mini_batches).tolist()
    return [
        sorted(i for unit, r in zip(shuffled, ranks, strict=True) if r == m for i in unit)
        for m in range(num_mini_batches)
    ]


def plan_fingerprint(plan: MiniBatchPlan) -> str:
    """Return the SHA-256 of a plan, to check that two ranks computed the same one."""
    return hashlib.sha256(repr([rank.micro_batches for rank in plan.ranks]).encode()).hexdigest()


def format_plan(
    plan: MiniBatchPlan, lengths: Sequence[int], *, cost: CostModel = CostModel()
) -> str:
    """Format a table with sequences, tokens, largest micro-batch and relative cost per rank."""
    rows = ["rank  sequences  tokens  largest micro-batch  cost/mean"]
    costs = [
        sum(_sequence_cost(lengths[i], cost) for micro in rank.micro_batches for i in micro)
        for rank in plan.ranks
    ]
    mean = sum(costs) / len(costs)
    for r, rank in enumerate(plan.ranks):
        sizes = [sum(lengths[i] for i in micro) for micro in rank.micro_batches]
        count = sum(len(micro) for micro in rank.micro_batches)
        rows.append(
            f"{r:>4}  {count:>9}  {sum(sizes):>6}  {max(sizes):>19}  {costs[r] / mean:>9.3f}"
        )
    rows.append(f"micro-batches per rank: {plan.num_micro_batches}")
    return "\n".join(rows)


def _sequence_cost(length: int, cost: CostModel) -> int:
    return cost.linear * length + cost.quadratic * length * length


def _make_pack_groups(
    lengths: Sequence[int], pack_group_ids: Sequence[int] | None, cost: CostModel
) -> list[_PackGroup]:
    members: dict[int, list[int]] = {}
    for i, group in enumerate(range(len(lengths)) if pack_group_ids is None else pack_group_ids):
        members.setdefault(group, []).append(i)
    return [
        _PackGroup(
            members=tuple(m),
            tokens=sum(lengths[i] for i in m),
            cost=sum(_sequence_cost(lengths[i], cost) for i in m),
        )
        for m in members.values()
    ]


def _check_fits(
    groups: list[_PackGroup],
    lengths: Sequence[int],
    *,
    max_tokens: int,
    capacity: int,
    token_multiple: int,
) -> None:
    largest = max(groups, key=lambda group: group.tokens)
    if largest.tokens <= capacity:
        return
    longest = max(largest.members, key=lambda i: lengths[i])
    fault = f"sample {longest} has {lengths[longest]} tokens"
    if len(largest.members) > 1:
        fault += (
            f" and shares its pack group with {len(largest.members) - 1} more, {largest.tokens} "
            "tokens together"
        )
    padding = f", counted in multiples of {token_multiple}" if token_multiple > 1 else ""
    raise PlanError(
        f"{fault}, but a micro-batch may have {max_tokens}{padding}: raise batching.max_tokens or "
        "lower sampling.max_tokens."
    )


def _round_up_count(count: int, constraints: PlanConstraints) -> int:
    multiple = constraints.micro_batch_multiple
    return -(-max(count, constraints.min_micro_batches, 1) // multiple) * multiple


def _build_rank_plan(
    own_groups: list[_PackGroup], bins: list[list[int]], *, count: int, capacity: int
) -> RankPlan:
    """Balance the micro-batches by cost; keep the packed bins if the result exceeds the cap."""
    tokens, costs = [group.tokens for group in own_groups], [group.cost for group in own_groups]
    even = balance_bins(tokens, costs, num_bins=count, capacity=capacity)
    chosen = bins + [[]] * (count - len(bins)) if even is None else even
    costliest_first = sorted(chosen, key=lambda b: -sum(costs[a] for a in b))
    return RankPlan(
        micro_batches=tuple(
            tuple(sorted(i for a in b for i in own_groups[a].members)) for b in costliest_first
        )
    )


def _join_groups(group_ids: Sequence[int], pack_group_ids: Sequence[int]) -> list[list[int]]:
    """Merge sequences that share a group or a pack group, directly or through other sequences.

    Returns:
        Lists of indices that must stay in one mini-batch, in input order.
    """
    parent = list(range(len(group_ids)))

    def root(i: int) -> int:
        while parent[i] != i:
            # Path halving: without it, chains of groups would make each search linear.
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for ids in (group_ids, pack_group_ids):
        # A new dict for each kind of id: a group and a pack group with the same id are not related.
        first: dict[int, int] = {}
        for i, name in enumerate(ids):
            a, b = sorted((root(i), root(first.setdefault(name, i))))
            parent[b] = a
    units: dict[int, list[int]] = {}
    for i in range(len(parent)):
        units.setdefault(root(i), []).append(i)
    return list(units.values())


def _cut_in_order(units: list[list[int]], num_mini_batches: int) -> list[list[int]]:
    """Cut the units into consecutive mini-batches of similar size, at least one unit in each."""
    total = sum(len(unit) for unit in units)
    parts: list[list[int]] = [[]]
    seen = 0
    for i, unit in enumerate(units):
        must = num_mini_batches - len(parts) >= len(units) - i
        # Cut where a unit's middle passes the next equal fraction of all sequences.
        passed = (seen + len(unit) / 2) * num_mini_batches > len(parts) * total
        if parts[-1] and len(parts) < num_mini_batches and (must or passed):
            parts.append([])
        parts[-1] += unit
        seen += len(unit)
    return parts
