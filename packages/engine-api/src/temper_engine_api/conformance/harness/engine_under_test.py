"""The engine under test: it runs a job on every rank and returns the results."""

from dataclasses import dataclass

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.rank import Job, P, T
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

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def comparable_layouts(self) -> tuple[Layout, ...]:
        """Layouts of the run that use the same models as this one.

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
        return self.rank_pool.run(job, engine=self.engine, layout=layout, arguments=kwargs)
