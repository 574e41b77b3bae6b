"""The engine under test: it runs a job on every rank and returns the results."""

from dataclasses import dataclass, field
from pathlib import Path

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.rank import EngineSetup, Job, P, T
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.layout import Layout, default_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUnderTest:
    """An engine in one layout, on which a test runs jobs."""

    engine: str
    """Entry point name or ``module:Class``."""
    capabilities: frozenset[Capability]
    """Capabilities that the engine claims."""
    layout: Layout
    all_layouts: tuple[Layout, ...]
    rank_pool: RankPool
    model_paths: set[str] = field(default_factory=set)
    """Directories of the models that the test has used so far."""

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def num_data_ranks(self) -> int:
        """Number of data-parallel ranks in the last job, for failure messages."""
        return self.rank_pool.num_data_ranks

    def describe(self) -> str:
        """Return the layout and the models of the test, for a failure message."""
        models = ", ".join(
            f"{name} with seed {seed}"
            for name, _, seed in sorted(
                Path(path).name.rpartition("-") for path in self.model_paths
            )
        )
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"layout {self.layout.name} ({ranks}); tiny model {models}"

    @property
    def comparable_layouts(self) -> tuple[Layout, ...]:
        """Layouts in this run that use the same models as the current layout.

        Layouts with experts use MoE models, and so can one rank with the engine's defaults, which
        is added to them.
        """
        if self.layout.has_experts:
            return default_layout(1), *(layout for layout in self.all_layouts if layout.has_experts)
        return tuple(layout for layout in self.all_layouts if not layout.has_experts)

    def run(self, job: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run a job on every rank; return the results in rank order."""
        __tracebackhide__ = True
        return self.run_in(self.layout, job, *args, **kwargs)

    def run_in(self, layout: Layout, job: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run a job as `run` does, in another layout."""
        __tracebackhide__ = True
        assert not args, "pass the arguments of a job by keyword"
        setup = kwargs.get("setup")
        if isinstance(setup, EngineSetup):
            self.model_paths.add(setup.model_path)
        return self.rank_pool.run(job, engine=self.engine, layout=layout, arguments=kwargs)
