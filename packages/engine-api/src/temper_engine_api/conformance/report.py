"""What a run of the kit found: laws by group and world size, versions, and whether the engine conforms."""

import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, packages_distributions, version


class Outcome(StrEnum):
    """Of one law at one world size."""

    HELD = "held"
    """It holds."""
    BROKEN = "broken"
    """It does not."""
    EXPECTED = "expected failure"
    """It does not, as the file of expected failures says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Laws about one thing: the tests of one file."""

    about: str
    """A line for the report."""
    is_mandatory: bool = True
    """Whether an engine can be called conforming without having been held to it."""


GROUPS = {
    "gradient": Group(about="one loss and one gradient, however the mini-batch is split"),
    "update": Group(about="AdamW, clipping, schedules, and updates that must not happen"),
    "logprob": Group(about="log-probs and entropies, packed, tempered, in float32"),
    "value": Group(about="values and scores", is_mandatory=False),
    "batch": Group(about="plans are executed, order and samples are kept"),
    "checkpoint": Group(about="resume, damage, retention, other world sizes"),
    "weights": Group(about="export and load under Hugging Face names, the portable state"),
    "state_machine": Group(about="calls in an order without meaning are refused"),
    "rfc_loop": Group(about="the RFC's training loop as users write it"),
    "residency": Group(about="moving and offloading change no number", is_mandatory=False),
    "capability": Group(about="what is not claimed is refused"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One law at one world size with one set of parameters."""

    law: str
    """Name of the test with its parameters."""
    group: str
    """One of GROUPS."""
    world_size: int
    """Ranks."""
    outcome: Outcome
    """What was seen."""
    detail: str = ""
    """First line of the failure, or the reason of an expected one."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """Collected while the run goes on."""

    engine: str
    """As named on the command line."""
    module: str
    """Of the engine's class."""
    world_sizes: tuple[int, ...]
    """Asked for."""
    found: list[Finding] = field(default_factory=list)
    """In the order of the run."""
    unclaimed: list[str] = field(default_factory=list)
    """Laws about capabilities that the engine does not claim."""
    num_deselected: int = 0
    """Laws left out by hand."""

    def count(self, group: str, world_size: int, outcome: Outcome) -> int:
        """Laws of a group at a world size with this outcome."""
        return sum(f.group == group and f.world_size == world_size and f.outcome is outcome for f in self.found)

    def of_outcome(self, outcome: Outcome) -> list[Finding]:
        """All with this outcome."""
        return [finding for finding in self.found if finding.outcome is outcome]

    @property
    def missing_groups(self) -> list[str]:
        """Mandatory groups of which no law ran at some world size."""
        ran = Counter((finding.group, finding.world_size) for finding in self.found)
        return [name for name, group in GROUPS.items() if group.is_mandatory and not all(ran[name, n] for n in self.world_sizes)]

    @property
    def verdict(self) -> str:
        """One sentence."""
        broken, expected = len(self.of_outcome(Outcome.BROKEN)), len(self.of_outcome(Outcome.EXPECTED))
        if broken:
            return f"does not conform: {broken} of {len(self.found)} laws are broken"
        if self.num_deselected or self.missing_groups:
            left_out = ", ".join(self.missing_groups) or f"{self.num_deselected} laws"
            return f"a partial run, from which nothing follows: left out were {left_out}"
        if expected:
            return f"conforms but for {expected} expected failures among {len(self.found)} laws"
        return f"conforms: {len(self.found)} laws hold"


def summary_of(findings: Findings) -> Iterator[str]:
    """The matrix for a terminal."""
    sizes = findings.world_sizes
    yield "group".ljust(15) + "".join(f"{n} rank{'s' if n > 1 else ''}".rjust(18) for n in sizes)
    for group in GROUPS:
        yield group.ljust(15) + "".join(_cell(findings, group, n).rjust(18) for n in sizes)
    if findings.unclaimed:
        yield f"not claimed, so refused instead: {len(findings.unclaimed)} laws"
    yield f"{findings.engine} {findings.verdict}"


def render(findings: Findings) -> str:
    """The report as markdown."""
    sizes = findings.world_sizes
    lines = [f"# Conformance of `{findings.engine}`", "", f"It {findings.verdict}.", "", "| | version |", "|---|---|"]
    lines += [f"| {name} | {number} |" for name, number in _versions(findings.module)]
    lines += ["", "| group | about | " + " | ".join(f"{n} rank{'s' if n > 1 else ''}" for n in sizes) + " |"]
    lines += ["|---" * (2 + len(sizes)) + "|"]
    for name, group in GROUPS.items():
        cells = " | ".join(_cell(findings, name, n) for n in sizes)
        lines.append(f"| {name}{'' if group.is_mandatory else ' (optional)'} | {group.about} | {cells} |")
    lines += _list_of("Broken", [f"`{f.law}`: {f.detail}" for f in findings.of_outcome(Outcome.BROKEN)])
    lines += _list_of("Expected failures", [f"`{f.law}`: {f.detail}" for f in findings.of_outcome(Outcome.EXPECTED)])
    lines += _list_of("Not claimed", [f"`{law}`" for law in findings.unclaimed])
    lines += _list_of("Laws", [f"{law}: {count}" for law, count in _instances(findings).items()])
    return "\n".join(lines) + "\n"


def _instances(findings: Findings) -> dict[str, str]:
    """How often each law ran and held."""
    ran = Counter(finding.law.partition("[")[0] for finding in findings.found)
    held = Counter(finding.law.partition("[")[0] for finding in findings.of_outcome(Outcome.HELD))
    return {f"`{law}`": f"{held[law]} of {count}" for law, count in ran.items()}


def _cell(findings: Findings, group: str, world_size: int) -> str:
    counts = {outcome: findings.count(group, world_size, outcome) for outcome in Outcome}
    if not any(counts.values()):
        return "-"
    total = sum(counts.values())
    notes = [f"{counts[o]} {word}" for o, word in ((Outcome.BROKEN, "broken"), (Outcome.EXPECTED, "expected")) if counts[o]]
    return f"{counts[Outcome.HELD]}/{total}" + (f" ({', '.join(notes)})" if notes else "")


def _list_of(title: str, entries: Iterable[str]) -> list[str]:
    entries = list(entries)
    return ["", f"## {title}", "", *(f"* {entry}" for entry in entries)] if entries else []


def _versions(module: str) -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    owners = packages_distributions().get(module.partition(".")[0], [])
    for name in dict.fromkeys(["temper-engine-api", *owners, "torch", "transformers", "peft", "safetensors"]):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
