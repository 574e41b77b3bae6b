"""What a translation is: new settings with their origin, a disposition for every old token, findings, and how it all ended."""

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
"""What became of a token. kept, renamed, moved: the value as it was; mapped, computed: another value that means the same; dropped: nothing
here does that, and the reason says why that is right; ignored: the old system did not read it; superseded: a later token won; passed on:
not an override; conflict, unmapped, needs a person: see the finding."""


class Outcome(IntEnum):
    """How a translation ended; the exit code of the command is ``EXIT_CODES[outcome]``."""

    CLEAN = 0
    """Every token has its counterpart, and no default differed."""
    PINNED = 1
    """It trains the same way, because old defaults are written out, or with the hazards that are listed."""
    PERSON = 2
    """Something has to be decided first; it is said what."""


EXIT_CODES = {Outcome.CLEAN: 0, Outcome.PINNED: 10, Outcome.PERSON: 20}
"""0, 10 and 20, apart from 1 (the command failed) and 2 (it was called wrongly)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a run may use, where the configuration does not say it: torchrun's numbers, for example."""

    nodes: int
    """Machines."""
    gpus_per_node: int
    """Of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value of the new configuration."""

    key: str
    """Dotted key, or the name of a config group."""
    value: Plain
    """Its value, or the group's choice."""
    is_pinned: bool
    """Whether nobody asked for it: the old release's default, written out because ours differs."""
    rule: str
    """The rule that made it."""
    old_keys: tuple[str, ...]
    """What it was made from."""
    sources: tuple[int, ...]
    """The tokens among them, by index; empty where all were defaults or came from a file."""
    is_verbatim: bool
    """Whether it is the value of its one source, unchanged: a shell script may keep the raw text there."""
    comment: str
    """Where it comes from, for the line's end."""
    is_group: bool = False
    """Whether the key is a config group."""
    is_number: bool = False
    """Whether the value is a variable of the shell that stands for a number."""

    @property
    def override(self) -> str:
        """As it stands on the command line of temper-train, before the shell's own quoting."""
        return f"{self.key}={hydra_text(self.value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """What became of one old token."""

    index: int
    """Its place."""
    text: str
    """As it was given."""
    key: str
    """The old key; empty where it is no override."""
    disposition: Disposition
    """See Disposition."""
    new_keys: tuple[str, ...]
    """Keys of the new configuration that carry it on."""
    rule: str
    """Of the table of rules; empty where none matched."""
    reason: str
    """One sentence."""
    prs: str = ""
    """Pull requests of the old system that decided its fate."""
    hazard: str = ""
    """What may differ, if anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a reader has to know, or decide."""

    level: Literal["person", "hazard", "refused", "note"]
    """person: to be decided before the run; hazard: trains, with this difference; refused: the old system would not have started with it;
    note: good to know."""
    rule: str
    """The rule that found it."""
    message: str
    """One or two sentences: what, why, what to do."""
    old_keys: tuple[str, ...] = ()
    """What it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What was translated."""

    version: str
    """The release, such as v0.7.1."""
    is_given: bool
    """Whether the user said so; otherwise it was inferred."""
    evidence: tuple[str, ...]
    """Why this one."""
    entry: str
    """What was started."""
    family: str
    """Which default tree."""
    program: Literal["ppo", "sft", "generation", "evaluation", "other"]
    """What kind of program it is."""

    @property
    def release(self) -> str:
        """The release with its evidence, and whether it was inferred."""
        how = "" if self.is_given else "inferred: "
        return f"{described(self.version)} ({how}{'; '.join(self.evidence)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """The whole result; see ``translate``."""

    source: Source
    """What was translated."""
    settings: tuple[Setting, ...]
    """The new configuration, groups first. Empty where a person has to decide whether there is one at all."""
    tokens: tuple[TokenReport, ...]
    """One for each token, in order."""
    findings: tuple[Finding, ...]
    """In the order of their weight."""
    unmapped: Mapping[str, Plain] = field(default_factory=dict)
    """Keys of no release that we know, with their values: a fork's own. Nothing was guessed."""

    @property
    def outcome(self) -> Outcome:
        """The worst of what was found."""
        if any(finding.level == "person" for finding in self.findings):
            return Outcome.PERSON
        is_changed = any(setting.is_pinned for setting in self.settings) or any(f.level in ("hazard", "refused") for f in self.findings)
        return Outcome.PINNED if is_changed else Outcome.CLEAN

    @property
    def overrides(self) -> tuple[str, ...]:
        """For the command line of temper-train, before the shell's own quoting."""
        return tuple(setting.override for setting in self.settings)
