"""Optimizer moments of old FSDP checkpoints, by Hugging Face name.

FSDP2 numbers the model's parameters in order. FSDP1 numbers its units: one flat vector for the root
and one for each decoder layer (and, with an adapter, one for each trained leaf), every parameter of
the unit end to end in the order of its modules, padded to a multiple of the ranks. Which parameters
a unit holds is rebuilt from names and accepted only if every length fits. With ``use_orig_params``
FSDP1 numbers parameters, and each rank keeps the stretches that lie in its shard.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, Rows, Shape, Unflattened
from temper_legacy_shim.checkpoints.files.sharded import assemble
from temper_legacy_shim.checkpoints.files.tensors import Distributed, Sharded
from temper_legacy_shim.checkpoints.layouts import Role
from temper_legacy_shim.checkpoints.rank_files import (
    RankState,
    check_flat_replicas,
    check_same_numbers,
    flat_parts,
    is_distributed,
    joined,
    numbers_of,
    read_ranks,
    shard_order,
    step_of,
)
from temper_legacy_shim.errors import DamagedFileError, LayoutError

# FSDP1 wrapped decoder layers, which transformers calls layers, h (GPT-2, Falcon) or blocks (MPT).
_LAYER = re.compile(r"(?:.+?\.)?(?:layers|h|blocks)\.\d+\.(?=.)")
_TRAINED_LEAF = re.compile(r".+\.lora_(?:embedding_)?[AB]\..+")
_BUFFER = re.compile(
    r".+\.(?:e_score_correction_bias|expert_bias|inv_freq|original_inv_freq|num_batches_tracked|running_mean|running_var)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldMoments:
    first: LazyTensor
    """Exponential average of the gradient, in the parameter's shape."""
    second: LazyTensor
    """Moving average of the squared gradient."""
    update_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OldOptimizer:
    moments: Mapping[str, OldMoments]
    """Moments by parameter name in the model files."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """lr, betas, eps, weight_decay of its (only) group."""
    decays_vectors: bool = True
    """True if the decay took vectors too, as torch's optimizers do with one group."""
    masters: Mapping[str, LazyTensor] = field(default_factory=dict)
    """float32 parameters by the same names, if the optimizer keeps them next to weights."""


def read_optimizer(
    role: Role, weights: Mapping[str, LazyTensor], *, parameters: Sequence[str]
) -> OldOptimizer:
    """Return the moments of an FSDP role.

    Args:
        role: with optim files.
        weights: every tensor of the model files, in their order.
        parameters: their names, each shared one once, in the order of the model's modules; buffers
            may be among them.

    Raises:
        LayoutError: the assignment is ambiguous; the message shows the reason for the receipt.
        DamagedFileError: a file is damaged, or one is missing.
    """
    ranks = read_ranks(role)
    first = ranks[min(ranks)]
    if not is_distributed(ranks):
        check_flat_replicas(role, ranks, shard_order(role))
    parameters = [name for name in parameters if not is_buffer(name)]
    # No file says how FSDP stored the states. They are told apart by shape: vectors that fill each
    # parameter exactly (use_orig_params), vectors of other lengths (units of FSDP1), or tensors in
    # the shapes of the parameters.
    result = _from_pieces(role, ranks, weights, parameters)
    if result is None:
        check_same_numbers(role, ranks)
        is_flat = _is_flat(ranks, weights, parameters)
        result = (
            _from_units(role, ranks, weights, parameters)
            if is_flat
            else _from_numbers(role, ranks, weights, parameters)
        )
    return OldOptimizer(moments=result, settings=first.settings)


