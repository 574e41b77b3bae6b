"""Translate old configurations.

The input is overrides or YAML of v0.2 to v0.9, the output new settings and findings.

From temper_legacy_shim.configs import translate

    translation = translate(["data.train_batch_size=1024", ...], entry="verl.trainer.main_ppo",
    version="v0.7.0") translation.overrides   # for temper-train translation.tokens      # what
    became of each old token translation.findings    # hazards, and what a person has to decide
    translation.outcome     # clean, pinned, or a person is needed

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
