"""Configurations of released versions keep their values.

Keys of version 0.1.0, which was not published, are renamed as in docs/records/renames.md.
"""

from pathlib import Path

import pytest
import yaml

from temper_trainer.config_loading import load
from temper_trainer.config_loading.schema import flatten

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*/*/config.yaml"))


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: f"{file.parts[-3]}-{file.parts[-2]}")
def test_released_configuration_has_the_same_values(file: Path) -> None:
    written = yaml.safe_load(file.read_text())
    del written["defaults"]
    now = flatten(load([], config_dir=str(file.parent), config_name="config").resolved)
    changed = {
        key: (value, now.get(key))
        for key, value in flatten(written).items()
        if now.get(key, "is gone") != value
    }
    assert changed == {}
