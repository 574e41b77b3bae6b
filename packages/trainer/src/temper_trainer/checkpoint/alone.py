"""Checkpoints without a trainer's part: what engines saved alone, or what an old run was converted to (``temper-migrate checkpoint``)."""

from collections.abc import Mapping
from pathlib import Path

from temper_engine_api.checkpoint import ENGINE_PART, complete_steps, find_step
from temper_engine_api.checkpoint.manifest import read_manifest
from temper_engine_api.errors import CheckpointError, IncompleteCheckpointError


def steps_alone(path: Path) -> dict[str, Path]:
    """Step directories of engines alone, by role; empty for anything else, such as a run's own checkpoint.

    Args:
        path: a step directory or a folder of them, which is the actor's, or a folder with such a one for each role.
    """
    try:
        found = {"actor": find_step(path)}
    except IncompleteCheckpointError:
        children = sorted(path.iterdir()) if path.is_dir() else []
        found = {child.name: find_step(child) for child in children if complete_steps(child)}
    return found if all((step / ENGINE_PART).is_dir() for step in found.values()) else {}


def step_of(steps: Mapping[str, Path]) -> int:
    """The step that all roles are of, as their manifests say.

    Raises:
        CheckpointError: they are of different steps.
        DamagedCheckpointError: a manifest is damaged.
    """
    numbers = {name: read_manifest(directory).step for name, directory in steps.items()}
    if len(set(numbers.values())) != 1:
        said = ", ".join(f"{name} of step {step}" for name, step in numbers.items())
        folder = next(iter(steps.values())).parent.parent
        raise CheckpointError(
            f"{folder} holds {said}: convert all roles of one step, or move the others away."
        )
    return next(iter(numbers.values()))
