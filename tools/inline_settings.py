"""Check that settings in the prose of a page, such as `run.save_model=false`, exist.

Shell and YAML blocks are composed as configurations; settings in inline code are only looked up,
in the keys of all engines and of all variants.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from temper_engine_api.registry import list_engines, load_engine_config_class
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.schema import Entry, collect_keys
from temper_trainer.config_loading.unknown_keys import is_known_key

NOT_SETTINGS_OF_TEMPER = (
    "docs/decisions/",
    "docs/migration/",
    "docs/records/",
    "packages/legacy-shim/",
)
"""Beginnings of pages that show settings of verl, or of Temper at an earlier time."""

EXAMPLE_SETTINGS = ("algorithm.policy_loss.width",)
"""Settings that a reader adds by following a page."""

_INLINE_CODE = re.compile(r"`([^`]+)`")
_SETTING = re.compile(r"[+~]{0,2}([a-z_]+(?:\.\w+)+)(=.*)?")
_FILE_SUFFIXES = (".lock", ".py")
"""Ends of file names that look like keys: `run.lock`, `loop.py`."""


def find_unknown_settings(page: Path, prose: str, *, name: str) -> list[str]:
    """Return a sentence for each setting in inline code whose key does not exist.

    A word counts as a setting if its first part is a block of the configuration. `name` is the path
    of the page relative to the repository.
    """
    if name.startswith(NOT_SETTINGS_OF_TEMPER):
        return []
    return [
        f"{page}:{number}: `{word}`: there is no key {key}"
        for number, line in enumerate(prose.splitlines(), start=1)
        for span in _INLINE_CODE.findall(line)
        for word in span.split()
        if (key := _find_key(word)) and not is_known_key(key, known=_collect_all_keys())
    ]


def _find_key(word: str) -> str:
    """Return the key of a setting; empty for other words."""
    match = _SETTING.fullmatch(word)
    if match is None or match[1] in EXAMPLE_SETTINGS:
        return ""
    is_file = match[2] is None and word.endswith(_FILE_SUFFIXES)
    is_block = match[1].partition(".")[0] in _collect_all_keys()
    return match[1] if is_block and not is_file else ""


@cache
def _collect_all_keys() -> Mapping[str, Entry]:
    known: dict[str, Entry] = {}
    for engine in list_engines():
        known |= collect_keys(TrainerConfig, engine_class=load_engine_config_class(engine.name))
    return known
