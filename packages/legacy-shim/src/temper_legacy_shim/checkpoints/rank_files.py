"""Read FSDP weights lazily from the files of all ranks, and join shards by key."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from temper_legacy_shim.checkpoints.files.archive import Archive
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, Shape, concatenated, read_all
from temper_legacy_shim.checkpoints.files.pickles import Inert, abbreviate
from temper_legacy_shim.checkpoints.files.sharded import assemble, check_replica
from temper_legacy_shim.checkpoints.files.tensors import Distributed, Entry, Sharded, TensorReader
from temper_legacy_shim.checkpoints.layouts import Role
from temper_legacy_shim.errors import DamagedFileError, LayoutError

# Names of the modules that FSDP1, activation checkpointing and torch.compile put around others.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def read_weights(files: dict[int, Path], *, where: Path) -> dict[str, LazyTensor]:
    """Read all tensors of a model by name, with the prefixes of wrappers removed.

    Args:
        files: model files by rank.
        where: the directory, for errors.

    Raises:
        DamagedFileError: a file is damaged, or the files are not of one save.
    """
    by_key: dict[str, dict[int, Entry]] = {}
    forms: dict[int, tuple[str, ...]] = {}
    for rank, path in files.items():
        of_rank, forms[rank] = _entries(path, rank=rank)
        for key, entry in of_rank.items():
            by_key.setdefault(key, {})[rank] = entry
        # One save is written by one version of torch. Versions differ in how they pickle a mesh,
        # which reveals a file of another run even if all shapes fit.
        if forms[rank] != forms[min(forms)]:
            raise DamagedFileError(
                f"{path} was written by another version of torch than {files[min(forms)].name}: "
                "the files are not of one save; copy every rank's file of one step here."
            )
    for key, entries in by_key.items():
        absent = sorted(set(files) - set(entries))
        if absent:
            raise DamagedFileError(
                f"{files[absent[0]]} has no {key}, which rank {min(entries)} has: the files are "
                "not of one save."
            )
    return {key: assemble(key, entries, where=str(where)) for key, entries in by_key.items()}


def _entries(path: Path, *, rank: int) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return a file's entries by name, and the form in which its torch pickled them."""
    archive = Archive(path)
    value = archive.value()
    if not isinstance(value, dict):
        raise DamagedFileError(
            f"{path} holds a {type(value).__name__} instead of a mapping of names to tensors: is "
            "it a model file?"
        )
    reader = TensorReader(archive, rank=rank)
    result: dict[str, Entry] = {}
    form: tuple[str, ...] = ()
    for key, node in value.items():
        if not isinstance(key, str):
            raise DamagedFileError(
                f"{path}: {abbreviate(key)} is no name of a tensor: is it a model file?"
            )
        if not reader.is_tensor(node):
            continue  # such as the extra state of a module
        name = key
        # Not only as a prefix: each wrapped submodule adds one inside the name.
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if name in result:
            raise DamagedFileError(
                f"{path} has {name} twice, once inside a wrapper's name: which one counts can't be "
                "known."
            )
        result[name] = reader.entry(node, key=key)
        form = form or reader.distributed_form(node)
    if not result:
        raise DamagedFileError(f"{path} holds no tensor: is it a model file?")
    return result, form


# The schedule changes lr at each step, so that lr also tells files of different steps apart.
_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank's file."""

    states: Mapping[int, Mapping[str, Entry | int]]
    """States by number: first, second (tensors) and step."""
    num_parameters: int
    settings: Mapping[str, object]
    """Settings of the first parameter group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Step counts in one rank's files."""

    steps: Mapping[int, int]
    """Updates by the number of a parameter or a unit."""
    settings: Mapping[str, object]
    """Settings of the first parameter group."""
    form: frozenset[str]
    """Names of the first group's settings and the file's records, which torch extends."""


