"""Check that the files of a role are of one save.

The same torch wrote them, and they count the same steps.

Each node of a cluster may have kept its own ranks, perhaps of another step. The weights of such
files have the right shapes, so only the other files show it. Undetectable cases are listed on
the page about checkpoints.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from temper_legacy_shim.checkpoints.files.archive import Archive
from temper_legacy_shim.checkpoints.files.dtypes import to_float32
from temper_legacy_shim.checkpoints.files.lazy import Cast, LazyTensor, num_rows
from temper_legacy_shim.checkpoints.files.sharded import num_compared_rows
from temper_legacy_shim.checkpoints.layouts import Role, read_object
from temper_legacy_shim.checkpoints.rank_files import RankCounts, read_counts
from temper_legacy_shim.errors import DamagedFileError

_COMPARED_SETTINGS = ("lr", "initial_lr", "weight_decay")
_REMEDY = "the files are not of one save; copy every rank's file of one step here"


def check_one_save(role: Role) -> tuple[str, ...]:
    """Compare the torch versions and step counts of all ranks' FSDP files.

    Returns:
        A note for each optimizer file that is damaged: it could not be compared, and weights alone
        do not need it.

    Raises:
        DamagedFileError: two files differ; the message shows both and the values.
        UnsafeFileError: an optimizer file asks for a name that no checkpoint needs.
    """
    _check_num_ranks(role)
    for kind in ("model", "extra_state"):
        files = role.fsdp_files.get(kind, {})
        _check_same(
            files, {rank: Archive(path).records for rank, path in files.items()}, _other_torch
        )
    # The schedule steps once per RL step, so that it also tells steps apart that share update
    # counts.
    epochs = {
        rank: _last_epoch(path) for rank, path in role.fsdp_files.get("extra_state", {}).items()
    }
    _check_same(
        role.fsdp_files.get("extra_state", {}),
        epochs,
        lambda a, b: f"has last_epoch {a}, but {{}} {b}",
    )
    counts: dict[int, RankCounts] = {}
    notes = []
    for rank, path in role.fsdp_files.get("optim", {}).items():
        try:
            counts[rank] = read_counts(path, rank=rank)
        except DamagedFileError as error:
            notes.append(
                f"{path.name} was not compared with the others and can't be carried: {error}"
            )
    _check_counts(role.fsdp_files.get("optim", {}), counts)
    return tuple(notes)


def _check_num_ranks(role: Role) -> None:
    """Compare the number of ranks in fsdp_config.json with that in the names of the files."""
    path = role.path / "fsdp_config.json"
    if not path.is_file():  # releases before 0.4.1 wrote none
        return
    stated = read_object(path).get("world_size")
    num_ranks = len(role.fsdp_files.get("model", {}))
    if num_ranks and isinstance(stated, int) and stated != num_ranks:
        raise DamagedFileError(
            f"{path} says {stated} ranks, but the files are of {num_ranks}: {_REMEDY}."
        )


def _check_counts(files: Mapping[int, Path], counts: Mapping[int, RankCounts]) -> None:
    _check_same(files, {rank: result.form for rank, result in counts.items()}, _other_torch)
    for name in _COMPARED_SETTINGS:
        given = {rank: result.settings.get(name) for rank, result in counts.items()}
        _check_same(files, given, lambda a, b, name=name: f"has {name} {a}, but {{}} {b}")  # type: ignore[misc]
    # With use_orig_params a rank keeps only the parameters that lie in its shard.
    for number in sorted({number for result in counts.values() for number in result.steps}):
        steps = {
            rank: result.steps[number] for rank, result in counts.items() if number in result.steps
        }
        _check_same(
            files,
            steps,
            lambda a, b, number=number: (  # type: ignore[misc]
                f"has made {a} updates of parameter {number}, but {{}} {b}"
            ),
        )


def _other_torch(_: object, __: object) -> str:
    return "was written by another version of torch than {}"


def _check_same(
    files: Mapping[int, Path],
    given: Mapping[int, object],
    describe: Callable[[object, object], str],
) -> None:
    """Reject the first rank that differs from the lowest rank."""
    if not given:
        return
    first = min(given)
    for rank, value in sorted(given.items()):
        # The lowest rank is no better than the others, but one reference gives the shortest
        # message.
        if value != given[first]:
            raise DamagedFileError(
                f"{files[rank]} {describe(value, given[first]).format(files[first].name)}: "
                f"{_REMEDY}."
            )


def _last_epoch(path: Path) -> int | None:
    """Return the steps of the schedule; None if the file does not say them."""
    value = Archive(path).value()
    schedule = value.get("lr_scheduler") if isinstance(value, dict) else None
    epoch = schedule.get("last_epoch") if isinstance(schedule, dict) else None
    return epoch if isinstance(epoch, int) else None


def check_copy(
    tensors: Mapping[str, LazyTensor],
    copy: Mapping[str, LazyTensor],
    *,
    folder: Path,
    files: Path,
) -> None:
    """Compare tensors with a second copy of them, such as an exported model next to the ranks.

    The first rows of each tensor in both are compared, in the lower of the two precisions.

    Args:
        tensors: of the ranks' files.
        copy: under the same names.
        folder: of the copy, for errors.
        files: one of the ranks' files or their folder, for errors.

    Raises:
        DamagedFileError: a tensor differs.
    """
    for name in sorted(tensors.keys() & copy.keys()):
        if not _begins_equal(tensors[name], copy[name]):
            raise DamagedFileError(
                f"{folder} holds another {name} than {files}: they are not of one save; move the "
                "one of another step elsewhere."
            )


def _begins_equal(one: LazyTensor, other: LazyTensor) -> bool:
    # Megatron pads the vocabulary, so that the number of rows may differ.
    if one.shape[1:] != other.shape[1:] or len(one.shape) != len(other.shape):
        return False
    if not (one.dtype.is_float and other.dtype.is_float):
        return True
    rows = min(num_rows(one.shape), num_rows(other.shape), num_compared_rows(one))
    # bfloat16 and float16 round differently, so neither can be found from the other.
    if one.dtype != other.dtype and one.dtype.num_bytes == other.dtype.num_bytes:
        return True
    lower = min(one.dtype, other.dtype, key=lambda dtype: dtype.num_bytes)
    first, second = (
        to_float32((tensor if tensor.dtype == lower else Cast(tensor, lower)).read(0, rows), lower)
        for tensor in (one, other)
    )
    return np.array_equal(first, second, equal_nan=True)
