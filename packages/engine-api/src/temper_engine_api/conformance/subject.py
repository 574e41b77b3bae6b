"""The engine under test as a law sees it: jobs go in, what each rank returned comes out."""

from dataclasses import dataclass

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.fleet import Fleet
from temper_engine_api.conformance.rank import Job, P, T


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine at one world size."""

    engine: str
    """Name or ``module:Class``."""
    claims: frozenset[Capability]
    """What it claims."""
    world_size: int
    """Ranks."""
    all_world_sizes: tuple[int, ...]
    """Of the run."""
    fleet: Fleet
    """Its processes."""

    def run(self, job: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run a job on every rank; arguments by name only. What each rank returned, in rank order."""
        __tracebackhide__ = True
        return self.run_at(self.world_size, job, *args, **kwargs)

    def run_at(self, world_size: int, job: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """As ``run``, at another world size."""
        __tracebackhide__ = True
        assert not args, "arguments of a job are given by name"
        return self.fleet.run(job, engine=self.engine, world_size=world_size, arguments=kwargs)
