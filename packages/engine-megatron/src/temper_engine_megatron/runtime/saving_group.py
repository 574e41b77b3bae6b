"""A process group of its own for threads that save while the engine trains: collectives of a group must not overlap."""

from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

ObjectT = TypeVar("ObjectT")


class SavingGroup:
    """All ranks of the engine, by gloo; made when it is first needed."""

    def __init__(self, *, world_size: int, timeout_s: float) -> None:
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None

    def open(self) -> None:
        """Make the group, once. Collective."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def gather(self, item: ObjectT) -> list[ObjectT]:
        """Small picklable objects of every rank in rank order, on every rank; collective among the threads."""
        assert self._group is not None, "open() comes before, on the main thread"
        gathered = [item] * self._world_size
        dist.all_gather_object(gathered, item, group=self._group)
        return gathered

    def close(self) -> None:
        """Destroy the group, if there is one."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
