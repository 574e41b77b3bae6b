"""Split a mini-batch as the old workers did.

By row counts, or by tokens with the largest differencing method.

Source of the method: Karmarkar and Karp 1982, "The Differencing Method of Set Partitioning"; for k
sets: Korf 2009, section 3.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

QUADRATIC_FROM = 24576
"""Tokens at which the quadratic part of a row's cost equals its linear part."""


@dataclass(frozen=True, slots=True, order=True)
class _Part:
    """A set of rows and its cost, ordered as in the old code."""

    cost: int
    count: int
    rows: tuple[tuple[int, int], ...]

    def joined(self, other: "_Part") -> "_Part":
        return _Part(self.cost + other.cost, self.count + other.count, self.rows + other.rows)


class _Split:
    """k parts, the most expensive first; the widest spread comes first off a heap."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = sorted(parts, reverse=True)
        self.spread = self.parts[0].cost - self.parts[-1].cost

    def __lt__(self, other: "_Split") -> bool:
        return (self.spread, self.parts[0]) > (other.spread, other.parts[0])

    def joined(self, other: "_Split") -> "_Split":
        return _Split(
            [
                own.joined(others)
                for own, others in zip(self.parts, reversed(other.parts), strict=True)
            ]
        )


def rows_by_count(num_rows: int, *, size: int) -> list[list[int]]:
    """Split indices into consecutive pieces of ``size``; the last may be shorter."""
    return [list(range(first, min(first + size, num_rows))) for first in range(0, num_rows, size)]


def rows_by_tokens(
    lengths: Sequence[int], *, max_tokens: int, multiple: int = 1
) -> list[list[int]]:
    """Balance the cost of micro-batches, and return the rows of each.

    ``max_tokens`` decides the number, and is no hard cap.

    The number is raised to a multiple of ``multiple``, as interleaved pipelines want it.

    The most expensive micro-batches come in the middle, the cheapest at both ends.
    """
    number = min(len(lengths), -(-sum(lengths) // max_tokens))
    number += -number % multiple
    costs = [QUADRATIC_FROM * n + n * n for n in lengths]
    parts = [sorted(row for row, _ in part.rows) for part in _even_split(costs, number).parts]
    parts.sort(
        key=lambda rows: (sum(costs[row] for row in rows), rows[0] if rows else 0), reverse=True
    )
    # A pipeline idles while it fills and drains, which takes less time with cheap micro-batches.
    return parts[::2][::-1] + parts[1::2]


def _even_split(costs: Sequence[int], number: int) -> _Split:
    empty = _Part(0, 0, ())
    heap: list[_Split] = []
    for cost, row in sorted((cost, row) for row, cost in enumerate(costs)):
        heapq.heappush(heap, _Split([_Part(cost, 1, ((row, cost),)), *[empty] * (number - 1)]))
    while len(heap) > 1:
        widest, next_one = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, widest.joined(next_one))
    return heap[0]
