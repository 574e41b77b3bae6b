"""Types of a translation: settings with their origin, token dispositions, findings, outcome."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from temper_legacy_shim.configs.reading.config_values import Plain, hydra_text
from temper_legacy_shim.configs.reading.trees import described

Disposition = Literal[
    "kept",
    "renamed",
    "moved",
    "mapped",
    "computed",
    "dropped",
    "ignored",
    "superseded",
    "passed on",
    "conflict",
    "unmapped",
    "needs a person",
]


class Outcome(IntEnum):
    """Outcome of a translation; the command's exit code is ``EXIT_CODES[outcome]``."""

    CLEAN = 0
    """All tokens have a counterpart, and no default differs."""
    PINNED = 1
    """It trains the same way: old defaults are written out, or hazards are listed."""
    PERSON = 2
    """Findings of level person need a decision first."""


EXIT_CODES = {Outcome.CLEAN: 0, Outcome.PINNED: 10, Outcome.PERSON: 20}
"""0, 10 and 20, apart from 1 (the command failed) and 2 (it was called wrongly)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Cluster of a run, for configurations without one, such as those of torchrun."""

    nodes: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    key: str
    """Dotted key, or the name of a config group."""
    value: Plain
    """Its value, or the group's choice."""
    is_pinned: bool
    """True if it is an old default, written out because the trainer's default differs."""
    rule: str
    old_keys: tuple[str, ...]
    sources: tuple[int, ...]
    """Indices of the tokens among them; empty if all are defaults or from a file."""
    is_verbatim: bool
    """True if it is the unchanged value of one source, so that a script may keep the raw text."""
    comment: str
    """Origin of the value, for the end of the line."""
    is_group: bool = False
    """True if the key is a config group."""
    is_number: bool = False
    """True if the value is a shell variable that stands for a number."""

    @property
    def override(self) -> str:
        """Override for temper-train's command line, before the shell's quoting."""
        return f"{self.key}={hydra_text(self.value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    index: int
    """Its place among the tokens; -1 for a value of the user's own file."""
    text: str
    key: str
    """The old key; empty where it is no override."""
    disposition: Disposition
    new_keys: tuple[str, ...]
    rule: str
    """Id in the table of rules; empty if none matched."""
    reason: str
    prs: str = ""
    """Pull requests of the old system that decided its fate."""
    hazard: str = ""
    """Possible difference in behavior; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact or a question for the user."""

    level: Literal["person", "hazard", "refused", "note"]
    """person: to be decided before the run; hazard: trains, with this difference; refused: the old
    system would not have started with it;
    note: good to know."""
    rule: str
    message: str
    """One or two sentences: the fact, the reason, the action."""
    old_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    version: str
    """The release, such as v0.7.1."""
    is_given: bool
    """True if the user gave the version; otherwise it was inferred."""
    evidence: tuple[str, ...]
    entry: str
    family: str
    program: Literal["ppo", "sft", "generation", "evaluation", "other"]

    @property
    def release(self) -> str:
        """The release with the evidence, and True if it was inferred."""
        how = "" if self.is_given else "inferred: "
        return f"{described(self.version)} ({how}{'; '.join(self.evidence)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """The full result; see ``translate``."""

    source: Source
    settings: tuple[Setting, ...]
    """The new configuration, groups first; empty if a question decides about all of it."""
    tokens: tuple[TokenReport, ...]
    findings: tuple[Finding, ...]
    """Findings, most severe first."""
    unmapped: Mapping[str, Plain] = field(default_factory=dict)
    """Keys and values that no known release has, such as a fork's. Nothing was guessed."""

    @property
    def outcome(self) -> Outcome:
        if any(finding.level == "person" for finding in self.findings):
            return Outcome.PERSON
        is_changed = any(setting.is_pinned for setting in self.settings) or any(
            f.level in ("hazard", "refused") for f in self.findings
        )
        return Outcome.PINNED if is_changed else Outcome.CLEAN

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides for temper-train's command line, before the shell's quoting."""
        return tuple(setting.override for setting in self.settings)
