"""Scripts of users' forks.

None crashes, nearly every token is accounted for, and what is written is a configuration of the
trainer.
"""

import json
import logging
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from configs.checking import command, run
from corpus import public_scripts

from temper_legacy_shim.configs import Translation
from temper_legacy_shim.configs.report import yaml_of
from temper_legacy_shim.scripts.migrate import Migration, migrate_script

logger = logging.getLogger(__name__)

OPEN = ("needs a person", "conflict")
"""Dispositions that leave a token to a person. A fork's own key has one of its own: it is listed,
and never guessed.
"""


def outcome_of(translation: Translation) -> str:
    """Return whether it is within the scope, and whether somebody is asked."""
    requested = {finding.rule for finding in translation.findings if finding.level == "person"}
    return (
        "out of scope"
        if requested & {"images", "foreign"}
        else "asks a person"
        if requested
        else "asks nobody"
    )


def migrated(path: Path) -> Migration:
    """Return the translated twice: the same bytes, with nothing old left where no one is asked."""
    text = path.read_text(errors="surrogateescape")
    migration = migrate_script(text, folder=path.parent)
    again = migrate_script(text, folder=path.parent)
    if migration.script is not None and again.script is not None:
        assert migration.script.text == again.script.text
        if not migration.script.persons:
            assert migrate_script(migration.script.text, folder=path.parent).launches == ()
    return migration


# Nightly: translates all public scripts. Our samples are translated every day.
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_public_scripts_are_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("temper_trainer", reason="needs temper-trainer and its engines")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    result: Counter[str] = Counter()
    for path in public_scripts():
        migration = migrated(path)
        result["scripts"] += 1
        result["without a launch"] += not migration.launches
        for each in migration.launches:
            translation = each.translation
            outcome = outcome_of(translation)
            result[f"launches: {outcome}"] += 1
            result.update(f"tokens: {token.disposition}" for token in translation.tokens)
            if outcome != "out of scope":
                for name in re.findall(r"oc\.env:(\w+)", yaml_of(translation)):
                    monkeypatch.setenv(name, "2")  # what only the environment of a run knows
                code, given = run(command(translation, tmp_path, name=f"c{result['scripts']}"))
                result[f"{'refused' if code else 'accepted'}, {outcome}"] += 1
                if code:
                    logger.warning(
                        "%s, %s: %s", path.relative_to(path.anchor), outcome, given.strip()
                    )
    logger.warning("%s", json.dumps(dict(sorted(result.items())), indent=1))
    tokens = sum(count for name, count in result.items() if name.startswith("tokens: "))
    assert sum(result[f"tokens: {name}"] for name in OPEN) <= 0.005 * tokens
    in_scope = result["launches: asks nobody"] + result["launches: asks a person"]
    assert result["accepted, asks nobody"] + result["accepted, asks a person"] >= 0.95 * in_scope
