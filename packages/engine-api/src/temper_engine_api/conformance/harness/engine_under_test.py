"""The engine under test as a law sees it: jobs go in, what each rank returned comes out."""

from dataclasses import dataclass

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.rank import Job, P, T
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.layout import Layout, default_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUnderTest:
    """An engine in one layout."""

    engine: str
    """Name or ``module:Class``."""
    capabilities: frozenset[Capability]
    """What it claims."""
    layout: Layout
    """Ranks, and how the engine is configured on them."""
    all_layouts: tuple[Layout, ...]
    """Of the run."""
    rank_pool: RankPool
    """Its processes."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.layout.world_size

    @property
    def comparable_layouts(self) -> tuple[Layout, ...]:
        """Those of the run that are held to the laws with the models of this one; beside layouts with experts also one rank."""
        if self.layout.has_experts:
            return default_layout(1), *(layout for layout in self.all_layouts if layout.has_experts)
        return tuple(layout for layout in self.all_layouts if not layout.has_experts)

    def run(self, job: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run a job on every rank; arguments by name only. What each rank returned, in rank order."""
        __tracebackhide__ = True
        return self.run_in(self.layout, job, *args, **kwargs)

    def run_in(self, layout: Layout, job: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """As ``run``, in another layout."""
        __tracebackhide__ = True
        assert not args, "arguments of a job are given by name"
        return self.rank_pool.run(job, engine=self.engine, layout=layout, arguments=kwargs)
