"""Count what becomes of the drawn third-party scripts.

Docs/records/migration_acceptance.md has the rules.
"""

import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bash_itself import run_in_bash
from comparison import as_event, surroundings
from configs.checking import put_files, run
from corpus import drawn_scripts
from test_forks import outcome_of

from temper_legacy_shim.configs import Outcome
from temper_legacy_shim.configs.reading.config_values import Plain
from temper_legacy_shim.configs.reading.trees import known_keys
from temper_legacy_shim.scripts.launches import find_launches
from temper_legacy_shim.scripts.migrate import Migration, migrate_script
from temper_legacy_shim.scripts.rewrite import COMMAND

logger = logging.getLogger(__name__)

OPEN = {"needs a person": "question", "conflict": "question", "unmapped": "unmapped"}
DROPPED = ("dropped", "ignored", "superseded")


# Nightly: translates all drawn scripts. Our samples are translated every day.
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_drawn_scripts_meet_the_acceptance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("temper_trainer", reason="needs temper-trainer and its engines")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    put_files({}, tmp_path)  # modules of trackers
    result: Counter[str] = Counter()
    seconds = []
    for number, (name, path) in enumerate(drawn_scripts()):
        text = path.read_text(errors="surrogateescape")
        start = time.process_time()
        migration = migrate_script(text, folder=path.parent)
        seconds.append(time.process_time() - start)
        result["scripts"] += 1
        result.update(_count_script(name, text, migration))
        result.update(_count_launches(migration))
        result.update(_count_accepted(name, text, migration, tmp_path / f"s{number}", monkeypatch))
    logger.warning("%s", json.dumps(dict(sorted(result.items())), indent=1))
    logger.warning(
        "CPU seconds per script: median %.3f, largest %.2f", median(seconds), max(seconds)
    )
    assert result["scripts: false clean"] == 0
    assert result["keys of verl: unmapped"] <= 0.005 * sum(
        count for name, count in result.items() if name.startswith("keys of verl: ")
    )
    checked = result["accepted, asks nobody"] + result["refused, asks nobody"]
    assert result["accepted, asks nobody"] >= 0.97 * checked > 0
    assert median(seconds) <= 0.1


def _count_script(name: str, text: str, migration: Migration) -> Iterator[str]:
    if migration.launches:
        yield "scripts: with a launch"
        return
    environment, arguments, _ = surroundings(text)
    commands = run_in_bash(text, environment=environment, arguments=arguments).commands
    launches = [
        command
        for command in commands
        if find_launches([as_event(command)]) or _num_known_keys(command) > 1
    ]
    yield f"scripts: without a launch, {migration.outcome.name}"
    logger.warning("%s: %s %s", name, migration.outcome.name, "; ".join(migration.unfollowed)[:300])
    if migration.outcome is Outcome.CLEAN and launches:
        logger.warning("%s: FALSE CLEAN %s", name, launches)
        yield "scripts: false clean"


def _num_known_keys(command: list[str]) -> int:
    return sum(
        "=" in word and word.partition("=")[0].lstrip("+~") in known_keys() for word in command
    )


def _count_launches(migration: Migration) -> Iterator[str]:
    for each in migration.launches:
        outcome = outcome_of(each.translation)
        yield f"launches: {outcome}"
        for token in each.translation.tokens:
            kind = OPEN.get(token.disposition) or (
                "dropped" if token.disposition in DROPPED else "translated"
            )
            key = token.text.partition("=")[0].lstrip("+~")
            whose = "keys of verl" if key in known_keys() else "other keys"
            yield f"{whose}: {kind}" if outcome != "out of scope" else "tokens: out of scope"


def _count_accepted(
    name: str, text: str, migration: Migration, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Yield the result of ``temper-train --check`` for the arguments that bash passes."""
    if migration.script is None:
        return
    outcomes = [outcome_of(each.translation) for each in migration.launches]
    if all(outcome == "out of scope" for outcome in outcomes):
        return
    requested = (
        "asks a person"
        if "asks a person" in outcomes or migration.script.persons
        else "asks nobody"
    )
    launched = launched_commands(text, migration.script.text)
    if not launched:
        logger.warning("%s: launches nothing under stubs", name)
        yield "not startable: nothing under stubs"
    for number, argv in enumerate(launched):
        position = folder / str(number)
        position.mkdir(parents=True)
        monkeypatch.chdir(position)
        code, given = _check(argv, position)
        yield f"{'refused' if code else 'accepted'}, {requested}"
        if code:
            logger.warning("%s, %s: %s", name, requested, given.strip()[-700:])


def launched_commands(old: str, new: str) -> list[tuple[str, ...]]:
    """Return the arguments of each run that bash starts from the new script."""
    environment, arguments, _ = surroundings(old)
    # Unset variables have a number, which is no path.
    environment = {
        key: f"/m/{value}" if re.search("MODEL|PATH|DIR|FILE", key) and value.isdigit() else value
        for key, value in environment.items()
    }
    commands = run_in_bash(new, environment=environment, arguments=arguments).commands
    return sorted(
        {tuple(command[command.index(COMMAND) + 1 :]) for command in commands if COMMAND in command}
    )


def _check(argv: tuple[str, ...], folder: Path) -> tuple[int, str]:
    """Run the command with the very arguments, and with files where they lead."""
    values: dict[str, Plain] = {}
    for word in argv:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException:
            continue  # the command itself says so
        values[override.key_or_group] = override.value()
    return run([*argv, *put_files(values, folder), "--check"])
