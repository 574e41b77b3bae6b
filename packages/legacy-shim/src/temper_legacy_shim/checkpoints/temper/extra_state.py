"""Read schedule, random states and data cursor of old checkpoints, without executing them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from temper_legacy_shim.checkpoints.files.archive import Archive
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor
from temper_legacy_shim.checkpoints.files.tensors import TensorReader
from temper_legacy_shim.checkpoints.layouts import Role
from temper_legacy_shim.errors import ShimError, UnsafeFileError

_LOADER = "torch.utils.data.dataloader.DataLoader"
"""Class that 0.2 pickled, which such a pickle requests first."""
_CURSOR = ("_num_yielded", "_sampler_iter_yielded", "_iterator_finished", "_snapshot_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class OldExtra:
    """State in addition to weights and optimizer."""

    num_schedule_steps: int | None = None
    """Steps that the learning-rate schedule has made; None where no file says it."""
    random_states: Mapping[int, Mapping[str, LazyTensor]] = field(default_factory=dict)
    """torch's generators by rank and device (cpu, cuda), as bytes."""
    carried: tuple[str, ...] = ()
    not_carried: tuple[str, ...] = ()


def read_extra(role: Role) -> OldExtra:
    """Load the extra files of a role and the data files of the step.

    Raises:
        ShimError: a file is damaged; content an engine cannot use is only reported.
    """
    steps = _megatron_steps(role)
    random_states: dict[int, Mapping[str, LazyTensor]] = {}
    for rank, path in role.fsdp_files.get("extra_state", {}).items():
        archive = Archive(path)
        value = archive.value()
        if not isinstance(value, dict):
            continue
        schedule, states = value.get("lr_scheduler"), value.get("rng")
        if isinstance(schedule, dict) and isinstance(schedule.get("last_epoch"), int):
            steps.add(schedule["last_epoch"])
        if isinstance(states, dict):
            reader = TensorReader(archive, rank=rank)
            result = {
                d: reader.plain(states[d], key=f"rng of {d}")
                for d in ("cpu", "cuda")
                if reader.is_tensor(states.get(d))
            }
            if result:
                random_states[rank] = result
    carried: list[str] = []
    left: list[str] = []
    # Several counts contradict each other, and none of them is better than the number of updates.
    if len(steps) == 1:
        carried.append(
            f"the schedule's counter ({next(iter(steps))} steps; its shape is the new "
            "configuration's)"
        )
    elif steps or role.fsdp_files.get("extra_state") or role.dist_folders or role.rank_files:
        left.append(
            f"schedule: the files say {sorted(steps) or 'nothing'} about its steps, so that it "
            "goes on from the number of updates"
        )
    if random_states:
        carried.append(f"torch's random-number states of {len(random_states)} ranks")
        left.append(
            "random-number states of numpy and Python: engines and trainer draw from seeds and "
            "counters, and keep none"
        )
    if _has_megatron_random_states(role):
        left.append(
            "random-number states of Megatron: they belong to its own parallel ranks, and engines "
            "draw from seeds and counters"
        )
    left += [*_data_cursors(role)]
    return OldExtra(
        num_schedule_steps=next(iter(steps)) if len(steps) == 1 else None,
        random_states=random_states,
        carried=tuple(carried),
        not_carried=tuple(left),
    )


def _megatron_steps(role: Role) -> set[int]:
    """Read the step counts of Megatron's schedule, in ``common.pt`` since 0.4.1."""
    steps: set[int] = set()
    for path in [folder / "common.pt" for folder in role.dist_folders] + sorted(
        role.path.glob("*/*scheduler*.pt")
    ):
        value = Archive(path).value() if path.is_file() else None
        schedule = value.get("lr_scheduler", value) if isinstance(value, dict) else None
        if isinstance(schedule, dict) and isinstance(schedule.get("num_steps"), int):
            steps.add(schedule["num_steps"])
    return steps


def _has_megatron_random_states(role: Role) -> bool:
    if any((role.path / "rng_states").glob("*.pt")):
        return True
    return any(
        name.startswith("rng_state")
        for folder in role.dist_folders
        for name in DistCheckpoint(folder).other_names
    )


def _data_cursors(role: Role) -> list[str]:
    """Return a sentence for each file of the data loader.

    The trainer orders its data in another way, so only the count can be told.

    Raises:
        UnsafeFileError: one asks for something else than a data loader.
    """
    if role.step_directory is None:
        return []
    files = sorted(path for path in role.step_directory.glob("data*.pt") if path.is_file())
    return [_cursor(path) for path in files]


def _cursor(path: Path) -> str:
    begin = (
        "data cursor: the new trainer orders data by (seed, epoch), so an old position has no equal"
    )
    try:
        value = Archive(path).value()
    except UnsafeFileError as error:
        # A file that only pretends to hold a data loader could hide anything behind that name, so
        # the error stands.
        if error.expected != _LOADER:
            raise
        return (
            f"{begin}; {path.name} is a pickled data loader, which is neither executed nor read on"
        )
    except ShimError as error:
        return f"{begin}; {error}"
    given = (
        {name: value[name] for name in _CURSOR if name in value} if isinstance(value, dict) else {}
    )
    return (
        f"{begin}; {path.name} says "
        f"{', '.join(f'{name} = {count}' for name, count in given.items()) or 'nothing of use'}"
    )
