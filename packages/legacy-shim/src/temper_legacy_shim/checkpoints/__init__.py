"""Checkpoints of older systems: lazily readable, convertible, never executed.

The library behind ``temper-migrate checkpoint``. ``open_checkpoint`` gives lazy views of one model;
nothing is read until rows are asked for. Importing this needs no torch; ``training_state``
does.
"""

from pathlib import Path

from temper_legacy_shim.errors import LayoutError, explain_missing_extra

try:
    from temper_legacy_shim.checkpoints.conversion import convert
    from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, blocks, read_all
    from temper_legacy_shim.checkpoints.layouts import Kind, Role, find_roles
    from temper_legacy_shim.checkpoints.model import OldModel, Sources, merged, read_model
    from temper_legacy_shim.checkpoints.plan import Job, Options, plan_jobs
    from temper_legacy_shim.checkpoints.receipt import (
        Checked,
        Receipt,
        check_files,
        check_receipt,
        read_receipt,
    )
except ModuleNotFoundError as error:
    raise explain_missing_extra("checkpoints", "checkpoint", error) from None

__all__ = [
    "Checked",
    "Job",
    "Kind",
    "LazyTensor",
    "OldModel",
    "Options",
    "Receipt",
    "Role",
    "Sources",
    "blocks",
    "check_files",
    "check_receipt",
    "convert",
    "find_roles",
    "merged",
    "open_checkpoint",
    "plan_jobs",
    "read_all",
    "read_model",
    "read_receipt",
]


def open_checkpoint(
    path: str | Path,
    *,
    role: str | None = None,
    step: int | None = None,
    hf_config: Path | None = None,
    base_model: Path | None = None,
    lora_alpha: float | None = None,
    num_updates: int | None = None,
) -> OldModel:
    """Return a model of an old checkpoint, as lazy tensors with Hugging Face names.

    Args:
        path: a run, a step or a role directory.
        role: the role to read; required if there are several.
        step: of a run; its tracker's by default.
        hf_config: folder of config.json, for layouts that have none and need it.
        base_model: folder of the base, for checkpoints of an adapter alone.
        lora_alpha: of an adapter whose files do not say it.
        num_updates: that the optimizer had made, for files that do not say it (Megatron's per-rank
            ones).

    Raises:
        ShimError: a file is damaged; the message shows file and key.
    """
    roles = find_roles(path, step=step, role=role)
    if len(roles) > 1:
        raise LayoutError(
            f"{path} has roles {', '.join(each.name for each in roles)}: name one with role=."
        )
    return read_model(
        roles[0],
        Sources(
            hf_config=hf_config,
            base_model=base_model,
            lora_alpha=lora_alpha,
            num_updates=num_updates,
        ),
    )