def read_counts(path: Path, *, rank: int) -> RankCounts:
    """Read update counts and settings of any optimizer's file.

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
    return RankCounts(
        steps=steps, settings=_settings(group), form=archive.records.union(map(str, group))
    )


def _settings(group: Mapping[object, object]) -> dict[str, object]:
    return {
        name: group[name]
        for name in _SETTINGS
        if isinstance(group.get(name), int | float | tuple | list)
    }


def check_is_next_to_weights(role: Role) -> None:
    """Check that optimizer files lie next to model files, whose order numbers their parameters.

    Raises:
        LayoutError: there are none, as where weights were saved as ``hf_model`` alone; for the
            receipt.
    """
    if "model" not in role.fsdp_files:
        raise LayoutError(
            "the optimizer numbers its parameters in the order of model files, of which there are "
            "none next to it"
        )


def read_ranks(role: Role) -> dict[int, RankState]:
    """Return every rank's states by rank.

    Raises:
        LayoutError: no update was made, or the optimizer is not Adam; for the receipt.
        DamagedFileError: a file is damaged, or one is missing.
    """
    files = role.fsdp_files["optim"]
    if set(files) != set(role.fsdp_files["model"]):
        raise DamagedFileError(
            f"{role.path} has optim files of ranks {sorted(files)}, but model files of ranks "
            f"{sorted(role.fsdp_files['model'])}: copy "
            "every rank's file here, or move the optim files away to carry weights alone."
        )
    ranks = {rank: _read(path, rank=rank) for rank, path in files.items()}
    if len({state.num_parameters for state in ranks.values()}) != 1:
        raise DamagedFileError(
            f"{role.path}: ranks have optimizer groups of different sizes: the files are not of "
            "one save."
        )
    if not numbers_of(ranks):
        raise LayoutError("the optimizer had made no update, so there are no moments")
    return ranks


def numbers_of(ranks: Mapping[int, RankState]) -> list[int]:
    """Return the parameter numbers with a state on any rank, ascending."""
    return sorted(set[int]().union(*(state.states for state in ranks.values())))


def check_same_numbers(role: Role, ranks: Mapping[int, RankState]) -> None:
    """Refuse ranks that keep states of different numbers.

    Raises:
        DamagedFileError: they do.
    """
    if len({frozenset(state.states) for state in ranks.values()}) != 1:
        raise DamagedFileError(
            f"{role.path}: ranks have optimizer states of different parameters: the files are not "
            "of one save."
        )


def is_distributed(ranks: Mapping[int, RankState]) -> bool:
    """Check if states are FSDP2's, which include positions."""
    return any(
        isinstance(state["first"], Distributed)
        for of_rank in ranks.values()
        for state in of_rank.states.values()
    )


def _read(path: Path, *, rank: int) -> RankState:
    """Read the optimizer file of one rank, which numbers the parameters and does not name them."""
    archive = Archive(path)
    value = archive.value()
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("state"), dict)
        or not isinstance(value.get("param_groups"), list)
    ):
        raise DamagedFileError(
            f"{path} is no state of an optimizer: it lacks state or param_groups."
        )
    reader = TensorReader(archive, rank=rank)
    groups = value["param_groups"]
    if (
        len(groups) != 1
        or not isinstance(groups[0], dict)
        or not isinstance(groups[0].get("params"), list)
    ):
        raise LayoutError(f"{path.name} has {len(groups)} parameter groups, but one is expected")
    states: dict[int, Mapping[str, Entry | int]] = {}
    for number, state in value["state"].items():
        if not isinstance(number, int) or not isinstance(state, dict):
            raise DamagedFileError(
                f"{path}: the state of {abbreviate(number)} is none of a numbered parameter."
            )
        if not {"exp_avg", "exp_avg_sq", "step"} <= state.keys():
            raise LayoutError(
                f"{path.name} is of an optimizer that keeps {sorted(map(abbreviate, state))}, not "
                "Adam's moments"
            )
        states[number] = {
            "first": reader.entry(state["exp_avg"], key=f"exp_avg of {number}"),
            "second": reader.entry(state["exp_avg_sq"], key=f"exp_avg_sq of {number}"),
            "step": _count(reader, state["step"], key=f"step of {number}"),
        }
    return RankState(
        states=states, num_parameters=len(groups[0]["params"]), settings=_settings(groups[0])
    )


