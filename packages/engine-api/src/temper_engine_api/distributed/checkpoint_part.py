"""The write or read of a checkpoint on one rank, and what the ranks publish about its end."""

import json
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from temper_engine_api.distributed.rank_connections import count_collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEnd:
    """End of a write or read, as the other ranks read it."""

    num_collectives: dict[str, int]
    """Collectives that the rank has started since the write or read began, by group and device."""
    failure: str | None
    """The report of an exception; None if the rank succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPart:
    """A write or read of a checkpoint.

    All ranks begin it, and each ends it at its own time. A rank that has started more collectives
    than a failed one waits for it, or has just been served by it.
    """

    store: Store
    prefix: str
    """Prefix of the keys of one engine's parts."""
    number: int
    """Number of this part, from 1; the same on all ranks."""
    rank: int
    world_size: int
    in_background: bool
    begin: dict[str, int]
    """Collectives started before. Ranks may differ, because gloo also counts messages."""

    def count_collectives(self) -> dict[str, int]:
        """Return the number of collectives since the part began, by group and device."""
        counts = count_collectives(in_background=self.in_background)
        return {name: count - self.begin.get(name, 0) for name, count in counts.items()}

    def publish_end(self, *, failure: str | None) -> None:
        """Tell the other ranks that this one has ended the part."""
        end = PartEnd(num_collectives=self.count_collectives(), failure=failure)
        self.store.set(self._end_key(self.rank), json.dumps(asdict(end)))
        if failure is not None:
            self.store.set(self._failed_key(self.number), "")
        # A failed rank may still read the ends of the previous part.
        if self.number > 2:
            self.store.delete_key(self._end_key(self.rank, number=self.number - 2))
            self.store.delete_key(self._failed_key(self.number - 2))

    def has_failed(self) -> bool:
        """Return True if a rank has published a failure."""
        return bool(self.store.check([self._failed_key(self.number)]))

    def have_all_ended(self) -> bool:
        """Return True if every rank has published its end."""
        return bool(self.store.check([self._end_key(rank) for rank in range(self.world_size)]))

    def is_behind(self) -> bool:
        """Return True if another rank has started more collectives before its end."""
        own = self.count_collectives()
        return any(_is_ahead(end.num_collectives, own) for end in self._read_ends())

    def find_awaited_failure(self) -> str | None:
        """Return the failure of a rank that has started fewer collectives than this one."""
        own = self.count_collectives()
        for end in self._read_ends():
            if end.failure and _is_ahead(own, end.num_collectives):
                return end.failure
        return None

    def _read_ends(self) -> list[PartEnd]:
        keys = [self._end_key(rank) for rank in range(self.world_size)]
        return [
            PartEnd(**json.loads(self.store.get(key))) for key in keys if self.store.check([key])
        ]

    def _end_key(self, rank: int, *, number: int | None = None) -> str:
        return f"{self.prefix}/part/{number or self.number}/end/{rank}"

    def _failed_key(self, number: int) -> str:
        return f"{self.prefix}/part/{number}/failed"


def _is_ahead(counts: dict[str, int], other_counts: dict[str, int]) -> bool:
    """Return True if `counts` is higher than `other_counts` in any group."""
    return any(counts.get(name, 0) > count for name, count in other_counts.items())
