"""Configurations that a release translated keep their values.

Keys of version 0.1.0, which was not published, are renamed as in docs/records/renames.md.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("temper_trainer", reason="needs temper-trainer and its engines")

from temper_trainer.config_loading import load
from temper_trainer.config_loading.schema import flatten

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*/*.yaml"))


CHANGED_DEFAULTS = {
    "run.max_ckpt_to_keep": (
        None,
        2,
    ),  # translations of later releases write it, which keeps the old meaning
    "rollout.canary_tolerance": (0.05, None),  # None accepts 0.05 in float32, and 0.3 in bf16
    "rollout.vllm.stall_timeout_s": (600.0, 120.0),  # the old system has no such setting
}
"""Defaults of the trainer that were changed on purpose since release 0.1.0, old and new. Its
translations leave out what was the default then.
"""


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_released_translation_still_means_the_same(file: Path) -> None:
    now = flatten(load([], config_dir=str(file.parent), config_name=file.stem).resolved)
    values = json.loads(file.with_suffix(".json").read_text())
    changed = {
        key: (value, now.get(key))
        for key, value in values.items()
        if now.get(key, "is gone") != value
    }
    assert changed == {key: both for key, both in CHANGED_DEFAULTS.items() if key in changed}


def test_every_kind_of_run_was_kept() -> None:
    assert {"grpo", "critic", "sft", "megatron", "reward_file"} <= {file.stem for file in GOLDEN}
