"""Optimiser files of FSDP, one for each rank: states by the number of a parameter or a unit, as they were pickled."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from temper_legacy_shim.checkpoints.archive import Archive
from temper_legacy_shim.checkpoints.layouts import Role
from temper_legacy_shim.checkpoints.lazy import LazyTensor, Shape, concatenated, read_all
from temper_legacy_shim.checkpoints.pickles import Inert, in_short
from temper_legacy_shim.checkpoints.sharded import check_replica
from temper_legacy_shim.checkpoints.tensors import Distributed, Entry, Sharded, TensorReader
from temper_legacy_shim.errors import DamagedFileError, LayoutError

_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank's file."""

    states: Mapping[int, Mapping[str, Entry | int]]
    """By number: first, second (tensors) and step."""
    num_parameters: int
    """That its group numbers."""
    settings: Mapping[str, object]
    """Of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """What one rank's file says about its step."""

    steps: Mapping[int, int]
    """Updates by the number of a parameter or a unit."""
    settings: Mapping[str, object]
    """Of the first group."""
    form: frozenset[str]
    """Names of the first group's settings and of the file's records; newer torch has more of both."""


def read_counts(path: Path, *, rank: int) -> RankCounts:
    """Read update counts and settings of any optimizer's file; nothing of one that has no such form.

    Raises:
        DamagedFileError: the file is damaged.
    """
    archive = Archive(path)
    value = archive.value()
    states = value.get("state") if isinstance(value, dict) else None
    groups = value.get("param_groups") if isinstance(value, dict) else None
    group = groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], dict) else {}
    reader = TensorReader(archive, rank=rank)
    steps = {
        number: _count(reader, state["step"], key=f"step of {number}")
        for number, state in (states.items() if isinstance(states, dict) else ())
        if isinstance(number, int) and isinstance(state, dict) and "step" in state
    }
    return RankCounts(steps=steps, settings=_settings(group), form=archive.records.union(map(str, group)))


def _settings(group: Mapping[object, object]) -> dict[str, object]:
    return {name: group[name] for name in _SETTINGS if isinstance(group.get(name), int | float | tuple | list)}


def check_is_beside_weights(role: Role) -> None:
    """Optimiser files number parameters in the order of the model files.

    Raises:
        LayoutError: there are none, as where weights were saved as ``hf_model`` alone; for the receipt.
    """
    if "model" not in role.fsdp_files:
        raise LayoutError("the optimizer numbers its parameters in the order of model files, of which there are none beside it")


def read_ranks(role: Role) -> dict[int, RankState]:
    """Every rank's states by rank.

    Raises:
        LayoutError: no update was made, or the optimiser is not Adam; for the receipt.
        DamagedFileError: a file is damaged, or one is missing.
    """
    files = role.fsdp_files["optim"]
    if set(files) != set(role.fsdp_files["model"]):
        raise DamagedFileError(
            f"{role.path} has optim files of ranks {sorted(files)}, but model files of ranks {sorted(role.fsdp_files['model'])}: copy "
            "every rank's file here, or move the optim files away to carry weights alone."
        )
    ranks = {rank: _read(path, rank=rank) for rank, path in files.items()}
    if len({state.num_parameters for state in ranks.values()}) != 1:
        raise DamagedFileError(f"{role.path}: ranks have optimizer groups of different sizes: the files are not of one save.")
    if not numbers_of(ranks):
        raise LayoutError("the optimizer had made no update, so there are no moments")
    return ranks


def numbers_of(ranks: Mapping[int, RankState]) -> list[int]:
    """Numbers of which any rank has a state, ascending."""
    return sorted(set[int]().union(*(state.states for state in ranks.values())))


def check_same_numbers(role: Role, ranks: Mapping[int, RankState]) -> None:
    """Refuse ranks that keep states of different numbers.

    Raises:
        DamagedFileError: they do.
    """
    if len({frozenset(state.states) for state in ranks.values()}) != 1:
        raise DamagedFileError(f"{role.path}: ranks have optimizer states of different parameters: the files are not of one save.")


def is_distributed(ranks: Mapping[int, RankState]) -> bool:
    """Whether states are FSDP2's, which say where they belong."""
    return any(isinstance(state["first"], Distributed) for of_rank in ranks.values() for state in of_rank.states.values())


def _read(path: Path, *, rank: int) -> RankState:
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
    return RankState(states=states, num_parameters=len(groups[0]["params"]), settings=_settings(groups[0]))


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


def joined(role: Role, ranks: Mapping[int, RankState], order: Sequence[int], *, number: int, side: str) -> LazyTensor:
    """The vectors of one number, of the ranks that have it, end to end.

    Raises:
        DamagedFileError: one is no vector, or of another dtype.
    """
    parts = flat_parts(role, ranks, order, number=number, side=side)
    if len({part.dtype for part in parts}) != 1:
        raise DamagedFileError(f"{role.path}: the states of number {number} differ in dtype: the files are not of one save.")
    return concatenated(parts, dim=0)


def check_flat_replicas(role: Role, ranks: Mapping[int, RankState], order: Sequence[int]) -> None:
    """Refuse flat vectors that differ between hybrid sharding's replicas.

    Args:
        role: for errors.
        ranks: of all replicas.
        order: ranks of the first replica in the order of their shards; the others repeat it, as both FSDPs lay out their mesh.

    Raises:
        DamagedFileError: two ranks with the same shard hold different moments.
    """
    for rank, state in ranks.items():
        first = order[rank % len(order)]
        for number, sides in state.states.items() if rank != first else ():
            for side in ("first", "second"):
                mine, other = sides[side], ranks[first].states.get(number, {}).get(side)
                if isinstance(mine, int | Distributed | Sharded) or other is None or isinstance(other, int | Distributed | Sharded):
                    continue
                check_replica(f"the {side} moment of number {number}", {first: other, rank: mine}, where=str(role.path))


def flat_parts(role: Role, ranks: Mapping[int, RankState], order: Sequence[int], *, number: int, side: str) -> list[LazyTensor]:
    """The vectors of one number, of the ranks that have it.

    Raises:
        DamagedFileError: one is no vector.
    """
    parts: list[LazyTensor] = []
    for rank in order:
        state = ranks[rank].states.get(number)
        entry = None if state is None else state[side]
        if entry is None:
            continue
        if isinstance(entry, int | Distributed | Sharded) or len(entry.shape) != 1:
            raise DamagedFileError(f"{role.fsdp_files['optim'][rank]}: the state of unit {number} is no flat vector, but others are.")
        parts.append(entry)
    return parts


def step_of(ranks: Mapping[int, RankState], number: int) -> int:
    """Updates that a number has seen, as the first rank says that has it."""
    state = next(of_rank.states[number] for of_rank in ranks.values() if number in of_rank.states)
    step = state["step"]
    assert isinstance(step, int)
    return step


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
