"""Find parts of an older system in a folder, and the migration step of each."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from temper_legacy_shim.configs import Outcome, Translation
from temper_legacy_shim.errors import ShimError, UsageError, format_extra_install
from temper_legacy_shim.imports.source_files import SKIPPED, is_copy
from temper_legacy_shim.scripts.makefiles import MAKEFILES
from temper_legacy_shim.scripts.script_reading import is_regular, read_bounded, read_start

if TYPE_CHECKING:
    from temper_legacy_shim.configs.reading.config_files import OldFile

_SCRIPT_SUFFIXES = frozenset(
    (*(".sh", ".bash", ".zsh", ".ksh"), *(".slurm", ".sbatch", ".job", ".pbs", ".lsf", ".qsub"))
)
_OTHER_SUFFIXES = frozenset(
    (
        *(".py", ".pyc", ".ipynb", ".md", ".rst", ".txt", ".json", ".jsonl", ".toml", ".cfg"),
        *(".pt", ".pth", ".bin", ".safetensors", ".parquet", ".arrow", ".npy", ".npz", ".gz"),
        *(".zip", ".tar", ".so", ".png", ".jpg", ".jpeg", ".pdf", ".csv", ".html", ".log"),
    )
)
"""Suffixes of files that are not opened to look for a shell in their first line."""
_SHEBANG = re.compile(rb"#!\s*\S*?(?:/env\s+)?(?:ba|z|k|da)?sh\b")
TASK_FILES = re.compile(r"\.?justfile|taskfile(?:\.dist)?\.ya?ml", re.IGNORECASE)
"""Files of `just` and `task`, whose commands are not followed."""
_PINNED = re.compile(
    r"\bverl(?:\[[\w, -]+\])?\s*==\s*[\"']?v?(\d[\w.]*)|\bverl(?:\.git)?@v(\d[\w.]*)"
)
_WITH_PINS = re.compile(r"requirements[\w.-]*\.txt|pyproject\.toml|setup\.(?:py|cfg)|Dockerfile.*")
_STEP = re.compile(r"global_step_\d+")
_RANK_FILE = re.compile(r"model_world_size_\d+_rank_\d+\.pt")
_RANGE = re.compile(r"(?P<first>\d[\d.]*)(?: to (?P<last>\d[\d.]*)|(?P<newer> or newer))?")
"""Pattern of ``Role.version``, the releases that a checkpoint's layout allows."""
_TRACKER = "latest_checkpointed_iteration.txt"


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
                unreadable += _unreadable(folder, path)
            elif TASK_FILES.fullmatch(name):
                unreadable += _task_file(folder, path)
            elif path.suffix in (".yaml", ".yml"):
                configs.append(path)
            elif _is_script(path):
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
            for step in _script(
                folder, path, version=version, releases={} if is_given else releases
            )
        ),
        *(step for path in makefiles for step in _makefile(folder, path)),
        *checkpoints,
        *_imports(folder),
        *(_copy(folder, path) for path in copies),
    ]


def _is_script(path: Path) -> bool:
    """Check for a shell script or job file, by its suffix, or by its first line."""
    if path.suffix in _SCRIPT_SUFFIXES:
        return True
    if path.suffix.lower() in _OTHER_SUFFIXES:
        return False
    try:
        with open(path, "rb") as file:
            return _SHEBANG.match(file.read(64)) is not None
    except OSError:
        return False


def _unreadable(folder: Path, path: Path) -> list[Step]:
    """Return a step for a broken link or pipe whose name is that of a script or configuration."""
    is_config = path.suffix in (".yaml", ".yml")
    is_script = path.suffix in _SCRIPT_SUFFIXES or path.name in MAKEFILES
    if not (is_config or is_script):
        return []
    shown = path.relative_to(folder)
    error = ShimError(f"{shown} is no file that can be read (a broken link, or a pipe): repair it.")
    kind = Kind.CONFIG if is_config else Kind.SCRIPT
    return [_damaged(kind, shown, error, version=None)]


