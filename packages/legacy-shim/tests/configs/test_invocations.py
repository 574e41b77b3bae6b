"""Real invocations.

None crashes, nearly every token is accounted for, and what comes out is a configuration of the
trainer.
"""

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from temper_legacy_shim.configs import Outcome, Translation, translate

from .checking import command, run

logger = logging.getLogger(__name__)

OPEN = ("needs a person", "conflict", "unmapped")
"""Dispositions that are not definite."""
OUT_OF_SCOPE = ("images", "foreign")
"""Rules that find what no configuration is written for."""

Rows = Sequence[dict[str, object]]


def translation_of(row: dict[str, object]) -> Translation:
    return translate(
        row["overrides"],
        entry=str(row["entry"]),
        config_name=row["config_name"],
        version=str(row["tag"]),
    )  # type: ignore[arg-type]


def account(rows: Rows) -> Counter[str]:
    """Return the tokens by disposition."""
    return Counter(token.disposition for row in rows for token in translation_of(row).tokens)


def fraction_definite(result: Counter[str]) -> float:
    return 1 - sum(result[name] for name in OPEN) / result.total()


def accepted(rows: Rows, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the invocations by what ``temper-train --check`` says of the file that was written."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    result: Counter[str] = Counter()
    for number, row in enumerate(rows):
        translation = translation_of(row)
        if any(
            finding.level == "person" and finding.rule in OUT_OF_SCOPE
            for finding in translation.findings
        ):
            assert translation.settings == ()
            result["out of scope"] += 1
            continue
        decided = "" if translation.outcome is not Outcome.PERSON else ", with a decision to make"
        code, given = run(command(translation, folder, name=f"c{number}"))
        if (
            code
            and "run.trackers is " in given
            and "mlflow" not in given.partition(" but must be")[2]
        ):
            result["told to a newer trainer than 0.1.0"] += 1
            continue
        result[f"{'refused' if code else 'accepted'}{decided}"] += 1
        if code:
            logger.warning("%s %s%s: %s", row["tag"], row["path"], decided, given.strip())
    return result


def test_a_sample_of_real_invocations_is_accounted_for(invocations: Rows) -> None:
    assert fraction_definite(account(invocations[::9])) >= 0.995


def test_a_sample_of_real_invocations_gives_files_that_the_command_accepts(
    invocations: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("temper_trainer", reason="needs temper-trainer and its engines")
    result = accepted(
        [row for row in invocations[::60] if "generation" not in str(row["entry"])],
        tmp_path,
        monkeypatch,
    )
    assert result["refused"] == 0, result
    assert result["accepted"] >= 4, result


# Nightly: runs the command for every fiftieth invocation. The test above calls its function every
# day.
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_installed_command_says_of_a_sample_what_the_function_reported(
    invocations: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    compared = 0
    for number, row in enumerate(invocations[7::50]):
        translation = translation_of(row)
        if not translation.settings:
            continue
        arguments = command(translation, tmp_path, name=f"c{number}")
        done = subprocess.run(
            [sys.executable, "-m", "temper_trainer", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == run(arguments)[0], (row["path"], done.stderr)
        assert done.returncode or done.stdout.startswith("OK"), done.stdout
        compared += 1
    assert compared >= 15


# Nightly: translates all invocations. The tests above take a sample every day.
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_real_invocations(
    invocations: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = accepted(invocations, tmp_path, monkeypatch)
    report = {"tokens": account(invocations), "invocations": result}
    logger.warning("%s", json.dumps(report, indent=1))
    assert fraction_definite(report["tokens"]) >= 0.995
    in_scope = result.total() - result["out of scope"]
    good = sum(count for name, count in result.items() if name.startswith("accepted"))
    assert good / in_scope >= 0.95, result


def test_the_release_is_inferred_near_the_one_that_it_was(invocations: Rows) -> None:
    from temper_legacy_shim.configs.reading.trees import order

    distances = []
    for row in invocations[::23]:
        if row["entry"] != "verl.trainer.main_ppo":
            continue
        inferred = translate(
            row["overrides"], entry=str(row["entry"]), config_name=row["config_name"]
        )  # type: ignore[arg-type]
        assert inferred.source.evidence
        distances.append(order(inferred.source.version) - order(str(row["tag"])))
    # The newest release that takes the keys is meant, so it is the real one or a later one nearly
    # always.
    assert sum(distance >= 0 for distance in distances) >= 0.9 * len(distances)
