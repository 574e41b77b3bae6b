"""Reports of a script's migration: sentences, and documented plain values."""

import re
import shlex
from pathlib import Path

from temper_legacy_shim.configs import EXIT_CODES
from temper_legacy_shim.configs.reading.config_values import Plain
from temper_legacy_shim.configs.report import (
    OUTCOMES,
    sort_by_severity,
    summary_lines,
    unmapped_lines,
)
from temper_legacy_shim.configs.report import plain_report as plain_translation
from temper_legacy_shim.scripts.migrate import Migration
from temper_legacy_shim.scripts.script_reading import Alternative, ScriptReading

SCHEMA = "temper-migrate/script/1"
"""Name of ``plain_report``'s form; docs/migration/scripts.md describes it."""


def headline(migration: Migration) -> str:
    """Return the number of launches by kind."""
    if not migration.launches:
        return (
            ", no launch of an old trainer was seen"
            if migration.unfollowed or migration.not_read
            else ", launches no old trainer"
        )
    names = ", ".join(
        dict.fromkeys(
            f"{each.launch.entry} of {each.translation.source.version}"
            for each in migration.launches
        )
    )
    return f", {len(migration.launches)} launch{'es' * (len(migration.launches) > 1)} of {names}"


def evidence(migration: Migration) -> list[str]:
    """Return the release of each launch and why: given, or inferred from its keys."""
    out = []
    for each in migration.launches:
        source = each.translation.source
        line = migration.reading.line_of(each.launch.span.start)
        out.append(f"line {line}: {source.program} of {each.readable(source.release)}")
    return list(dict.fromkeys(out))


def summary(migration: Migration, path: Path, *, written: Path | None) -> list[str]:
    """Summarize the report, from the number of translated settings to the next command."""
    if not migration.launches or migration.script is None:
        return []
    decide = "decide what needs a person, then " if persons(migration) else ""
    if written is None:
        step = f"temper-migrate script {shlex.quote(str(path))} --out NEW.sh"
    else:
        # A job's variables, and often its environment, exist on the cluster's machines alone.
        runner = (
            "sbatch" if re.search(r"^#SBATCH\b", migration.script.text, re.MULTILINE) else "bash"
        )
        step = f"{runner} {shlex.quote(str(written))} --check"
        if not re.search(r"\$[@*]|\$\{[@*]", migration.script.text):
            step = f'add "$@" to the end of the command in {written}, then {step}'
    return summary_lines([each.translation for each in migration.launches], next_step=decide + step)


def persons(migration: Migration) -> list[str]:
    """Return the decisions a user has to make."""
    if not migration.launches:
        return list(migration.unfollowed)
    out = [
        each.readable(finding.message) for each in migration.launches for finding in each.persons
    ]
    out += migration.script.persons if migration.script is not None else []
    return list(dict.fromkeys(out))


def remarks(migration: Migration) -> list[str]:
    """Return what differs, is passed on, was not read or decided, without the questions."""
    out = []
    for each in migration.launches:
        given = [
            finding
            for finding in sort_by_severity(each.translation.findings)
            if finding.level != "person" and finding.rule != "unmapped"
        ]
        out += [f"{finding.level}: {each.readable(finding.message)}" for finding in given]
        out += [each.readable(line) for line in unmapped_lines(each.translation)]
        for override in each.launch.open_arguments:
            out.append(
                f"passed on: {override.source}; what it brings must be Temper's own keys from now "
                "on"
            )
    out += migration.script.notes if migration.script is not None else []
    out += [f"line {line}: {sentence}" for sentence, line in migration.reading.notes.items()]
    out += migration.not_read
    out += [
        _sentence(migration.reading, alternative) for alternative in migration.reading.alternatives
    ]
    bare = sorted(name for name, is_bare in migration.reading.free.items() if is_bare)
    if bare:
        out.append(
            f"not set in the script: {', '.join(bare)}; give their values with --set where the "
            "report needs them"
        )
    return list(dict.fromkeys(out))


def _sentence(reading: ScriptReading, alternative: Alternative) -> str:
    decision = alternative.decision
    line = reading.line_of(decision.span.start)
    was = _choice(decision.taken, decision.num_choices)
    other = _choice(alternative.taken, decision.num_choices)
    return (
        f"line {line}: `{decision.what}` was taken as {was}; {other} would launch "
        f"{differences(reading, alternative)}"
    )


def _choice(taken: int, num_choices: int) -> str:
    if num_choices == 2:
        return "true" if taken else "false"
    return f"branch {taken}" if taken else "no branch"


def differences(reading: ScriptReading, alternative: Alternative) -> str:
    """Summarize the launches of the other branch."""
    if len(alternative.launches) != len(reading.launches):
        return f"{len(alternative.launches)} trainers instead of {len(reading.launches)}"
    target = {override.text.shown() for launch in reading.launches for override in launch.overrides}
    others = [
        override.text.shown() for launch in alternative.launches for override in launch.overrides
    ]
    new = [shown for shown in dict.fromkeys(others) if shown not in target]
    gone = sorted(target - set(others))
    parts = [f"with {', '.join(new[:6])}{' ...' if len(new) > 6 else ''}"] if new else []
    parts += [f"without {', '.join(gone[:6])}{' ...' if len(gone) > 6 else ''}"] if gone else []
    return "; ".join(parts) or "another entry or configuration"


def plain_report(migration: Migration) -> dict[str, Plain]:
    """Return the full report, ready for JSON."""
    reading = migration.reading
    launches: list[Plain] = [
        {
            "line": reading.line_of(each.launch.span.start),
            "entry": each.launch.entry,
            "config_name": each.launch.config_name,
            "config_path": each.launch.config_path,
            "overrides": [
                {"text": item.text.shown(), "source": item.source} for item in each.launch.overrides
            ],
            "passed_on": [item.source for item in each.launch.open_arguments],
            "arguments": [argument.source for argument in each.arguments],
            "translation": dict(plain_translation(each.translation)),
        }
        for each in migration.launches
    ]
    alternatives: list[Plain] = [
        {
            "line": reading.line_of(item.decision.span.start),
            "condition": item.decision.what,
            "taken": item.decision.taken,
            "other": item.taken,
            "differences": differences(reading, item),
        }
        for item in reading.alternatives
    ]
    return {
        "schema": SCHEMA,
        "outcome": OUTCOMES[migration.outcome],
        "exit_code": EXIT_CODES[migration.outcome],
        "needs_a_person": list[Plain](persons(migration)),
        "remarks": list[Plain](remarks(migration)),
        "launches": launches,
        "alternatives": alternatives,
        "unset_variables": list[Plain](
            sorted(name for name, is_bare in reading.free.items() if is_bare)
        ),
        "script": migration.script.text if migration.script is not None else None,
    }