def _pinned_release(folder: Path) -> tuple[str | None, tuple[Step, ...]]:
    """Return the release that the project requires, or a step if that is not known here."""
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
        "your own); the rest stays behind"
    )
    what = "a copy of the old package itself"
    return Step(
        kind=Kind.IMPORTS,
        path=shown,
        what=what,
        effort=Effort.REWRITE,
        blockers=(left,),
        command=f"temper-migrate imports {shown}",
    )


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for directory, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        yield Path(directory), names, sorted(files)


def effort_of(translation: Translation) -> tuple[Effort, tuple[str, ...]]:
    """Return the effort that a translation's findings ask for, and the findings that block it."""
    blockers = tuple(
        finding.message for finding in translation.findings if finding.level == "person"
    )
    if not translation.settings:
        return Effort.REWRITE, blockers
    if translation.outcome is Outcome.PERSON:
        return Effort.DECIDE, blockers
    return (Effort.NONE if translation.outcome is Outcome.CLEAN else Effort.REVIEW), ()


def _configs(folder: Path, paths: list[Path], *, version: str | None) -> list[Step]:
    """Return the old configurations, without files that another one includes."""
    from temper_legacy_shim.configs.reading.config_files import drop_included_files, read_if_old

    result, damaged = [], []
    for path in paths:
        try:
            old = read_if_old(path)
        except ShimError as error:
            damaged.append(_damaged(Kind.CONFIG, path.relative_to(folder), error, version=version))
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
        return _damaged(Kind.CONFIG, shown, error, version=version)
    effort, blockers = effort_of(translation)
    what = f"{translation.source.program} of {translation.source.version}"
    command = f"temper-migrate config {shown}{_option(version)}"
    return Step(
        kind=Kind.CONFIG,
        path=shown,
        what=what,
        effort=effort,
        blockers=blockers,
        command=command,
        version=version,
    )


def _damaged(kind: Kind, shown: Path, error: ShimError, *, version: str | None) -> Step:
    command = f"temper-migrate {kind} {shown}{_option(version)}"
    return Step(
        kind=kind,
        path=shown,
        what="not readable",
        effort=Effort.DECIDE,
        blockers=(str(error),),
        command=command,
    )


def _option(version: str | None) -> str:
    return f" --from-version {version}" if version else ""


def _releases(directory: Path) -> dict[Path, str]:
    """Return the releases that may have written a checkpoint; empty if unknown."""
    try:
        from temper_legacy_shim.checkpoints.layouts import find_roles

        given = {role.version for role in find_roles(directory)}
    except (ImportError, ShimError):
        return {}  # _checkpoint reports both
    return {directory: given.pop()} if len(given) == 1 else {}


def _release_next_to(path: Path, releases: dict[Path, str]) -> str | None:
    """Return the range of the checkpoint that shares most folders with a script."""
    shared = {directory: len(os.path.commonpath((path, directory))) for directory in releases}
    given = {
        releases[directory]
        for directory, length in shared.items()
        if length == max(shared.values())
    }
    return given.pop() if len(given) == 1 else None


def _newest_outside(inferred: str, given: str) -> str | None:
    """Return the newest release of a checkpoint's range, if the keys suggest one outside of it."""
    from temper_legacy_shim.configs.reading.trees import known_version, versions

    match = _RANGE.fullmatch(given)
    if match is None:
        return None
    known = versions()

    def trees(release: str) -> list[str]:
        # 0.3.0 has only the tree of its post-release.
        return [each for each in known if f"{each}.".startswith(f"v{release}.")] or [
            known_version(release)
        ]

    last = known[-1] if match["newer"] else trees(match["last"] or match["first"])[-1]
    in_range = known[known.index(trees(match["first"])[0]) : known.index(last) + 1]
    return None if inferred in in_range else in_range[-1]


