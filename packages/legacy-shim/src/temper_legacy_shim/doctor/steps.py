"""The steps of a plan, and how one is carried out into a new folder.

The old project is not changed.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from temper_legacy_shim.configs import Outcome, Translation
from temper_legacy_shim.configs.reading.config_files import read_old_file, translate_file
from temper_legacy_shim.configs.report import yaml_of
from temper_legacy_shim.errors import ShimError

TASK_FILES = re.compile(r"\.?justfile|taskfile(?:\.dist)?\.ya?ml", re.IGNORECASE)
"""Files of `just` and `task`, whose commands are not followed."""


class Kind(StrEnum):
    SCRIPT = "script"
    CONFIG = "config"
    CHECKPOINT = "checkpoint"
    IMPORTS = "imports"
    RELEASE = "release"
    """A required release of the old package that is not known here."""


class Effort(StrEnum):
    """Manual work in addition to the step's command."""

    NONE = "none"
    """Nothing: the result means the same."""
    REVIEW = "review"
    """Read the report: it has pinned defaults or hazards."""
    DECIDE = "decide"
    """Answer the blockers first."""
    REWRITE = "rewrite"
    """There is no counterpart: write it again, or leave it behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    kind: Kind
    path: Path
    """Relative to the folder that was examined."""
    what: str
    """Description in a few words."""
    effort: Effort
    blockers: tuple[str, ...]
    """Open decisions, one sentence each."""
    command: str
    version: str | None = None
    """Release of the step: given, pinned, or of a checkpoint next to it; None infers it."""


def effort_of(translation: Translation) -> tuple[Effort, tuple[str, ...]]:
    """Return the effort a translation's findings ask for, and the findings that block it."""
    blockers = tuple(
        finding.message for finding in translation.findings if finding.level == "person"
    )
    if not translation.settings:
        return Effort.REWRITE, blockers
    if translation.outcome is Outcome.PERSON:
        return Effort.DECIDE, blockers
    return (Effort.NONE if translation.outcome is Outcome.CLEAN else Effort.REVIEW), ()


def damaged_step(kind: Kind, shown: Path, error: ShimError, *, version: str | None) -> Step:
    command = f"temper-migrate {kind} {shown}{version_option(version)}"
    return Step(
        kind=kind,
        path=shown,
        what="not readable",
        effort=Effort.DECIDE,
        blockers=(str(error),),
        command=command,
    )


def version_option(version: str | None) -> str:
    return f" --from-version {version}" if version else ""


def target_of(step: Step, out: Path) -> Path:
    """Return the path that the step writes below the new folder."""
    if step.kind is Kind.IMPORTS:
        return out / step.path.with_name(step.path.name + ".diff")
    return out / (step.path if step.path != Path() else Path("checkpoint"))


def carry_out(step: Step, folder: Path, out: Path, *, version: str | None = None) -> str:
    """Execute one step.

    Args:
        step: of a plan of `folder`.
        folder: the old project; it is only read.
        out: the new folder.
        version: the version of the plan.

    Returns:
        The result, or the reason for skipping, in a sentence.

    Raises:
        ShimError: the step failed; the output of other steps stays.
    """
    target = target_of(step, out)
    if target.exists():
        return f"{target} exists already, and stays as it is"
    if TASK_FILES.fullmatch(step.path.name):
        return "its commands are not followed: nothing was written"
    if step.effort is Effort.REWRITE:
        return "there is no counterpart: nothing was written"
    match step.kind:
        case Kind.CONFIG:
            return _config(folder / step.path, target, version=step.version or version)
        case Kind.SCRIPT:
            return _script(folder / step.path, target, version=step.version or version)
        case Kind.CHECKPOINT:
            return _checkpoint(folder / step.path, target)
        case Kind.IMPORTS:
            return _imports(folder / step.path, target)
        case Kind.RELEASE:
            return "nothing is written for it"


def _config(path: Path, target: Path, *, version: str | None) -> str:
    translation = translate_file(read_old_file(path), version=version)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(yaml_of(translation), encoding="utf-8")
    return f"wrote {target}"


def _script(path: Path, target: Path, *, version: str | None) -> str:
    from temper_legacy_shim.scripts.launch_translation import Options
    from temper_legacy_shim.scripts.migrate import migrate_script

    text = path.read_bytes().decode("utf-8", errors="surrogateescape")
    migration = migrate_script(text, folder=path.parent, options=Options(version=version))
    if migration.script is None:
        return "it launches no old trainer: nothing was written"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(migration.script.text.encode("utf-8", errors="surrogateescape"))
    target.chmod(path.stat().st_mode & 0o777)
    return f"wrote {target}"


def _checkpoint(path: Path, target: Path) -> str:
    from temper_legacy_shim.checkpoints.conversion import convert
    from temper_legacy_shim.checkpoints.model import Sources
    from temper_legacy_shim.checkpoints.plan import Options, plan_jobs

    receipts = [convert(job, Options(target="hf"), Sources()) for job in plan_jobs(path, target)]
    return f"wrote {target}: {sum(receipt.num_tensors for receipt in receipts)} tensors, verified"


def _imports(path: Path, target: Path) -> str:
    from temper_legacy_shim.imports.source_files import change_files

    changes = change_files([path], keeps_legacy=False)
    diff = "".join(change.diff() for change in changes)
    if not diff:
        return "no old name has a successor: nothing was written"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(diff.encode("utf-8", errors="surrogateescape"))
    return f"wrote {target}; `temper-migrate imports {path} --write` applies it"
