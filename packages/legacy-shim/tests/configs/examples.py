"""The translation that stands in the last column of the table of rules, read and repeated."""

import shlex
from dataclasses import dataclass

from temper_legacy_shim.configs import Translation, translate
from temper_legacy_shim.configs.mapping.rules import Rule

from .conftest import BASE

LEVELS = ("person", "hazard", "refused", "note")
BASES: dict[str, tuple[str, ...]] = {
    "verl.trainer.fsdp_sft_trainer": (
        "data.train_files=/data/train.parquet",
        "model.partial_pretrain=/models/q",
    ),
    "verl.trainer.sft_trainer": ("data.train_files=/data/train.parquet", "model.path=/models/q"),
    "verl.trainer.main_generation": ("data.path=/data/prompts.parquet", "model.path=/models/q"),
    "verl.trainer.main_eval": (),
}
"""The small run below an example's own tokens; every other entry has that of PPO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """``RELEASE ENTRY OLD... => DISPOSITION FINDING... NEW...``.

    A release of ``-`` is not named.
    """

    release: str
    entry: str
    tokens: tuple[str, ...]
    """On top of the small run."""
    disposition: str
    """Disposition of the token under the rule; empty without one."""
    levels: frozenset[str]
    settings: tuple[str, ...]
    """``key=value`` of the new configuration."""

    def translated(self) -> Translation:
        """Return the done now."""
        base = BASES.get(self.entry, BASE)
        return translate(
            [*base, *self.tokens],
            entry=self.entry,
            version=None if self.release == "-" else self.release,
        )


def example_of(rule: Rule) -> Example:
    """Return the rule's own."""
    old, _, new = rule.test.partition("=>")
    release, entry, *tokens = shlex.split(old)
    words = shlex.split(new)
    return Example(
        release=release,
        entry=entry,
        tokens=tuple(tokens),
        disposition="".join(
            word.replace("-", " ") for word in words if "=" not in word and word not in LEVELS
        ),
        levels=frozenset(word for word in words if word in LEVELS),
        settings=tuple(word for word in words if "=" in word),
    )
