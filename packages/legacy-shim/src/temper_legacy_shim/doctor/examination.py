"""Find parts of an older system in a folder, and the migration step of each."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from temper_legacy_shim.doctor.script_steps import (
    is_script,
    makefile_steps,
    script_steps,
    task_file_steps,
    unreadable_steps,
)
from temper_legacy_shim.doctor.steps import (
    TASK_FILES,
    Effort,
    Kind,
    Step,
    damaged_step,
    effort_of,
    version_option,
)
from temper_legacy_shim.errors import ShimError, UsageError, format_extra_install
from temper_legacy_shim.imports.source_files import SKIPPED, is_copy
from temper_legacy_shim.scripts.makefiles import MAKEFILES
from temper_legacy_shim.scripts.script_reading import is_regular, read_bounded

if TYPE_CHECKING:
    from temper_legacy_shim.configs.reading.config_files import OldFile

_PINNED = re.compile(
    r"\bverl(?:\[[\w, -]+\])?\s*==\s*[\"']?v?(\d[\w.]*)|\bverl(?:\.git)?@v(\d[\w.]*)"
)
_WITH_PINS = re.compile(r"requirements[\w.-]*\.txt|pyproject\.toml|setup\.(?:py|cfg)|Dockerfile.*")
_STEP = re.compile(r"global_step_\d+")
_RANK_FILE = re.compile(r"model_world_size_\d+_rank_\d+\.pt")
_TRACKER = "latest_checkpointed_iteration.txt"


def examine(folder: Path, *, version: str | None = None) -> list[Step]:
    """Return the steps that move a project, in the order in which to take them.

    The order is configs, scripts, checkpoints, imports.

    Args:
        folder: of the project.
        version: the old release that its configurations and scripts are for; None takes the one
            that the project pins, or infers it for each from its keys.

    Raises:
        UsageError: the path is not a folder, or the release is unknown.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give the folder of an old project.")
    if version is not None:
        from temper_legacy_shim.configs.reading.trees import known_version

        known_version(version)
    is_given = version is not None
    pinned, pin = _pinned_release(folder) if version is None else (None, ())
    version = version or pinned
    configs: list[Path] = []
    scripts: list[Path] = []
    makefiles: list[Path] = []
    unreadable: list[Step] = []
    checkpoints: list[Step] = []
    releases: dict[Path, str] = {}
    copies: list[Path] = []
    for directory, names, files in _walk(folder):
        copies += [directory / name for name in names if is_copy(directory / name)]
        names[:] = [name for name in names if directory / name not in copies]
        checkpoint = _checkpoint(folder, directory, names, files)
        if checkpoint is not None:
            checkpoints.append(checkpoint)
            releases |= _releases(directory)
            names.clear()
            continue
        for name in files:
            path = directory / name
            if not is_regular(path):
                unreadable += unreadable_steps(folder, path)
            elif TASK_FILES.fullmatch(name):
                unreadable += task_file_steps(folder, path)
            elif path.suffix in (".yaml", ".yml"):
                configs.append(path)
            elif is_script(path):
                scripts.append(path)
            elif name in MAKEFILES or path.suffix == ".mk":
                makefiles.append(path)
    return [
        *pin,
        *unreadable,
        *_configs(folder, configs, version=version),
        *(
            step
            for path in scripts
            for step in script_steps(
                folder, path, version=version, releases={} if is_given else releases
            )
        ),
        *(step for path in makefiles for step in makefile_steps(folder, path)),
        *checkpoints,
        *_imports(folder),
        *(_copy(folder, path) for path in copies),
    ]


def _pinned_release(folder: Path) -> tuple[str | None, tuple[Step, ...]]:
    """Return the release the project requires, or a step if that is not known here."""
    from temper_legacy_shim.configs.reading.trees import known_version

    for path in sorted(folder.iterdir()):
        text = read_bounded(path) if _WITH_PINS.fullmatch(path.name) else None
        # A comment may name an earlier release; # in an address is no comment.
        code = re.sub(r"(?m)(?:^|\s)#.*", "", text or "")
        matches = list(_PINNED.finditer(code))
        if not matches:
            continue
        release = matches[-1][1] or matches[-1][2]
        try:
            return known_version(release), ()
        except UsageError as error:
            step = Step(
                kind=Kind.RELEASE,
                path=path.relative_to(folder),
                what=f"verl {release}",
                effort=Effort.DECIDE,
                blockers=(str(error),),
                command="temper-migrate doctor . --from-version RELEASE",
            )
            return None, (step,)
    return None, ()


