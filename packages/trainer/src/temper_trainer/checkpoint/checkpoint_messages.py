"""Messages about the checkpoints of a run: when it saves, what it keeps, what was saved last."""

from pathlib import Path

from temper_engine_api.checkpoint import list_complete_steps, step_directory, verify
from temper_engine_api.checkpoint.manifest import read_manifest
from temper_engine_api.errors import CheckpointError
from temper_trainer.checkpoint.checkpointer import Checkpointer
from temper_trainer.config.run import RunConfig


def describe_policy(run: RunConfig) -> str:
    """Return a line that says when a run saves and which checkpoints it keeps.

    Example:
        >>> describe_policy(RunConfig(save_every=10, save_interval_s=1800.0, max_ckpt_to_keep=None))
        'checkpoints: saved every 30 min, every 10 steps and at the end; all are kept'
    """
    steps = "step" if run.save_every == 1 else f"{run.save_every} steps"
    occasions = [] if run.save_interval_s is None else [f"every {_format_s(run.save_interval_s)}"]
    occasions += [f"every {steps}"] if run.save_every else []
    times = f"{', '.join(occasions)}{' and ' if occasions else ''}at the end"
    return f"checkpoints: saved {times}; {describe_retention(run)}"


def _format_s(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"


def describe_retention(run: RunConfig) -> str:
    """Return which checkpoints a run keeps, formatted to end a line."""
    if run.max_ckpt_to_keep is None:
        return "all are kept"
    permanent = f" and every {run.keep_every}th step" if run.keep_every else ""
    if run.max_ckpt_to_keep == 1:
        newest, verb = "the newest verified one", "are" if permanent else "is"
    else:
        newest, verb = f"the newest {run.max_ckpt_to_keep} verified ones", "are"
    return f"{newest}{permanent} {verb} kept, older ones that this run wrote are deleted"


def describe_deletion(checkpointer: Checkpointer) -> str | None:
    """Return a warning if the next save would delete several checkpoints, else None.

    Every save deletes the checkpoint that it replaces. More are deleted only if
    ``run.max_ckpt_to_keep`` was lowered since the last start.
    """
    root, max_to_keep = checkpointer.root, checkpointer.max_to_keep
    every = checkpointer.keep_every
    if max_to_keep is None:
        return None
    own_steps = [
        step
        for step in list_complete_steps(root)
        if _read_run_id(step_directory(root, step)) == checkpointer.run_id
    ]
    # Plus one, because the next save is itself among the newest ones.
    num_excess = max(0, len(own_steps) + 1 - max_to_keep)
    deleted = [step for step in own_steps[:num_excess] if not (every and step % every == 0)]
    if len(deleted) < 2:
        return None
    return (
        f"WARNING: the next save deletes {len(deleted)} older checkpoints in {root}, because "
        f"run.max_ckpt_to_keep is {max_to_keep}: raise it to keep them."
    )


def _read_run_id(directory: Path) -> str | None:
    try:
        return read_manifest(directory).info.run_id
    except CheckpointError:
        return ""  # no run has this id: a checkpoint without a readable manifest is never deleted


NOTHING_SAVED = "No checkpoint of this run was saved yet: run.resume=auto would start at step 1."


def describe_last_save(
    root: Path, *, warm_start: Path | None = None, needs_correction: bool = False
) -> str:
    """Return from which step a failed run can be resumed, or that no step is saved.

    Args:
        root: Folder of the run's step directories.
        warm_start: Folder of the warm start's step directories, if the run has a warm start.
        needs_correction: True if the same command would fail again with the same error.
    """
    if not needs_correction:
        return find_last_save(root, warm_start=warm_start) or NOTHING_SAVED
    newest = _describe_newest_save(root, warm_start=warm_start)
    if newest is None:
        saved, then = "No checkpoint of this run was saved yet", "run.resume=auto starts at step 1"
    else:
        saved, then = newest, "continue with run.resume=auto"
    return f"{saved}: correct what the error names first, then {then}."


def find_last_save(root: Path, *, warm_start: Path | None = None) -> str | None:
    """Return from which step a failed run can be resumed; None if nothing was saved."""
    newest = _describe_newest_save(root, warm_start=warm_start)
    return None if newest is None else f"{newest}: continue with run.resume=auto."


def _describe_newest_save(root: Path, *, warm_start: Path | None) -> str | None:
    for folder, prefix in ((root, ""), (warm_start, "warm start: ")):
        for step in reversed([] if folder is None else list_complete_steps(folder)):
            directory = step_directory(folder or root, step)
            try:
                # Sizes only: hashing gigabytes would delay the error message.
                verify(directory, with_content=False)
            except CheckpointError:
                continue  # a resume renames it and uses the one before
            return f"{prefix}step {step} is saved in {directory}"
    return None
