"""What one rank of a replica knows, on all of its ranks: losses and answers lie on the last stage of a pipeline only."""

from typing import TypeVar, cast

from temper_engine_api.engine import BaseEngine

T = TypeVar("T")


def from_replica(engine: BaseEngine, item: T | None) -> T:
    """What the rank that returns outputs holds, on every rank of its replica. Collective."""
    topology = engine.topology
    if topology.world_size == topology.dp.size:
        return cast("T", item)
    gathered = engine.gather_objects((topology.dp.rank, topology.returns_outputs, item if topology.returns_outputs else None))
    (found,) = (held for replica, speaks, held in gathered if speaks and replica == topology.dp.rank)
    return cast("T", found)


def of_replicas(engine: BaseEngine, item: T) -> list[T]:
    """One item of each replica, in the order of ranks, on every rank. Collective."""
    gathered = engine.gather_objects((engine.topology.returns_outputs, item))
    return [held for speaks, held in gathered if speaks]