def read_trained_leaves(
    role: Role, weights: Mapping[str, LazyTensor], *, leaves: Sequence[str]
) -> OldOptimizer:
    """Read the moments of a role that trained only some of its parameters.

    FSDP1 makes a unit of each of these parameters.

    Args:
        role: with optim files.
        weights: every tensor of the model files.
        leaves: trained parameters, in the order of the model's modules, which is that of the
            optimizer's numbers.

    Raises:
        LayoutError: the optimizer keeps another number of states, or states of other lengths.
        DamagedFileError: a file is damaged, or one is missing.
    """
    ranks = read_ranks(role)
    numbers = numbers_of(ranks)
    if len(numbers) != len(leaves):
        raise LayoutError(
            f"the optimizer keeps states of {len(numbers)} parameters, but {len(leaves)} belong to "
            "the adapter"
        )
    is_flat = not is_distributed(ranks)
    order = shard_order(role)
    if is_flat:
        check_flat_replicas(role, ranks, order)
    else:
        check_same_numbers(role, ranks)
    result: dict[str, OldMoments] = {}
    for number, name in zip(numbers, leaves, strict=True):
        shape = weights[name].shape
        sides = {}
        for side in ("first", "second"):
            if is_flat:
                full = joined(role, ranks, order, number=number, side=side)
                sides[side] = _unpadded(full, shape, num_shards=len(order), name=name)
            else:
                sides[side] = _full(role, ranks, number, side, name=name)
            if sides[side].shape != shape:
                raise LayoutError(
                    f"the {side} moment number {number} has shape {sides[side].shape}, but {name} "
                    f"has {shape}"
                )
        result[name] = OldMoments(
            first=sides["first"], second=sides["second"], update_count=step_of(ranks, number)
        )
    return OldOptimizer(moments=result, settings=ranks[min(ranks)].settings)


