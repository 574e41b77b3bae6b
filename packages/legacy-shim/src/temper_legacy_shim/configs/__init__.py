"""Translate old configurations.

The input is overrides or YAML of v0.2 to v0.9, the output new settings and findings::

    from temper_legacy_shim.configs import translate

    translation = translate(
        ["data.train_batch_size=1024"], entry="verl.trainer.main_ppo", version="v0.7.0"
    )
    translation.overrides  # for temper-train: batching.prompts_per_step=1024, ...
    translation.tokens  # what became of each old token
    translation.findings  # hazards, and what a person has to decide
    translation.outcome  # clean, pinned, or a person is needed

The mapping is in tables, in ``data``:

* ``trees.json``: the keys and defaults of each release, built by ``tools/build_trees.py``.
* ``rules.tsv``: what becomes of each old key, and why, with an example that the tests repeat.
* ``rows.tsv``: the rows that do it. ``mapping/rows.py`` describes their columns and words.
* ``messages.tsv``: level and text of findings, and reasons of dropped keys.
* ``trainer_defaults.tsv``: the trainer's defaults, which are not written out.

Nothing here needs torch, numpy, hydra or omegaconf.
"""

from temper_legacy_shim.configs.translate import translate
from temper_legacy_shim.configs.translation import (
    EXIT_CODES,
    Cluster,
    Disposition,
    Finding,
    Outcome,
    Setting,
    Source,
    TokenReport,
    Translation,
)

__all__ = [
    "EXIT_CODES",
    "Cluster",
    "Disposition",
    "Finding",
    "Outcome",
    "Setting",
    "Source",
    "TokenReport",
    "Translation",
    "translate",
]