def _script(
    folder: Path, path: Path, *, version: str | None, releases: dict[Path, str]
) -> list[Step]:
    from temper_legacy_shim.scripts.launch_translation import Options
    from temper_legacy_shim.scripts.migrate import migrate_script
    from temper_legacy_shim.scripts.script_report import headline, persons

    shown = path.relative_to(folder)
    command = f"temper-migrate script {shown}{_option(version)}"
    try:
        text = read_start(path, newline="")
    except OSError as error:
        unread = ShimError(f"{shown} can't be read: {error.strerror}.")
        return [_damaged(Kind.SCRIPT, shown, unread, version=version)]
    source = ""
    try:
        migration = migrate_script(text, folder=path.parent, options=Options(version=version))
        given = _release_next_to(path, releases)
        if given is not None and migration.launches:
            if version is None:
                source = f" (inferred from its keys; its checkpoint is of {given})"
            read_as = migration.launches[0].translation.source.version
            if (outside := _newest_outside(read_as, given)) is not None:
                version, source = outside, f" (as its checkpoint, of {given})"
                command = f"temper-migrate script {shown}{_option(version)}"
                migration = migrate_script(
                    text, folder=path.parent, options=Options(version=version)
                )
    except ShimError as error:
        if not re.search(r"\b(verl|recipe)[./]", text):
            return []
        return [_damaged(Kind.SCRIPT, shown, error, version=version)]
    blockers = tuple(persons(migration))
    if not migration.launches and not blockers:
        return []
    efforts = [effort_of(each.translation)[0] for each in migration.launches]
    effort = max(efforts, key=list(Effort).index, default=Effort.DECIDE)
    if blockers and effort is not Effort.REWRITE:
        effort = Effort.DECIDE
    what = headline(migration).removeprefix(", ") + source
    return [
        Step(
            kind=Kind.SCRIPT,
            path=shown,
            what=what,
            effort=effort,
            blockers=blockers,
            command=command,
            version=version,
        )
    ]


def _makefile(folder: Path, path: Path) -> list[Step]:
    """Return a step if rules of a makefile start an old trainer; nothing is written for it."""
    from temper_legacy_shim.scripts.unfollowed import find_launching_rules

    sentences = find_launching_rules(path)
    file = "" if path.name in MAKEFILES else f"-f {path.name} "
    if not sentences:
        return []
    shown = path.relative_to(folder)
    return [
        Step(
            kind=Kind.SCRIPT,
            path=shown,
            what="a makefile that starts an old trainer",
            effort=Effort.REWRITE,
            blockers=tuple(sentences.values()),
            command=f"make -C {shown.parent} {file}-n {next(iter(sentences))}",
        )
    ]


def _task_file(folder: Path, path: Path) -> list[Step]:
    """Return a step for a file of another runner that starts a program, which is not followed."""
    from temper_legacy_shim.scripts.called_files import trainer_in_text

    shown = path.relative_to(folder)
    if "just" in path.name.lower():
        program, command = "just", f"just -f {shown} --list"
    else:
        program, command = "task", f"task -t {shown} --list-all"
    if (text := read_bounded(path)) is None:
        error = ShimError(f"{shown} is too long or not readable, so what it starts is not known.")
        return [replace(_damaged(Kind.SCRIPT, shown, error, version=None), command=command)]
    lines = text.splitlines()
    named = [
        (number, entry) for number, line in enumerate(lines, 1) if (entry := trainer_in_text(line))
    ]
    if not named and not any(re.search(r"\bpython|\.(?:sh|py)\b", line) for line in lines):
        return []
    blockers = [
        f"line {number} starts {entry}: save this command as a script, translate that, and call it"
        for number, entry in named
    ]
    return [
        Step(
            kind=Kind.SCRIPT,
            path=shown,
            what=f"a file of {program}, whose commands are not followed",
            effort=Effort.REWRITE if named else Effort.REVIEW,
            blockers=tuple(blockers),
            command=command,
        )
    ]


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
