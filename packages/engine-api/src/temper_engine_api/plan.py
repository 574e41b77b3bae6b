"""Which sample goes to which rank and micro-batch: pure functions of the lengths, the same on every rank without a word exchanged.

In: lengths of the sequences of one mini-batch, the number of data-parallel ranks, a cap of tokens, what the engine's layout asks.
Out: a MiniBatchPlan, and from it each rank's PackedBatch. The engine executes the split and never changes it.
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
"""Any number of micro-batches of any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What a sequence of l tokens costs: linear * l + quadratic * l^2, in any unit; integers, so that sums are exact."""

    linear: int = 24576
    """Per token. A transformer layer of width D does about 24 D^2 l + 4 D l^2 floating-point operations, so 6 D to 1; D = 4096."""
    quadratic: int = 1
    """Per squared token: attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's part of a mini-batch."""

    micro_batches: tuple[tuple[int, ...], ...]
    """Indices into the mini-batch, costliest micro-batch first, so that ranks run like beside like; () becomes one dummy token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchPlan:
    """Every sequence of a mini-batch in exactly one micro-batch of one rank."""

    ranks: tuple[RankPlan, ...]
    """By data-parallel rank; all have the same number of micro-batches."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0].micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackGroup:
    """Sequences that stay together."""

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
    """Split a mini-batch over ranks by cost, in equal numbers, and each rank's part into as few micro-batches as the cap allows.

    Args:
        lengths: tokens of each sequence, >= 1.
        dp_size: data-parallel ranks.
        max_tokens: cap of a micro-batch, its padding to constraints.token_multiple included.
        pack_group_ids: sequences with the same id share a micro-batch; None is each alone.
        constraints: of the engine's layout.
        cost: what is balanced.

    Raises:
        PlanError: there is no sequence, or one sequence or atom alone exceeds the cap; names it.
    """
    if not lengths or dp_size < 1:
        raise PlanError(
            f"{len(lengths)} sequences over {dp_size} ranks can't be planned: both must be at least 1."
        )
    atoms = _make_pack_groups(lengths, pack_group_ids, cost)
    capacity = max_tokens // constraints.token_multiple * constraints.token_multiple
    _check_fits(
        atoms,
        lengths,
        max_tokens=max_tokens,
        capacity=capacity,
        token_multiple=constraints.token_multiple,
    )
    shares: list[list[_PackGroup]] = [[] for _ in range(dp_size)]
    ranks = assign_to_ranks(torch.tensor([atom.cost for atom in atoms]), num_ranks=dp_size)
    for atom, rank in zip(atoms, ranks.tolist(), strict=True):
        shares[rank].append(atom)
    filled = [pack_bins([atom.tokens for atom in share], capacity=capacity) for share in shares]
    count = _allowed_count(max(len(bins) for bins in filled), constraints)
    return MiniBatchPlan(
        ranks=tuple(
            _rank_plan(share, bins, count=count, capacity=capacity)
            for share, bins in zip(shares, filled, strict=True)
        )
    )


def plan_single_micro_batch(num_sequences: int, *, constraints: PlanConstraints) -> MiniBatchPlan:
    """One rank, all sequences in the first micro-batch, empty ones after it where the layout asks for more."""
    count = _allowed_count(1, constraints)
    return MiniBatchPlan(
        ranks=(RankPlan(micro_batches=(tuple(range(num_sequences)), *[()] * (count - 1))),)
    )


def build_packed_batch(
    batch: SequenceBatch, *, plan: MiniBatchPlan, rank: int, denominators: Denominators
) -> PackedBatch:
    """A rank's share of a mini-batch, in the order of its micro-batches; a dummy token stands in each empty one.

    Args:
        batch: the mini-batch over all ranks, which the plan's indices point into.
        plan: the split.
        rank: data-parallel rank.
        denominators: of the whole mini-batch.
    """
    micro_batches = plan.ranks[rank].micro_batches
    dummy = batch.num_sequences
    filled = [micro or (dummy,) for micro in micro_batches]
    source = batch if all(micro_batches) else concatenate([batch, make_dummy_sequence(batch)])
    share = source.select([i for micro in filled for i in micro])
    sizes = torch.tensor([0, *(len(micro) for micro in filled)])
    return PackedBatch(
        **{column.name: getattr(share, column.name) for column in fields(SequenceBatch)},
        micro_batch_starts=sizes.cumsum(0).int().to(share.tokens.device),
        denominators=denominators,
    )


