"""What a run of the kit found: laws by group and layout, versions, and whether the engine conforms; and the same as JSON."""

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version

from temper_engine_api.registry import ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Laws about one thing: the tests of one file."""

    about: str
    """A line for the report."""
    is_mandatory: bool = True
    """Whether an engine can be called conforming without having been held to it."""


GROUPS = {
    "gradient": Group(about="loss and gradient do not depend on how the mini-batch is split"),
    "update": Group(about="AdamW, clipping, schedules and skipped updates"),
    "logprob": Group(about="log-probs and entropies: packing, temperature, float32"),
    "value": Group(about="values and scores", is_mandatory=False),
    "batch": Group(about="plans are executed as given, outputs are in input order"),
    "checkpoint": Group(about="resume, damage, retention, other layouts"),
    "weights": Group(about="export and load under Hugging Face names, portable state"),
    "adapter": Group(
        about="LoRA: training, disabling, merging, exchange with PEFT",
        is_mandatory=False,
    ),
    "expert_adapter": Group(
        about="LoRA inside MoE experts, exchange with PEFT", is_mandatory=False
    ),
    "call_order": Group(about="invalid call orders are rejected"),
    "rfc_loop": Group(about="the RFC's training loop as users write it"),
    "offload": Group(about="offloading and moving change no number", is_mandatory=False),
    "capability": Group(about="what is not claimed is rejected"),
}


_DEPENDENCIES = ("torch", "transformers", "peft", "safetensors", "megatron-core", "megatron-bridge")


class Outcome(StrEnum):
    """Of one law in one layout."""

    PASSED = "passed"
    """It holds."""
    FAILED = "failed"
    """It does not."""
    EXPECTED_FAILURE = "expected failure"
    """It does not, as the file of expected failures says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceResult:
    """One law in one layout with one set of parameters."""

    test: str
    """Name of the test with its parameters."""
    group: str
    """One of GROUPS."""
    layout: str
    """Name of the layout."""
    outcome: Outcome
    """What was seen."""
    detail: str = ""
    """First line of the failure, or the reason of an expected one."""


@dataclass(slots=True, kw_only=True)
class ConformanceRun:
    """Collected while the run goes on."""

    engine: str
    """As named on the command line."""
    layouts: tuple[str, ...]
    """Asked for, by name."""
    versions: Mapping[str, str]
    """Of Python and of the packages that matter, by name."""
    compute: str = "fp32"
    """What the engine computed in, where a law did not say."""
    results: list[ConformanceResult] = field(default_factory=list)
    """In the order of the run."""
    unclaimed: list[str] = field(default_factory=list)
    """Laws about capabilities that the engine does not claim."""
    num_deselected: int = 0
    """Laws left out by hand."""

    def count(self, group: str, layout: str, outcome: Outcome) -> int:
        """Laws of a group in a layout with this outcome."""
        return sum(
            f.group == group and f.layout == layout and f.outcome is outcome for f in self.results
        )

    def with_outcome(self, outcome: Outcome) -> list[ConformanceResult]:
        """All with this outcome."""
        return [finding for finding in self.results if finding.outcome is outcome]

    @property
    def missing_groups(self) -> list[str]:
        """Mandatory groups of which no law ran in some layout."""
        ran = Counter((finding.group, finding.layout) for finding in self.results)
        return [
            name
            for name, group in GROUPS.items()
            if group.is_mandatory and not all(ran[name, n] for n in self.layouts)
        ]

    @property
    def verdict(self) -> str:
        """One sentence."""
        broken, expected = (
            len(self.with_outcome(Outcome.FAILED)),
            len(self.with_outcome(Outcome.EXPECTED_FAILURE)),
        )
        if broken:
            return f"does not conform: {broken} of {len(self.results)} laws are broken"
        if self.num_deselected or self.missing_groups:
            left_out = ", ".join(self.missing_groups) or f"{self.num_deselected} laws"
            return f"a partial run, from which nothing follows: left out were {left_out}"
        if expected:
            return f"conforms but for {expected} expected failures among {len(self.results)} laws"
        return f"conforms: {len(self.results)} laws hold" + (
            "" if self.compute == "fp32" else f" in {self.compute}"
        )


def collect_versions(module: str) -> dict[str, str]:
    """Python, the contract, the distribution of this module, and what it may stand on."""
    found = {"Python": platform.python_version()}
    package = module.partition(".")[0]
    # Of what is installed in place nobody knows which modules it owns; its entry point says.
    points = [
        point for point in entry_points(group=ENGINES) if point.module.partition(".")[0] == package
    ]
    owners = packages_distributions().get(package, []) or [
        point.dist.name for point in points if point.dist is not None
    ]
    for name in dict.fromkeys(["temper-engine-api", *owners, *_DEPENDENCIES]):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def merge_runs(runs: Iterable[ConformanceRun]) -> list[ConformanceRun]:
    """Runs of one engine with the same versions, in layouts of their own, as one."""
    together: list[ConformanceRun] = []
    for run in runs:
        same = [
            other
            for other in together
            if (other.engine, other.compute, other.versions)
            == (run.engine, run.compute, run.versions)
        ]
        if same and not set(same[0].layouts) & set(run.layouts):
            same[0].layouts += run.layouts
            same[0].results += run.results
            same[0].unclaimed += run.unclaimed
            same[0].num_deselected += run.num_deselected
        else:
            together.append(run)
    return together


def to_json(run: ConformanceRun) -> str:
    """To be read by ``from_json``."""
    return json.dumps(asdict(run), indent=1) + "\n"


def from_json(text: str) -> ConformanceRun:
    """What ``to_json`` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        fields = json.loads(text)
        results = [
            ConformanceResult(**{**row, "outcome": Outcome(row["outcome"])})
            for row in fields.pop("results")
        ]
        return ConformanceRun(results=results, layouts=tuple(fields.pop("layouts")), **fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected the findings of a run, as --results writes them, but {error!r}"
        ) from error
