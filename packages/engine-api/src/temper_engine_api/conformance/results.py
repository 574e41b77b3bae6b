"""Results of a run of the kit: tests by group and layout, versions, verdict, and JSON."""

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version

from temper_engine_api.registry import ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The conformance tests in one file."""

    about: str
    """One line for the report."""
    is_mandatory: bool = True
    """If True, an engine conforms only if these tests ran and passed."""


GROUPS = {
    "gradient": Group(about="loss and gradient do not depend on how the mini-batch is split"),
    "update": Group(about="AdamW, clipping, schedules and skipped updates"),
    "logprob": Group(about="log-probs and entropies: packing, temperature, float32"),
    "sizes": Group(about="long sequences, many short ones, odd numbers of micro-batches"),
    "model_settings": Group(about="settings of the model take effect or are rejected"),
    "settings": Group(about="settings of the engine take effect or are rejected"),
    "optimizer": Group(about="ten updates, extreme gradients, every head is trained"),
    "value": Group(about="values and scores", is_mandatory=False),
    "batch": Group(about="plans are executed as given, outputs are in input order"),
    "checkpoint": Group(about="resume, background saves, other layouts"),
    "step_directory": Group(about="damage, failed saves, retention, remote copies"),
    "weights": Group(about="export and load under Hugging Face names, portable state"),
    "adapter": Group(
        about="LoRA: training, disabling, merging, exchange with PEFT",
        is_mandatory=False,
    ),
    "expert_adapter": Group(
        about="LoRA inside MoE experts, exchange with PEFT", is_mandatory=False
    ),
    "family": Group(
        about="families of models that --families names: numbers, export, LoRA, resume",
        is_mandatory=False,
    ),
    "router": Group(
        about="losses of the routers of MoE models, and loads of their experts", is_mandatory=False
    ),
    "call_order": Group(about="invalid call orders are rejected"),
    "failed_call": Group(about="an exception costs one update, and every rank learns of it"),
    "interrupted_call": Group(
        about="the same for exceptions in a mode, in init_model() and in loads"
    ),
    "rfc_loop": Group(about="the RFC's training loop as users write it"),
    "offload": Group(about="offloading and moving change no number", is_mandatory=False),
    "capability": Group(about="what is not claimed is rejected"),
}


_DEPENDENCIES = ("torch", "transformers", "peft", "safetensors", "megatron-core", "megatron-bridge")


class Outcome(StrEnum):
    """Outcome of one test in one layout."""

    PASSED = "passed"
    FAILED = "failed"
    EXPECTED_FAILURE = "expected failure"
    """Failed, as the file of expected failures says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceResult:
    """Result of one test in one layout with given parameters."""

    test: str
    """Name of the test with its parameters."""
    group: str
    """A key of GROUPS."""
    layout: str
    outcome: Outcome
    detail: str = ""
    """First line of the failure message, or why the failure is expected."""


@dataclass(slots=True, kw_only=True)
class ConformanceRun:
    """Results of a kit run, filled as it runs."""

    engine: str
    """Entry point name or `module:Class`, as on the command line."""
    layouts: tuple[str, ...]
    """Names of the requested layouts."""
    versions: Mapping[str, str]
    """Versions of Python, the engine's package and its main dependencies."""
    compute: str = "fp32"
    """Compute dtype of tests that do not set one."""
    results: list[ConformanceResult] = field(default_factory=list)
    """Results in run order."""
    unclaimed: list[str] = field(default_factory=list)
    """Tests of capabilities that the engine does not claim."""
    num_deselected: int = 0
    """Number of tests that options such as -k or --groups left out."""
    num_waiting: int = 0
    """Number of tests that have not run yet; above 0 at the end if the run was stopped."""

    def count(self, group: str, layout: str, outcome: Outcome) -> int:
        """Count the tests of a group in a layout with this outcome."""
        return sum(
            f.group == group and f.layout == layout and f.outcome is outcome for f in self.results
        )

    def with_outcome(self, outcome: Outcome) -> list[ConformanceResult]:
        """Return the results with this outcome."""
        return [result for result in self.results if result.outcome is outcome]

    @property
    def missing_groups(self) -> list[str]:
        """Mandatory groups without any result in some layout."""
        ran = Counter((result.group, result.layout) for result in self.results)
        return [
            name
            for name, group in GROUPS.items()
            if group.is_mandatory and not all(ran[name, n] for n in self.layouts)
        ]

    @property
    def verdict(self) -> str:
        """A sentence without its subject, such as "conforms: 228 tests passed"."""
        failed, expected = (
            len(self.with_outcome(Outcome.FAILED)),
            len(self.with_outcome(Outcome.EXPECTED_FAILURE)),
        )
        if failed:
            return f"does not conform: {failed} of {len(self.results)} tests failed"
        num_left_out = self.num_deselected + self.num_waiting
        if num_left_out or self.missing_groups:
            left_out = ", ".join(self.missing_groups) or f"{num_left_out} tests"
            return f"was tested in part only, which does not show conformance; left out: {left_out}"
        if expected:
            return (
                f"conforms except for {expected} expected failures among {len(self.results)} tests"
            )
        return f"conforms: {len(self.results)} tests passed" + (
            "" if self.compute == "fp32" else f" in {self.compute}"
        )


def collect_versions(module: str) -> dict[str, str]:
    """Return the versions of Python, temper-engine-api, the engine's package and its libraries.

    Args:
        module: Module of the engine's class.
    """
    versions = {"Python": platform.python_version()}
    package = module.partition(".")[0]
    # The metadata of an editable install does not list its modules; its entry point does.
    points = [
        point for point in entry_points(group=ENGINES) if point.module.partition(".")[0] == package
    ]
    distributions = _map_packages_to_distributions().get(package, []) or [
        point.dist.name for point in points if point.dist is not None
    ]
    for name in dict.fromkeys(["temper-engine-api", *distributions, *_DEPENDENCIES]):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@cache
def _map_packages_to_distributions() -> Mapping[str, list[str]]:
    # Reads the metadata of every installed distribution, and the kit's own tests run it 150 times
    # in one process.
    return packages_distributions()


def merge_runs(runs: Iterable[ConformanceRun]) -> list[ConformanceRun]:
    """Merge runs of one engine with the same versions and different layouts."""
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
            same[0].num_waiting += run.num_waiting
        else:
            together.append(run)
    return together


def to_json(run: ConformanceRun) -> str:
    """Serialize a run for `from_json`."""
    return json.dumps(asdict(run), indent=1) + "\n"


def from_json(text: str) -> ConformanceRun:
    """Parse what `to_json` wrote.

    Raises:
        ValueError: The text has another format.
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
            f"not the results of a run, as --results writes them: {error!r}; run the kit again."
        ) from error