def _count(reader: TensorReader, node: object, *, key: str) -> int:
    # torch's Adam keeps the count as a tensor of float32, older versions and Megatron as a number.
    if isinstance(node, int | float):
        value = float(node)
    else:
        entry = reader.entry(node, key=key)
        tensor = entry.local if isinstance(entry, Distributed) else entry
        if isinstance(tensor, Sharded) or math.prod(tensor.shape) != 1:
            raise DamagedFileError(f"{reader.archive.path}: {key} is no number.")
        value = float(read_all(tensor).reshape(-1)[0])
    # Floats represent every integer only up to 2**53; adding 1 to a larger count would not change
    # it.
    if not 0 <= value < 2**53:
        raise DamagedFileError(
            f"{reader.archive.path}: {key} is {value}, which is no count of updates."
        )
    return int(value)


def joined(
    role: Role, ranks: Mapping[int, RankState], order: Sequence[int], *, number: int, side: str
) -> LazyTensor:
    """Return the vectors of one number, of the ranks that have it, end to end.

    Raises:
        DamagedFileError: a shard is not a vector, or has a different dtype.
    """
    parts = flat_parts(role, ranks, order, number=number, side=side)
    if len({part.dtype for part in parts}) != 1:
        raise DamagedFileError(
            f"{role.path}: the states of number {number} differ in dtype: the files are not of one "
            "save."
        )
    return concatenated(parts, dim=0)


def check_flat_replicas(role: Role, ranks: Mapping[int, RankState], order: Sequence[int]) -> None:
    """Refuse flat vectors that differ between hybrid sharding's replicas.

    Args:
        role: for errors.
        ranks: of all replicas.
        order: ranks of the first replica in the order of their shards; the others repeat it, as
            both FSDPs lay out their mesh.

    Raises:
        DamagedFileError: two ranks with the same shard hold different moments.
    """
    for rank, state in ranks.items():
        first = order[rank % len(order)]
        for number, sides in state.states.items() if rank != first else ():
            for side in ("first", "second"):
                own, other = sides[side], ranks[first].states.get(number, {}).get(side)
                if (
                    isinstance(own, int | Distributed | Sharded)
                    or other is None
                    or isinstance(other, int | Distributed | Sharded)
                ):
                    continue
                check_replica(
                    f"the {side} moment of number {number}",
                    {first: other, rank: own},
                    where=str(role.path),
                )


def flat_parts(
    role: Role, ranks: Mapping[int, RankState], order: Sequence[int], *, number: int, side: str
) -> list[LazyTensor]:
    """Return the vectors of one number, of the ranks that have it.

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
            raise DamagedFileError(
                f"{role.fsdp_files['optim'][rank]}: the state of unit {number} is no flat vector, "
                "but others are."
            )
        parts.append(entry)
    return parts


def step_of(ranks: Mapping[int, RankState], number: int) -> int:
    """Return the updates of a parameter number, from the first rank that stores it."""
    state = next(of_rank.states[number] for of_rank in ranks.values() if number in of_rank.states)
    step = state["step"]
    assert isinstance(step, int)
    return step


def shard_order(role: Role) -> list[int]:
    """Return a replica's ranks in shard order; all ranks without a mesh."""
    positions: dict[int, tuple[Shape, Shape]] = {}
    for rank, path in role.fsdp_files["model"].items():
        archive = Archive(path)
        value = archive.value()
        reader = TensorReader(archive, rank=rank)
        for node in value.values() if isinstance(value, dict) else ():
            if isinstance(node, Inert) and reader.is_tensor(node):
                entry = reader.entry(node, key="a weight")
                if (
                    isinstance(entry, Distributed)
                    and entry.coordinate is not None
                    and entry.mesh_shape is not None
                ):
                    positions[rank] = (entry.coordinate, entry.mesh_shape)
                    break
    if len(positions) != len(role.fsdp_files["model"]):
        return sorted(role.fsdp_files["model"])
    # With hybrid sharding the first mesh axis numbers the replicas and the last one the shards.
    replica = {
        rank: position for rank, (position, _) in positions.items() if not any(position[:-1])
    }
    return sorted(replica, key=lambda rank: replica[rank][-1])