def _copy(folder: Path, path: Path) -> Step:
    """Return the old package itself, as forks carry it along."""
    shown = path.relative_to(folder)
    left = (
        "what you changed in it has to be written again (a reward, a tool, an advantage, a loss of "
        "your own); the rest stays behind. Compare it with a checkout of its release, RELEASE, to "
        "see what you changed"
    )
    what = "a copy of the old package itself"
    return Step(
        kind=Kind.IMPORTS,
        path=shown,
        what=what,
        effort=Effort.REWRITE,
        blockers=(left,),
        command=f"diff -ru RELEASE/verl {shown}",
    )


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for directory, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        yield Path(directory), names, sorted(files)


def _configs(folder: Path, paths: list[Path], *, version: str | None) -> list[Step]:
    """Return the old configurations, without files that another one includes."""
    from temper_legacy_shim.configs.reading.config_files import drop_included_files, read_if_old

    result, damaged = [], []
    for path in paths:
        try:
            old = read_if_old(path)
        except ShimError as error:
            damaged.append(
                damaged_step(Kind.CONFIG, path.relative_to(folder), error, version=version)
            )
            continue
        result += [] if old is None or old.overrides else [old]
    return [
        *damaged,
        *(_config(folder, old, version=version) for old in drop_included_files(result)),
    ]


def _config(folder: Path, old: "OldFile", *, version: str | None) -> Step:
    from temper_legacy_shim.configs.reading.config_files import translate_file

    shown = old.path.relative_to(folder)
    try:
        translation = translate_file(old, version=version)
    except ShimError as error:
        return damaged_step(Kind.CONFIG, shown, error, version=version)
    effort, blockers = effort_of(translation)
    what = f"{translation.source.program} of {translation.source.version}"
    command = f"temper-migrate config {shown}{version_option(version)}"
    return Step(
        kind=Kind.CONFIG,
        path=shown,
        what=what,
        effort=effort,
        blockers=blockers,
        command=command,
        version=version,
    )


def _releases(directory: Path) -> dict[Path, str]:
    """Return the releases that may have written a checkpoint; empty if unknown."""
    try:
        from temper_legacy_shim.checkpoints.layouts import find_roles

        given = {role.version for role in find_roles(directory)}
    except (ImportError, ShimError):
        return {}  # _checkpoint reports both
    return {directory: given.pop()} if len(given) == 1 else {}


def _checkpoint(folder: Path, directory: Path, names: list[str], files: list[str]) -> Step | None:
    """Describe a run or step from file names, and from the content if possible."""
    is_run = _TRACKER in files or any(_STEP.fullmatch(name) for name in names)
    if not (is_run or any(_RANK_FILE.fullmatch(name) for name in files)):
        return None
    shown = directory.relative_to(folder)
    command = f"temper-migrate checkpoint {shown} --check"
    try:
        from temper_legacy_shim.checkpoints.layouts import find_roles
    except ImportError:
        hint = f"what it holds is not known: run {format_extra_install('checkpoint')}"
        return Step(
            kind=Kind.CHECKPOINT,
            path=shown,
            what="a checkpoint",
            effort=Effort.DECIDE,
            blockers=(hint,),
            command=command,
        )
    try:
        roles = find_roles(directory)
    except ShimError as error:
        return Step(
            kind=Kind.CHECKPOINT,
            path=shown,
            what="a checkpoint",
            effort=Effort.DECIDE,
            blockers=(str(error),),
            command=command,
        )
    what = "; ".join(
        f"{role.name}: {role.kind}, {role.world_size} ranks, {role.version}" for role in roles
    )
    blockers = tuple(
        f"{role.name} has no config.json: give --hf-config"
        for role in roles
        if role.described_in() is None
    )
    effort = Effort.DECIDE if blockers else Effort.NONE
    return Step(
        kind=Kind.CHECKPOINT,
        path=shown,
        what=what,
        effort=effort,
        blockers=blockers,
        command=command,
    )


def _imports(folder: Path) -> list[Step]:
    from temper_legacy_shim.imports.source_files import change_files

    out = []
    for change in change_files([folder], keeps_legacy=False):
        left = tuple(
            f"line {remark.line}: {remark.label}{remark.what_to_do}"
            for remark in change.remarks
            if remark.what_to_do
        )
        shown = change.path.relative_to(folder)
        what = f"{len(change.remarks)} old name{'s' * (len(change.remarks) != 1)}"
        effort = Effort.DECIDE if left else Effort.REVIEW
        out.append(
            Step(
                kind=Kind.IMPORTS,
                path=shown,
                what=what,
                effort=effort,
                blockers=left,
                command=f"temper-migrate imports {shown}",
            )
        )
    return out
