"""Optimiser moments of old FSDP checkpoints, by Hugging Face name: what FSDP2 numbers, and what FSDP1 keeps in nameless flat shards.

FSDP2 numbers the model's parameters in order. FSDP1 numbers its units: one flat vector for the root and one for each decoder layer (and,
with an adapter, one for each trained leaf), every parameter of the unit end to end in the order of its modules, padded to a multiple of
the ranks. Which parameters a unit holds is rebuilt from names and accepted only if every length fits.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from temper_legacy_shim.checkpoints.archive import Archive
from temper_legacy_shim.checkpoints.layouts import Role
from temper_legacy_shim.checkpoints.lazy import LazyTensor, Rows, Shape, Unflattened, concatenated, read_all
from temper_legacy_shim.checkpoints.pickles import Inert, in_short
from temper_legacy_shim.checkpoints.sharded import assemble
from temper_legacy_shim.checkpoints.tensors import Distributed, Entry, Sharded, TensorReader
from temper_legacy_shim.errors import DamagedFileError, LayoutError

_LAYER = re.compile(r"(?:.+?\.)?(?:layers|h|blocks)\.\d+\.(?=.)")
_TRAINED_LEAF = re.compile(r".+\.lora_(?:embedding_)?[AB]\..+")
_BUFFER = re.compile(r".+\.(?:e_score_correction_bias|expert_bias|inv_freq|original_inv_freq|num_batches_tracked|running_mean|running_var)")
_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad")


@dataclass(frozen=True, slots=True, kw_only=True)
class OldMoments:
    """State of one parameter."""

    first: LazyTensor
    """Exponential average of the gradient, in the parameter's shape."""
    second: LazyTensor
    """Of its square."""
    update_count: int
    """Updates that it has seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldOptimizer:
    """What an old optimiser left."""

    moments: Mapping[str, OldMoments]
    """By the name that the parameter has in the model files."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """lr, betas, eps, weight_decay of its (only) group."""
    masters: Mapping[str, LazyTensor] = field(default_factory=dict)
    """float32 parameters by the same names, where the optimiser keeps its own beside weights of fewer bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankState:
    states: Mapping[int, Mapping[str, Entry | int]]
    """By number: first, second (tensors) and step."""
    num_parameters: int
    settings: Mapping[str, object]


def read_optimizer(role: Role, weights: Mapping[str, LazyTensor], *, parameters: Sequence[str]) -> OldOptimizer:
    """Moments of an FSDP role.

    Args:
        role: with optim files.
        weights: every tensor of the model files, in their order.
        parameters: their names, each shared one once, in the order of the model's modules; buffers may be among them.

    Raises:
        LayoutError: they can't be told apart; says why, for the receipt.
        DamagedFileError: a file is damaged, or one is missing.
    """
    ranks = _read_ranks(role)
    first = ranks[min(ranks)]
    parameters = [name for name in parameters if not is_buffer(name)]
    is_flat = _is_flat(ranks, weights, parameters)
    found = _from_units(role, ranks, weights, parameters) if is_flat else _from_numbers(role, ranks, weights, parameters)
    return OldOptimizer(moments=found, settings=first.settings)


def read_trained_leaves(role: Role, weights: Mapping[str, LazyTensor], *, leaves: Sequence[str]) -> OldOptimizer:
    """Moments of a role that trained some of its parameters alone, each of which is a unit of its own in FSDP1.

    Args:
        role: with optim files.
        weights: every tensor of the model files.
        leaves: names of what was trained, in the order of the model's modules, which is that of the optimiser's numbers.

    Raises:
        LayoutError: the optimiser keeps another number of states, or states of other lengths.
        DamagedFileError: a file is damaged, or one is missing.
    """
    ranks = _read_ranks(role)
    first = ranks[min(ranks)]
    if len(first.states) != len(leaves):
        raise LayoutError(f"the optimizer keeps states of {len(first.states)} parameters, but {len(leaves)} belong to the adapter")
    numbers = dict(zip(sorted(first.states), leaves, strict=True))
    is_flat = not any(isinstance(state["first"], Distributed) for state in first.states.values())
    order = shard_order(role)
    found: dict[str, OldMoments] = {}
    for number, name in numbers.items():
        sides = {}
        for side in ("first", "second"):
            whole = _joined_flat(role, ranks, order, number, side) if is_flat else _whole(role, ranks, number, side, name=name)
            sides[side] = _unpadded(whole, weights[name].shape, num_shards=len(order), name=name) if is_flat else whole
            if sides[side].shape != weights[name].shape:
                raise LayoutError(f"the {side} moment number {number} has shape {sides[side].shape}, but {name} has {weights[name].shape}")
        found[name] = OldMoments(first=sides["first"], second=sides["second"], update_count=_step(first.states[number]))
    return OldOptimizer(moments=found, settings=first.settings)


