"""Real invocations and default trees, where this machine has them, and short ways to translate."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_legacy_shim.configs import Translation, translate
from temper_legacy_shim.configs.reading.config_values import Plain

CONFIG = Path(os.environ["TEMPER_TEST_DATA"]) / "legacy" / "config"

BASE = (
    "data.train_files=/data/train.parquet",
    "actor_rollout_ref.model.path=/models/q",
    "actor_rollout_ref.rollout.name=vllm",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
)
"""A run of GRPO that every release takes, with four updates a step."""

Translate = Callable[..., Translation]


@pytest.fixture(scope="session")
def facts() -> Path:
    """Return the folder of facts about old configurations."""
    if not CONFIG.is_dir():
        pytest.skip(f"needs the facts in {CONFIG}: set TEMPER_TEST_DATA")
    return CONFIG


@pytest.fixture(scope="session")
def invocations(facts: Path) -> list[dict[str, object]]:
    """Return the real invocations of the old systems."""
    return [json.loads(line) for line in (facts / "invocations.jsonl").read_text().splitlines()]


def translated(
    version: str, *overrides: str, base: tuple[str, ...] = BASE, **options: object
) -> Translation:
    """Return one run of a release."""
    return translate(
        [*base, *overrides],
        version=version,
        entry=str(options.pop("entry", "verl.trainer.main_ppo")),
        **options,
    )  # type: ignore[arg-type]


def values(translation: Translation) -> dict[str, Plain]:
    """Return the new settings by key."""
    return {setting.key: setting.value for setting in translation.settings}


def pinned(translation: Translation) -> set[str]:
    """Return the keys that no one asked for."""
    return {setting.key for setting in translation.settings if setting.is_pinned}


def rules_found(translation: Translation, level: str) -> set[str]:
    """Return the rules of the findings of a level."""
    return {finding.rule for finding in translation.findings if finding.level == level}
