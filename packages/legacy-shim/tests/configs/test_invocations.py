"""Real invocations: none crashes, nearly every token is accounted for, and what comes out is a configuration of the trainer."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from temper_legacy_shim.configs import Outcome, Translation, translate
from temper_legacy_shim.configs.written import yaml_of

logger = logging.getLogger(__name__)

OPEN = ("needs a person", "conflict", "unmapped")
"""Dispositions that are not definite."""
OUT_OF_SCOPE = ("images", "foreign")
"""Rules that find what no configuration is written for."""

Rows = Sequence[dict[str, object]]


def translation_of(row: dict[str, object]) -> Translation:
    return translate(row["overrides"], entry=str(row["entry"]), config_name=row["config_name"], version=str(row["tag"]))  # type: ignore[arg-type]


def account(rows: Rows) -> Counter[str]:
    """Tokens by disposition."""
    return Counter(token.disposition for row in rows for token in translation_of(row).tokens)


def share_definite(found: Counter[str]) -> float:
    return 1 - sum(found[name] for name in OPEN) / found.total()


def accepted(rows: Rows, folder: Path) -> Counter[str]:
    """Invocations by what the trainer's own composition says of the file that was written."""
    from temper_engine_api.errors import ConfigError
    from temper_trainer.config_loading import load

    found: Counter[str] = Counter()
    for number, row in enumerate(rows):
        translation = translation_of(row)
        if any(finding.level == "person" and finding.rule in OUT_OF_SCOPE for finding in translation.findings):
            assert translation.settings == ()
            found["out of scope"] += 1
            continue
        (folder / f"c{number}.yaml").write_text(yaml_of(translation))
        decided = "" if translation.outcome is not Outcome.PERSON else ", with a decision to make"
        try:
            load([], config_dir=str(folder), config_name=f"c{number}")
            found[f"accepted{decided}"] += 1
        except ConfigError as error:
            is_later = all("implementation follows" in line for line in str(error).splitlines())
            found[f"{'accepted by a later release' if is_later else 'refused'}{decided}"] += 1
            logger.info("%s %s: %s", row["tag"], row["path"], error)
    return found


def test_a_sample_of_real_invocations_is_accounted_for(invocations: Rows) -> None:
    assert share_definite(account(invocations[::9])) >= 0.995


def test_a_sample_of_real_invocations_gives_configurations_of_the_trainer(invocations: Rows, tmp_path: Path) -> None:
    pytest.importorskip("temper_trainer", reason="needs temper-trainer and its engines")
    found = accepted([row for row in invocations[::60] if "generation" not in str(row["entry"])], tmp_path)
    assert found["refused"] == 0, found
    assert found["accepted"] >= 4, found


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_real_invocations(invocations: Rows, tmp_path: Path) -> None:
    found = accepted(invocations, tmp_path)
    report = {"tokens": account(invocations), "invocations": found}
    logger.warning("%s", json.dumps(report, indent=1))
    assert share_definite(report["tokens"]) >= 0.995
    in_scope = found.total() - found["out of scope"]
    good = sum(count for name, count in found.items() if name.startswith("accepted"))
    assert good / in_scope >= 0.95, found


def test_the_release_is_inferred_near_the_one_that_it_was(invocations: Rows) -> None:
    from temper_legacy_shim.configs.trees import order

    distances = []
    for row in invocations[::23]:
        if row["entry"] != "verl.trainer.main_ppo":
            continue
        inferred = translate(row["overrides"], entry=str(row["entry"]), config_name=row["config_name"])  # type: ignore[arg-type]
        assert inferred.source.evidence
        distances.append(order(inferred.source.version) - order(str(row["tag"])))
    # The newest release that takes the keys is meant, so it is the real one or a later one nearly always.
    assert sum(distance >= 0 for distance in distances) >= 0.9 * len(distances)
