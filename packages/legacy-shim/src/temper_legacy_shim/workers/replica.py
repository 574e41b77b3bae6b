"""Share results of one rank with its replica.

Losses and outputs are on the last pipeline stage only.
"""

from typing import TypeVar, cast

from temper_engine_api.engine import BaseEngine

T = TypeVar("T")


def from_replica(engine: BaseEngine, item: T | None) -> T:
    """Share the item of the rank that returns outputs with all ranks of its replica. Collective."""
    topology = engine.topology
    if topology.world_size == topology.dp.size:
        return cast("T", item)
    gathered = engine.gather_objects((topology.dp.rank, topology.returns_outputs, item if topology.returns_outputs else None))
    (result,) = (kept for replica, speaks, kept in gathered if speaks and replica == topology.dp.rank)
    return cast("T", result)


def gather_replicas(engine: BaseEngine, item: T) -> list[T]:
    """Return one item of each replica, in the order of ranks, on every rank. Collective."""
    gathered = engine.gather_objects((engine.topology.returns_outputs, item))
    return [kept for speaks, kept in gathered if speaks]
