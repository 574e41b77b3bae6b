"""Which rank writes which tensor of a checkpoint: one of those that hold a part of it, so that all write about as much."""

from collections import Counter
from collections.abc import Sequence


def assign_writers(sizes: Sequence[int], *, holders: Sequence[Sequence[int]]) -> list[int]:
    """A rank for each tensor, the same wherever this is asked.

    The largest first, each to the rank with the least so far; what few ranks hold before what many hold, which fills the gaps. Of ranks
    that hold the same tensors none has more than another by more than the largest tensor.

    Args:
        sizes: of each tensor, in any unit.
        holders: of each tensor, the ranks that hold a part of it.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies" (longest processing time first).
    """
    shares: Counter[int] = Counter()
    owners = dict.fromkeys(range(len(sizes)), 0)
    for i in sorted(owners, key=lambda i: (len(holders[i]), -sizes[i], i)):
        owners[i] = min(holders[i], key=lambda rank: (shares[rank], rank))
        shares[owners[i]] += sizes[i]
    return list(owners.values())