def _unpadded(flat: LazyTensor, shape: Shape, *, num_shards: int, name: str) -> LazyTensor:
    count = math.prod(shape)
    # The padding at the end of a unit may be saved or not.
    if flat.shape[0] not in (count, -(-count // num_shards) * num_shards):
        raise LayoutError(
            f"the moments that should belong to {name} have {flat.shape[0]} elements in "
            f"{num_shards} shards, not {count}"
        )
    return Unflattened(Rows(flat, ((0, count),)), shape)


def _is_flat(
    ranks: Mapping[int, RankState], weights: Mapping[str, LazyTensor], parameters: Sequence[str]
) -> bool:
    """Check if the states are FSDP1's flat vectors, not of the parameters' shapes."""
    first = ranks[min(ranks)]
    entries = {number: state["first"] for number, state in first.states.items()}
    if any(isinstance(entry, Distributed) for entry in entries.values()):
        return False
    if first.num_parameters != len(parameters):
        return True
    return any(
        isinstance(e, int | Distributed) or e.shape != weights[parameters[n]].shape
        for n, e in entries.items()
    )


def _from_pieces(
    role: Role,
    ranks: Mapping[int, RankState],
    weights: Mapping[str, LazyTensor],
    parameters: Sequence[str],
) -> dict[str, OldMoments] | None:
    """Return moments of FSDP1 with ``use_orig_params``; None for other states."""
    # With use_orig_params the optimizer numbers parameters like an optimizer without FSDP, and a
    # rank without elements of a parameter has no state of it.
    if is_distributed(ranks) or ranks[min(ranks)].num_parameters != len(parameters):
        return None
    order = shard_order(role)
    replica = {rank: ranks[rank] for rank in order}
    entries = [state["first"] for of_rank in replica.values() for state in of_rank.states.values()]
    numbers = numbers_of(replica)
    is_flat = not any(
        isinstance(entry, int | Sharded | Distributed) or len(entry.shape) != 1 for entry in entries
    )
    if not is_flat or not numbers or numbers[0] < 0 or numbers[-1] >= len(parameters):
        return None
    result: dict[str, OldMoments] = {}
    for number in numbers:
        shape = weights[parameters[number]].shape
        first, second = (
            joined(role, ranks, order, number=number, side=side) for side in ("first", "second")
        )
        # Flat units may also have one entry for each parameter by chance; then lengths differ.
        if first.shape != (math.prod(shape),) or second.shape != first.shape:
            return None
        result[parameters[number]] = OldMoments(
            first=Unflattened(first, shape),
            second=Unflattened(second, shape),
            update_count=step_of(ranks, number),
        )
    return result


def _from_numbers(
    role: Role,
    ranks: Mapping[int, RankState],
    weights: Mapping[str, LazyTensor],
    parameters: Sequence[str],
) -> dict[str, OldMoments]:
    """Return the moments by parameter name.

    The optimizer numbers parameters in the order in which the model lists them. Counts and shapes
    are compared, since no file says which name a number belongs to.
    """
    first = ranks[min(ranks)]
    if first.num_parameters != len(parameters) or max(first.states) >= len(parameters):
        raise LayoutError(
            f"the optimizer has {first.num_parameters} parameters, the model files "
            f"{len(parameters)}"
        )
    result: dict[str, OldMoments] = {}
    for number in first.states:
        name = parameters[number]
        full = {side: _full(role, ranks, number, side, name=name) for side in ("first", "second")}
        for side, tensor in full.items():
            if tensor.shape != weights[name].shape:
                raise LayoutError(
                    f"the {side} moment of parameter {number} has shape {tensor.shape}, but {name} "
                    f"has {weights[name].shape}"
                )
        result[name] = OldMoments(
            first=full["first"], second=full["second"], update_count=step_of(ranks, number)
        )
    return result


def _full(
    role: Role, ranks: Mapping[int, RankState], number: int, side: str, *, name: str
) -> LazyTensor:
    entries = {
        rank: entry
        for rank, state in ranks.items()
        if not isinstance(entry := state.states[number][side], int)
    }
    return assemble(f"the {side} moment of {name}", entries, where=str(role.path))


def _from_units(
    role: Role,
    ranks: Mapping[int, RankState],
    weights: Mapping[str, LazyTensor],
    parameters: Sequence[str],
) -> dict[str, OldMoments]:
    order = shard_order(role)
    units = _matching_units(ranks[order[0]], weights, parameters, num_shards=len(order))
    result: dict[str, OldMoments] = {}
    for number in ranks[order[0]].states:
        flat = {
            side: _joined_unit(role, ranks, order, number, side) for side in ("first", "second")
        }
        # Parameters of a unit have no padding between them; only the end of the unit has.
        at = 0
        for name in units[number]:
            shape = weights[name].shape
            count = math.prod(shape)
            parts = {
                side: Unflattened(Rows(vector, ((at, at + count),)), shape)
                for side, vector in flat.items()
            }
            result[name] = OldMoments(
                first=parts["first"], second=parts["second"], update_count=step_of(ranks, number)
            )
            at += count
    return result


def _joined_unit(
    role: Role, ranks: Mapping[int, RankState], order: Sequence[int], number: int, side: str
) -> LazyTensor:
    if len({part.shape for part in flat_parts(role, ranks, order, number=number, side=side)}) != 1:
        raise DamagedFileError(
            f"{role.path}: the shards of unit {number} differ in length: the files are not of one "
            "save."
        )
    return joined(role, ranks, order, number=number, side=side)


def _matching_units(
    state: RankState,
    weights: Mapping[str, LazyTensor],
    parameters: Sequence[str],
    *,
    num_shards: int,
) -> list[list[str]]:
    """Find the first wrapping that gives the number of units and the length of each."""
    lengths = {
        n: entry.shape[0]
        for n, s in state.states.items()
        if not isinstance(entry := s["first"], int) and entry.shape
    }
    # Two wrappings rarely give the same lengths, because the root's embeddings dwarf a layer.
    for candidate in _wrappings(parameters):
        sizes = [
            # FSDP1 pads a unit to a multiple of the ranks, so every shard has the quotient rounded
            # up.
            -(-sum(math.prod(weights[name].shape) for name in unit) // num_shards)
            for unit in candidate
        ]
        if len(candidate) == state.num_parameters and all(
            n < len(sizes) and sizes[n] == length for n, length in lengths.items()
        ):
            return candidate
    raise LayoutError(
        f"FSDP1's flat optimizer state has {state.num_parameters} units of "
        f"{sorted(set(lengths.values()))[:6]} elements on each of {num_shards} ranks, and no known "
        f"way of wrapping the model's {len(parameters)} parameters gives these"
    )


def _wrappings(parameters: Sequence[str]) -> Iterable[list[list[str]]]:
    """Return the possible units: decoder layers, the default, or the full model."""
    yield _group_by_layer(parameters)
    yield [list(parameters)]


def is_buffer(name: str) -> bool:
    """Check if a tensor of a model file is no parameter."""
    return _BUFFER.fullmatch(name) is not None


def _group_by_layer(names: Sequence[str]) -> list[list[str]]:
    """Return the root's parameters, then each layer's, in the order of FSDP1's units."""
    root: list[str] = []
    # Dictionaries keep the order of the model's modules, in which FSDP1 numbers its units.
    units: dict[str, list[str]] = {}
    leaves: dict[str, list[list[str]]] = {}
    for name in names:
        match = _LAYER.match(name)
        layer = match[0] if match else ""
        if _TRAINED_LEAF.fullmatch(name):
            leaves.setdefault(layer, []).append([name])
        elif match:
            units.setdefault(layer, []).append(name)
        else:
            root.append(name)
    result = [root, *leaves.get("", [])]
    for layer, unit in units.items():
        result += [unit, *leaves.get(layer, [])]
    return result
