"""Rollout and server times, recorded for every rollout at little cost."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["sampling", "environment", "scoring"]
"""Activity of a rollout. For the remaining time it waits."""

MAX_BINS = 128
"""Bins of a server's occupancy between two `OccupancyGauge.drain` calls."""
_FIRST_WIDTH_S = 0.001
"""Width of a bin at first; it doubles whenever the bins are full."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time that a rollout spent in one phase."""

    phase: Phase
    begin: float
    """`time.perf_counter` when it began."""
    end: float


@dataclass(slots=True)
class RolloutTrace:
    """The spans of one rollout, with all its attempts."""

    requested_at: float = field(default_factory=time.perf_counter)
    """`time.perf_counter` when the rollout was requested."""
    spans: list[Span] = field(default_factory=list)
    """Spans in the order of their ends. Those of an agent's requests may overlap."""

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add a span for the body."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(phase, begin, time.perf_counter()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOccupancy:
    """Open requests of one server over a time."""

    begin: float
    """`time.perf_counter` at the beginning of the first bin."""
    bin_s: float
    """Width of a bin in seconds."""
    open_requests: tuple[float, ...]
    """Mean number of open requests in each bin."""
    mean: float
    """Mean number of open requests."""
    idle_fraction: float
    """Fraction of the time without an open request."""


@dataclass(slots=True)
class _Server:
    """Time integrals of one server since the last drain."""

    num_open: int = 0
    bins: list[float] = field(default_factory=lambda: [0.0] * MAX_BINS)
    """Open requests times seconds."""
    idle_s: float = 0.0
    since: float = 0.0
    """The integrals are complete up to this time."""


class OccupancyGauge:
    """Counts the open requests of each server over time, in bounded memory; from any thread."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._servers: dict[int, _Server] = {}
        self._begin = clock()
        self._bin_s = _FIRST_WIDTH_S

    @contextmanager
    def count(self, num_requests: int = 1) -> Iterator[Callable[[int], None]]:
        """Count requests during the body.

        Yields:
            Function that records their server's number; called again if they move.
        """
        current: int | None = None

        def move(server: int | None) -> None:
            nonlocal current
            with self._lock:
                if current is not None:
                    self._add(current, -num_requests)
                if server is not None:
                    self._add(server, num_requests)
                current = server

        try:
            yield move
        finally:
            move(None)

    def drain(self) -> dict[int, ServerOccupancy]:
        """Return the occupancy of each server since the last call, by its number.

        Servers without a request in that time are left out: they may have left the run.
        """
        with self._lock:
            now = self._clock()
            seconds = max(now - self._begin, 1e-9)
            drained: dict[int, ServerOccupancy] = {}
            for number, server in sorted(self._servers.items()):
                self._integrate(server, now)
                if not any(server.bins):
                    del self._servers[number]
                    continue
                num_bins = min(MAX_BINS, int(seconds / self._bin_s) + 1)
                # The last bin is not over.
                last_s = max(seconds - (num_bins - 1) * self._bin_s, 1e-9)
                widths = [self._bin_s] * (num_bins - 1) + [last_s]
                drained[number] = ServerOccupancy(
                    begin=self._begin,
                    bin_s=self._bin_s,
                    open_requests=tuple(
                        each / width for each, width in zip(server.bins, widths, strict=False)
                    ),
                    mean=sum(server.bins) / seconds,
                    idle_fraction=server.idle_s / seconds,
                )
                self._servers[number] = _Server(num_open=server.num_open, since=now)
            self._begin, self._bin_s = now, _FIRST_WIDTH_S
            return drained

    def _add(self, number: int, num_requests: int) -> None:
        server = self._servers.get(number)
        if server is None:
            server = self._servers[number] = _Server(since=self._begin)
        self._integrate(server, self._clock())
        server.num_open += num_requests

    def _integrate(self, server: _Server, now: float) -> None:
        """Add the time since the last change to the bins."""
        while now - self._begin >= MAX_BINS * self._bin_s:
            self._double_bins()
        if server.num_open == 0:
            server.idle_s += now - server.since
        else:
            index = int((server.since - self._begin) / self._bin_s)
            while server.since < now:
                end = min(now, self._begin + (index + 1) * self._bin_s)
                # Rounding may put the beginning at the very end of the bins.
                server.bins[min(index, MAX_BINS - 1)] += server.num_open * (end - server.since)
                server.since = max(end, server.since)
                index += 1
        server.since = now

    def _double_bins(self) -> None:
        self._bin_s *= 2
        for server in self._servers.values():
            pairs = zip(server.bins[::2], server.bins[1::2], strict=True)
            merged = [first + second for first, second in pairs]
            server.bins = merged + [0.0] * (MAX_BINS - len(merged))