def _unpadded(flat: LazyTensor, shape: Shape, *, num_shards: int, name: str) -> LazyTensor:
    count = math.prod(shape)
    if flat.shape != (-(-count // num_shards) * num_shards,):
        raise LayoutError(f"the moments that should belong to {name} have {flat.shape[0]} elements in {num_shards} shards, not {count}")
    return Unflattened(Rows(flat, ((0, count),)), shape)


def _read_ranks(role: Role) -> dict[int, _RankState]:
    files = role.fsdp_files["optim"]
    if set(files) != set(role.fsdp_files["model"]):
        raise DamagedFileError(
            f"{role.path} has optim files of ranks {sorted(files)}, but model files of ranks {sorted(role.fsdp_files['model'])}: copy "
            "every rank's file here, or move the optim files away to carry weights alone."
        )
    ranks = {rank: _read(path, rank=rank) for rank, path in files.items()}
    numbers = {frozenset(state.states) for state in ranks.values()}
    if len(numbers) != 1:
        raise DamagedFileError(f"{role.path}: ranks have optimizer states of different parameters: the files are not of one save.")
    if not ranks[min(ranks)].states:
        raise LayoutError("the optimizer had made no update, so there are no moments")
    return ranks


def _read(path: Path, *, rank: int) -> _RankState:
    archive = Archive(path)
    value = archive.value()
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict) or not isinstance(value.get("param_groups"), list):
        raise DamagedFileError(f"{path} is no state of an optimizer: it lacks state or param_groups.")
    reader = TensorReader(archive, rank=rank)
    groups = value["param_groups"]
    if len(groups) != 1 or not isinstance(groups[0], dict) or not isinstance(groups[0].get("params"), list):
        raise LayoutError(f"{path.name} has {len(groups)} parameter groups, but one is expected")
    states: dict[int, Mapping[str, Entry | int]] = {}
    for number, state in value["state"].items():
        if not isinstance(number, int) or not isinstance(state, dict):
            raise DamagedFileError(f"{path}: the state of {in_short(number)} is none of a numbered parameter.")
        if not {"exp_avg", "exp_avg_sq", "step"} <= state.keys():
            raise LayoutError(f"{path.name} is of an optimizer that keeps {sorted(map(in_short, state))}, not Adam's moments")
        states[number] = {
            "first": reader.entry(state["exp_avg"], key=f"exp_avg of {number}"),
            "second": reader.entry(state["exp_avg_sq"], key=f"exp_avg_sq of {number}"),
            "step": _count(reader, state["step"], key=f"step of {number}"),
        }
    settings = {name: groups[0][name] for name in _SETTINGS if isinstance(groups[0].get(name), int | float | tuple | list)}
    return _RankState(states=states, num_parameters=len(groups[0]["params"]), settings=settings)


def _count(reader: TensorReader, node: object, *, key: str) -> int:
    if isinstance(node, int | float):
        value = float(node)
    else:
        entry = reader.entry(node, key=key)
        tensor = entry.local if isinstance(entry, Distributed) else entry
        if isinstance(tensor, Sharded) or math.prod(tensor.shape) != 1:
            raise DamagedFileError(f"{reader.archive.path}: {key} is no number.")
        value = float(read_all(tensor).reshape(-1)[0])
    if not 0 <= value < 2**53:
        raise DamagedFileError(f"{reader.archive.path}: {key} is {value}, which is no count of updates.")
    return int(value)


def _is_flat(ranks: Mapping[int, _RankState], weights: Mapping[str, LazyTensor], parameters: Sequence[str]) -> bool:
    """FSDP1's states are ordinary vectors; those of a plain optimiser have the parameters' shapes."""
    first = ranks[min(ranks)]
    entries = {number: state["first"] for number, state in first.states.items()}
    if any(isinstance(entry, Distributed) for entry in entries.values()):
        return False
    if first.num_parameters != len(parameters):
        return True
    return any(isinstance(e, int | Distributed) or e.shape != weights[parameters[n]].shape for n, e in entries.items())


def _from_numbers(
    role: Role, ranks: Mapping[int, _RankState], weights: Mapping[str, LazyTensor], parameters: Sequence[str]
) -> dict[str, OldMoments]:
    first = ranks[min(ranks)]
    if first.num_parameters != len(parameters) or max(first.states) >= len(parameters):
        raise LayoutError(f"the optimizer has {first.num_parameters} parameters, the model files {len(parameters)}")
    found: dict[str, OldMoments] = {}
    for number, state in first.states.items():
        name = parameters[number]
        whole = {side: _whole(role, ranks, number, side, name=name) for side in ("first", "second")}
        for side, tensor in whole.items():
            if tensor.shape != weights[name].shape:
                raise LayoutError(f"the {side} moment of parameter {number} has shape {tensor.shape}, but {name} has {weights[name].shape}")
        found[name] = OldMoments(first=whole["first"], second=whole["second"], update_count=_step(state))
    return found


def _whole(role: Role, ranks: Mapping[int, _RankState], number: int, side: str, *, name: str) -> LazyTensor:
    entries = {rank: entry for rank, state in ranks.items() if not isinstance(entry := state.states[number][side], int)}
    return assemble(f"the {side} moment of {name}", entries, where=str(role.path))


def _step(state: Mapping[str, Entry | int]) -> int:
    step = state["step"]
    assert isinstance(step, int)
    return step


def _from_units(
    role: Role, ranks: Mapping[int, _RankState], weights: Mapping[str, LazyTensor], parameters: Sequence[str]
) -> dict[str, OldMoments]:
    order = shard_order(role)
    units = _matching_units(ranks[order[0]], weights, parameters, num_shards=len(order))
    found: dict[str, OldMoments] = {}
    for number, state in ranks[order[0]].states.items():
        flat = {side: _joined_flat(role, ranks, order, number, side) for side in ("first", "second")}
        at = 0
        for name in units[number]:
            shape = weights[name].shape
            count = math.prod(shape)
            parts = {side: Unflattened(Rows(vector, ((at, at + count),)), shape) for side, vector in flat.items()}
            found[name] = OldMoments(first=parts["first"], second=parts["second"], update_count=_step(state))
            at += count
    return found


def _joined_flat(role: Role, ranks: Mapping[int, _RankState], order: Sequence[int], number: int, side: str) -> LazyTensor:
    parts: list[LazyTensor] = []
    for rank in order:
        entry = ranks[rank].states[number][side]
        if isinstance(entry, int | Distributed | Sharded) or len(entry.shape) != 1:
            raise DamagedFileError(f"{role.fsdp_files['optim'][rank]}: the state of unit {number} is no flat vector, but others are.")
        parts.append(entry)
    if len({(part.shape, part.dtype) for part in parts}) != 1:
        raise DamagedFileError(f"{role.path}: the shards of unit {number} differ in length or dtype: the files are not of one save.")
    return concatenated(parts, dim=0)


def _matching_units(state: _RankState, weights: Mapping[str, LazyTensor], parameters: Sequence[str], *, num_shards: int) -> list[list[str]]:
    """The first way of wrapping under which the number of units and every unit's length fit."""
    lengths = {n: entry.shape[0] for n, s in state.states.items() if not isinstance(entry := s["first"], int) and entry.shape}
    for candidate in _wrappings(parameters):
        sizes = [-(-sum(math.prod(weights[name].shape) for name in unit) // num_shards) for unit in candidate]
        if len(candidate) == state.num_parameters and all(n < len(sizes) and sizes[n] == length for n, length in lengths.items()):
            return candidate
    raise LayoutError(
        f"FSDP1's flat optimizer state has {state.num_parameters} units of {sorted(set(lengths.values()))[:6]} elements on each of "
        f"{num_shards} ranks, and no known way of wrapping the model's {len(parameters)} parameters gives these"
    )


def _wrappings(parameters: Sequence[str]) -> Iterable[list[list[str]]]:
    """Decoder layers as units, which was the default, or everything in one unit."""
    yield _by_layer(parameters)
    yield [list(parameters)]


def is_buffer(name: str) -> bool:
    """Whether a tensor of a model file is no parameter."""
    return _BUFFER.fullmatch(name) is not None


def _by_layer(names: Sequence[str]) -> list[list[str]]:
    """The root's own parameters, then each layer's, each followed by its trained leaves: the order in which units are met."""
    root: list[str] = []
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
    found = [root, *leaves.get("", [])]
    for layer, unit in units.items():
        found += [unit, *leaves.get(layer, [])]
    return found


def shard_order(role: Role) -> list[int]:
    """Ranks of one replica in the order of their shards, from the mesh of the model files; all ranks where no tensor has one."""
    places: dict[int, tuple[Shape, Shape]] = {}
    for rank, path in role.fsdp_files["model"].items():
        archive = Archive(path)
        value = archive.value()
        reader = TensorReader(archive, rank=rank)
        for node in value.values() if isinstance(value, dict) else ():
            if isinstance(node, Inert) and reader.is_tensor(node):
                entry = reader.entry(node, key="a weight")
                if isinstance(entry, Distributed) and entry.coordinate is not None and entry.mesh_shape is not None:
                    places[rank] = (entry.coordinate, entry.mesh_shape)
                    break
    if len(places) != len(role.fsdp_files["model"]):
        return sorted(role.fsdp_files["model"])
    replica = {rank: place for rank, (place, _) in places.items() if not any(place[:-1])}
    return sorted(replica, key=lambda rank: replica[rank][-1])