def split_mini_batches(
    group_ids: Sequence[int],
    *,
    num_mini_batches: int,
    seed: int | None,
    pack_group_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """Members of each mini-batch, ascending: whole groups and whole atoms, numbers of sequences as equal as those allow.

    Args:
        group_ids: of each sequence.
        num_mini_batches: how many.
        seed: membership is a pure function of it; None cuts the given order without shuffling.
        pack_group_ids: of each sequence; an atom that spans groups joins them.

    Raises:
        PlanError: fewer groups than mini-batches.
    """
    units = _join_groups(group_ids, group_ids if pack_group_ids is None else pack_group_ids)
    if not 1 <= num_mini_batches <= len(units):
        raise PlanError(
            f"{len(units)} groups can't fill {num_mini_batches} mini-batches: groups are never split, so use at most "
            f"{len(units)} mini-batches or more prompts."
        )
    if seed is None:
        return _cut_in_order(units, num_mini_batches)
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
    """SHA-256 of a plan, to compare what two ranks computed."""
    return hashlib.sha256(repr([rank.micro_batches for rank in plan.ranks]).encode()).hexdigest()


def format_plan(
    plan: MiniBatchPlan, lengths: Sequence[int], *, cost: CostModel = CostModel()
) -> str:
    """A table for people: sequences, tokens, largest micro-batch and share of the mean cost of each rank."""
    rows = ["rank  sequences  tokens  largest micro-batch  cost/mean"]
    costs = [
        sum(_cost(lengths[i], cost) for micro in rank.micro_batches for i in micro)
        for rank in plan.ranks
    ]
    mean = sum(costs) / len(costs)
    for r, rank in enumerate(plan.ranks):
        sizes = [sum(lengths[i] for i in micro) for micro in rank.micro_batches]
        count = sum(len(micro) for micro in rank.micro_batches)
        rows.append(
            f"{r:>4}  {count:>9}  {sum(sizes):>6}  {max(sizes):>19}  {costs[r] / mean:>9.3f}"
        )
    rows.append(f"{plan.num_micro_batches} micro-batches on each of {len(plan.ranks)} ranks")
    return "\n".join(rows)


def _cost(length: int, cost: CostModel) -> int:
    return cost.linear * length + cost.quadratic * length * length


def _make_pack_groups(
    lengths: Sequence[int], pack_group_ids: Sequence[int] | None, cost: CostModel
) -> list[_PackGroup]:
    members: dict[int, list[int]] = {}
    for i, atom in enumerate(range(len(lengths)) if pack_group_ids is None else pack_group_ids):
        members.setdefault(atom, []).append(i)
    return [
        _PackGroup(
            members=tuple(m),
            tokens=sum(lengths[i] for i in m),
            cost=sum(_cost(lengths[i], cost) for i in m),
        )
        for m in members.values()
    ]


def _check_fits(
    atoms: list[_PackGroup],
    lengths: Sequence[int],
    *,
    max_tokens: int,
    capacity: int,
    token_multiple: int,
) -> None:
    largest = max(atoms, key=lambda atom: atom.tokens)
    if largest.tokens <= capacity:
        return
    longest = max(largest.members, key=lambda i: lengths[i])
    what = f"sample {longest} has {lengths[longest]} tokens"
    if len(largest.members) > 1:
        what += f" and shares its atom with {len(largest.members) - 1} more, {largest.tokens} tokens together"
    padding = f", counted in multiples of {token_multiple}" if token_multiple > 1 else ""
    raise PlanError(
        f"{what}, but a micro-batch may hold {max_tokens}{padding}: raise batching.max_tokens or lower sampling.max_tokens."
    )


def _allowed_count(count: int, constraints: PlanConstraints) -> int:
    multiple = constraints.micro_batch_multiple
    return -(-max(count, constraints.min_micro_batches, 1) // multiple) * multiple


def _rank_plan(
    share: list[_PackGroup], bins: list[list[int]], *, count: int, capacity: int
) -> RankPlan:
    """Balanced where balance finds room for everything, else as tightly as the bins that are known to fit."""
    tokens, costs = [atom.tokens for atom in share], [atom.cost for atom in share]
    even = balance_bins(tokens, costs, num_bins=count, capacity=capacity)
    chosen = bins + [[]] * (count - len(bins)) if even is None else even
    heaviest_first = sorted(chosen, key=lambda b: -sum(costs[a] for a in b))
    return RankPlan(
        micro_batches=tuple(
            tuple(sorted(i for a in b for i in share[a].members)) for b in heaviest_first
        )
    )


def _join_groups(group_ids: Sequence[int], pack_group_ids: Sequence[int]) -> list[list[int]]:
    """Sequences that share a group or an atom, directly or through others, in order of first appearance."""
    parent = list(range(len(group_ids)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for ids in (group_ids, pack_group_ids):
        first: dict[int, int] = {}
        for i, name in enumerate(ids):
            a, b = sorted((root(i), root(first.setdefault(name, i))))
            parent[b] = a
    units: dict[int, list[int]] = {}
    for i in range(len(parent)):
        units.setdefault(root(i), []).append(i)
    return list(units.values())


def _cut_in_order(units: list[list[int]], num_mini_batches: int) -> list[list[int]]:
    """Cut where the running count passes each equal share, at least one unit in every part."""
    total = sum(len(unit) for unit in units)
    parts: list[list[int]] = [[]]
    seen = 0
    for i, unit in enumerate(units):
        must = num_mini_batches - len(parts) >= len(units) - i
        passed = (seen + len(unit) / 2) * num_mini_batches > len(parts) * total
        if parts[-1] and len(parts) < num_mini_batches and (must or passed):
            parts.append([])
        parts[-1] += unit
        seen += len(unit)
    return parts
