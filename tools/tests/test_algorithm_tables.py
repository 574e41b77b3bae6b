"""Test that the tables of the pages list the algorithms that can be chosen, and no others."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

# Imports every module that registers an algorithm.
import temper_trainer.config.trainer_config  # noqa: F401
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.algorithms.distillation_losses.distillation_loss import DistillationLoss
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.algorithms.preference_losses.preference_loss import PreferenceLoss
from temper_trainer.algorithms.sft_losses import SftLoss
from temper_trainer.config.algorithm import AggregationName
from temper_trainer.config.distillation import SelfTeacher
from temper_trainer.config.rollout_correction import RolloutCorrection
from temper_trainer.settings.variants import list_variants

DOCS = Path(__file__).parents[2] / "docs"


def read_table(page: str, heading: str, *, header: str | None = None) -> list[list[str]]:
    """Return the cells of the first table below a heading, the header first.

    With `header`, of the first table whose first column has it.
    """
    below = page.split(f"\n{heading}\n", 1)[1].splitlines()
    start = next(
        i
        for i, line in enumerate(below)
        if line.startswith("|" if header is None else f"| {header} |")
    )
    table = itertools.takewhile(lambda line: line.startswith("|"), below[start:])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [rows[0], *rows[2:]]


def list_table_names(page: str, heading: str, *, header: str | None = None) -> list[str]:
    """Return the names in the first column of a table."""
    rows = read_table(page, heading, header=header)[1:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


@pytest.mark.parametrize(
    ("page", "heading", "header", "registered"),
    [
        (
            "algorithms.md",
            "## Advantages (`algorithm.advantage`)",
            None,
            list_variants(AdvantageEstimator),  # type: ignore[type-abstract]
        ),
        (
            "algorithms.md",
            "## Policy loss (`algorithm.policy_loss`)",
            None,
            list_variants(PolicyLoss),  # type: ignore[type-abstract]
        ),
        (
            "algorithms.md",
            "## Aggregation of per-token losses (`algorithm.aggregation`)",
            None,
            get_args(AggregationName),
        ),
        (
            "algorithms.md",
            "## Rollout correction (`algorithm.rollout_correction`)",
            None,
            list_variants(RolloutCorrection),  # type: ignore[type-abstract]
        ),
        (
            "algorithms.md",
            "### SFT losses (`sft`)",
            None,
            list_variants(SftLoss),  # type: ignore[type-abstract]
        ),
        (
            "algorithms.md",
            "### Preference losses (`preference`)",
            None,
            list_variants(PreferenceLoss),  # type: ignore[type-abstract]
        ),
        (
            "distillation.md",
            "## Losses and rewards",
            None,
            list_variants(DistillationLoss),  # type: ignore[type-abstract]
        ),
        (
            "distillation.md",
            "## The policy as its own teacher",
            "`distillation.self_teacher`",
            list_variants(SelfTeacher),
        ),
    ],
)
def test_table_lists_what_is_registered(
    page: str, heading: str, header: str | None, registered: Iterable[str]
) -> None:
    names = list_table_names((DOCS / page).read_text(), heading, header=header)
    assert sorted(names) == sorted(registered)


LEARNING_NAMES = {
    "cross_entropy": "sft",
    "hinge": "dpo with hinge",
    "ipo": "dpo with ipo",
    "reverse_kl_reward": "reverse_kl as reward",
    "rm": "reward model",
    "current": "self-distillation with the current policy",
    "ema": "self-distillation with the ema policy",
}
"""Names of runs in docs/benchmarks/learning.md, where they are not those of the setting."""


@pytest.mark.parametrize(
    ("page", "heading", "header", "results"),
    [
        ("algorithms.md", "## Advantages (`algorithm.advantage`)", None, "Results"),
        ("algorithms.md", "## Policy loss (`algorithm.policy_loss`)", None, "Results"),
        ("algorithms.md", "### SFT losses (`sft`)", None, "Results"),
        ("algorithms.md", "### Preference losses (`preference`)", None, "Preferences of pairs"),
        ("algorithms.md", "### Reward model (`rm`)", None, "Preferences of pairs"),
        ("distillation.md", "## Losses and rewards", None, "Results"),
        (
            "distillation.md",
            "## The policy as its own teacher",
            "`distillation.self_teacher`",
            "Results",
        ),
    ],
)
def test_every_algorithm_has_its_gain_and_other_systems(
    page: str, heading: str, header: str | None, results: str
) -> None:
    learning = (DOCS / "benchmarks" / "learning.md").read_text()
    gains = {row[0].strip("`"): row[-1] for row in read_table(learning, f"## {results}")}
    columns, *rows = read_table((DOCS / page).read_text(), heading, header=header)
    gain = next(i for i, column in enumerate(columns) if column.startswith("gain"))
    for row in rows:
        name = row[0].strip("`")
        assert row[gain] == gains[LEARNING_NAMES.get(name, name)].split(" ")[0], name
        assert row[columns.index("also in")], name


def test_rows_of_another_table_are_not_read() -> None:
    page = "# P\n\n## A\n\n| x |\n|---|\n| `y` |\n\n| `z` |\n\n## B\n\n| n |\n|---|\n| `a`, `b` |\n"
    assert list_table_names(page, "## A") == ["y"]
    assert list_table_names(page, "## B") == ["a", "b"]
    assert list_table_names(page, "## A", header="n") == ["a", "b"]
