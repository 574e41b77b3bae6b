"""Read what a step directory contains: its parts, its step and the trainer's state."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from temper_engine_api.checkpoint import ENGINE_PART, find_step, list_complete_steps
from temper_engine_api.checkpoint.manifest import check_file, read_manifest
from temper_engine_api.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)
from temper_trainer.checkpoint.trainer_state import TrainerState

STATE_FILE = "state.json"
TRAINER_PART = "trainer"


def find_engine_checkpoints(path: Path) -> dict[str, Path]:
    """Return the step directories of an engine-only checkpoint by role.

    Args:
        path: A step directory of the actor, a folder of such directories, or a folder that contains
            one or the other for each role.

    Returns:
        Empty for anything else, such as a checkpoint with trainer state.
    """
    try:
        steps = {"actor": find_step(path)}
    except IncompleteCheckpointError:
        children = sorted(path.iterdir()) if path.is_dir() else []
        steps = {child.name: find_step(child) for child in children if list_complete_steps(child)}
    return steps if all((step / ENGINE_PART).is_dir() for step in steps.values()) else {}


def find_role_parts(checkpoint: Path, roles: Iterable[str]) -> dict[str, Path]:
    """Return the directories from which a resumed run reads its roles.

    Args:
        checkpoint: A step directory, or an engine-only checkpoint.
        roles: Roles of the run.

    Raises:
        CheckpointError: If the checkpoint lacks one of them.
    """
    engine_checkpoints = find_engine_checkpoints(checkpoint)
    parts = {}
    for name in roles:
        # Engine-only checkpoints have no reference: it is not trained, so its initial weights are
        # already the right ones.
        if engine_checkpoints and name == "ref":
            continue
        parts[name] = (
            engine_checkpoints[name] / ENGINE_PART
            if name in engine_checkpoints
            else checkpoint / name
        )
        if not parts[name].is_dir():
            raise CheckpointError(
                f"{checkpoint} has no part for {name}, which this configuration has: resume with "
                "the configuration of the run that wrote it."
            )
    return parts


def read_common_step(checkpoints: Mapping[str, Path]) -> int:
    """Return the step of an engine-only checkpoint.

    Args:
        checkpoints: Step directories by role; at least one.

    Raises:
        CheckpointError: If they are of different steps.
    """
    steps = {role: read_manifest(directory).step for role, directory in checkpoints.items()}
    if len(set(steps.values())) != 1:
        listed = ", ".join(f"{role} of step {step}" for role, step in steps.items())
        folder = next(iter(checkpoints.values())).parent.parent
        raise CheckpointError(
            f"{folder} has {listed}: convert all roles of one step, or move the others away."
        )
    return next(iter(steps.values()))


def list_restored_parts(checkpoint: Path) -> set[str]:
    """Return the parts of a checkpoint that a resume reads: roles, and the trainer's part."""
    if engine_checkpoints := find_engine_checkpoints(checkpoint):
        # See `find_role_parts`.
        return engine_checkpoints.keys() - {"ref"}
    return {path.name for path in checkpoint.iterdir() if path.is_dir()}


def read_tokenizer_digest(checkpoint: Path) -> str | None:
    """Return the tokenizer digest from a step directory; None if it records none.

    Checkpoints of older versions and engine-only checkpoints record none.

    Raises:
        DamagedCheckpointError: If the trainer's part is damaged.
    """
    path = checkpoint / TRAINER_PART / STATE_FILE
    return TrainerState.from_json(path.read_bytes()).tokenizer_digest if path.is_file() else None


def check_step(directory: Path, *, step: int) -> None:
    """Check that a step directory was not copied or renamed from another step.

    Raises:
        DamagedCheckpointError: If its manifest has another step.
    """
    actual = read_manifest(directory).step
    if actual != step:
        raise DamagedCheckpointError(f"its manifest is of step {actual}")


def check_trainer_state(directory: Path) -> None:
    """Compare the checksum of the trainer's state, a file of about 1 kB, with the manifest.

    Raises:
        DamagedCheckpointError: If the content has changed, or its disk fails to read it.
        CheckpointError: If it cannot be read, for example for lack of permission.
    """
    for record in read_manifest(directory).files:
        if record.path == f"{TRAINER_PART}/{STATE_FILE}":
            check_file(directory, record, with_content=True)
