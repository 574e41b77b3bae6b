"""Find the launch scripts, makefiles and task files of a project that start an old trainer."""

import os
import re
from dataclasses import replace
from pathlib import Path

from temper_legacy_shim.doctor.steps import (
    Effort,
    Kind,
    Step,
    damaged_step,
    effort_of,
    version_option,
)
from temper_legacy_shim.errors import ShimError
from temper_legacy_shim.scripts.makefiles import MAKEFILES
from temper_legacy_shim.scripts.script_reading import read_bounded, read_start

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
_RANGE = re.compile(r"(?P<first>\d[\d.]*)(?: to (?P<last>\d[\d.]*)|(?P<newer> or newer))?")
"""Pattern of ``Role.version``, the releases that a checkpoint's layout allows."""


def is_script(path: Path) -> bool:
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


def unreadable_steps(folder: Path, path: Path) -> list[Step]:
    """Return a step for a broken link or pipe whose name is that of a script or configuration."""
    is_config = path.suffix in (".yaml", ".yml")
    is_script = path.suffix in _SCRIPT_SUFFIXES or path.name in MAKEFILES
    if not (is_config or is_script):
        return []
    shown = path.relative_to(folder)
    error = ShimError(f"{shown} is no file that can be read (a broken link, or a pipe): repair it.")
    kind = Kind.CONFIG if is_config else Kind.SCRIPT
    return [damaged_step(kind, shown, error, version=None)]


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


def script_steps(
    folder: Path, path: Path, *, version: str | None, releases: dict[Path, str]
) -> list[Step]:
    """Return a step if a script starts an old trainer, or may start one.

    Args:
        folder: of the project.
        path: of the script.
        version: the release of the project; None infers it.
        releases: releases of the checkpoints by folder, of which the nearest is compared.
    """
    from temper_legacy_shim.scripts.launch_translation import Options
    from temper_legacy_shim.scripts.migrate import migrate_script
    from temper_legacy_shim.scripts.script_report import headline, persons

    shown = path.relative_to(folder)
    command = f"temper-migrate script {shown}{version_option(version)}"
    try:
        text = read_start(path, newline="")
    except OSError as error:
        unread = ShimError(f"{shown} can't be read: {error.strerror}.")
        return [damaged_step(Kind.SCRIPT, shown, unread, version=version)]
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
                command = f"temper-migrate script {shown}{version_option(version)}"
                migration = migrate_script(
                    text, folder=path.parent, options=Options(version=version)
                )
    except ShimError as error:
        if not re.search(r"\b(verl|recipe)[./]", text):
            return []
        return [damaged_step(Kind.SCRIPT, shown, error, version=version)]
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


def makefile_steps(folder: Path, path: Path) -> list[Step]:
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


def task_file_steps(folder: Path, path: Path) -> list[Step]:
    """Return a step for a file of another runner that starts a program, which is not followed."""
    from temper_legacy_shim.scripts.called_files import trainer_in_text

    shown = path.relative_to(folder)
    if "just" in path.name.lower():
        program, command = "just", f"just -f {shown} --list"
    else:
        program, command = "task", f"task -t {shown} --list-all"
    if (text := read_bounded(path)) is None:
        error = ShimError(f"{shown} is too long or not readable, so what it starts is not known.")
        return [replace(damaged_step(Kind.SCRIPT, shown, error, version=None), command=command)]
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
