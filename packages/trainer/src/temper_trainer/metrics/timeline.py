"""The timeline of RL steps: what each rollout and each server did when.

Rollouts and servers record their times while they run, at little cost. `timeline.jsonl` has only
the newest steps, with a bounded number of rollouts per step, so that its size does not grow with
the run. Means over all rollouts of all steps are metrics.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["sampling", "environment", "scoring"]
"""Activity of a rollout. For the remaining time it waits."""

TIMELINE_FILE = "timeline.jsonl"
NUM_STEPS = 20
"""Minimum number of steps in the file; it has at most twice as many."""
MAX_ROLLOUTS = 64
"""Maximum number of rollouts per step in the file."""
MIN_SPAN_FRACTION = 1 / 200
"""Spans shorter than this fraction of their rollout are left out of the file."""
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
    """Spans by end time. Spans of an agent's requests may overlap."""

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add a span for the body."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(phase, begin, time.perf_counter()))

    @contextmanager
    def measure_from(self, phase: Phase) -> Iterator[Callable[[], None]]:
        """Add a span from the first call of the function that this yields to the body's end."""
        begin: float | None = None

        def start() -> None:
            nonlocal begin
            begin = time.perf_counter() if begin is None else begin

        try:
            yield start
        finally:
            if begin is not None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRollout:
    """A scored rollout and what it did when. Times come from `time.perf_counter`."""

    group: int
    """Number of its prompt in the step."""
    member: int
    """Number among the prompt's rollouts; -1 is the greedy one of ReMax."""
    num_turns: int
    num_tokens: int
    """Number of sampled tokens."""
    reward: float | None
    """Before shaping; None if the environment or scoring failed."""
    weight_version: int
    """Version of the oldest weights that sampled it."""
    spans: Sequence[Span]
    """Spans by end time. Sampling spans may overlap with each other and with other spans."""
    requested_at: float
    scored_at: float

    @property
    def seconds(self) -> float:
        """Time from the request to the score."""
        return self.scored_at - self.requested_at


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One RL step, from the request of its first rollout to the published weights."""

    step: int
    began_at: float
    """When the step began: the loop started to wait for its rollouts."""
    trained_at: float
    """When training began, with all rollouts in the step."""
    published_at: float
    """When the new weights were published."""
    weight_version: int
    """Version of the weights when training began."""
    rollouts: Sequence[TimedRollout]
    """All rollouts of the step, also those that are not trained."""
    servers: Mapping[int, ServerOccupancy]
    """Occupancy of each server since the previous step, by its number."""
    capacity: int
    """Number of requests that one server decodes at the same time."""
    tokens_by_staleness: Mapping[int, int]
    """Number of trained tokens by weight age when sampled, in updates."""


def measure_phases(rollout: TimedRollout) -> dict[Phase | str, float]:
    """Return the seconds per phase and spent waiting, which add up to the rollout's time.

    Where spans overlap, sampling counts.

    Example:
        >>> rollout = TimedRollout(
        ...     group=0,
        ...     member=0,
        ...     num_turns=1,
        ...     num_tokens=8,
        ...     reward=1.0,
        ...     weight_version=1,
        ...     spans=[Span("sampling", 1.0, 4.0), Span("scoring", 4.0, 4.5)],
        ...     requested_at=0.0,
        ...     scored_at=4.5,
        ... )
        >>> measure_phases(rollout)
        {'sampling': 3.0, 'environment': 0.0, 'scoring': 0.5, 'waiting': 1.0}
    """
    seconds: dict[Phase | str, float] = {"sampling": 0.0, "environment": 0.0, "scoring": 0.0}
    covered_until = rollout.requested_at
    edges = sorted(
        (edge, sign, span.phase)
        for span in rollout.spans
        for edge, sign in ((span.begin, 1), (span.end, -1))
    )
    num_open = dict.fromkeys(seconds, 0)
    for edge, sign, phase in edges:
        current = next((each for each in seconds if num_open[each]), None)
        if current is not None:
            seconds[current] += edge - covered_until
        covered_until = edge
        num_open[phase] += sign
    seconds["waiting"] = max(0.0, rollout.seconds - sum(seconds.values()))
    return seconds


def measure_timeline(timeline: StepTimeline) -> dict[str, float]:
    """Return the mean seconds of a rollout in each phase, and the servers' occupancy."""
    metrics: dict[str, float] = {}
    if timeline.rollouts:
        phases = [measure_phases(each) for each in timeline.rollouts]
        for name in phases[0]:
            metrics[f"time/per_rollout/{name}_s"] = sum(each[name] for each in phases) / len(phases)
        metrics["time/per_rollout/max_s"] = max(each.seconds for each in timeline.rollouts)
    if servers := timeline.servers.values():
        metrics["speed/server_open_requests"] = sum(each.mean for each in servers) / len(servers)
        metrics["speed/server_idle_fraction"] = sum(each.idle_fraction for each in servers) / len(
            servers
        )
    return metrics


def to_timeline_row(timeline: StepTimeline) -> dict[str, object]:
    """Return a step as a line for the file.

    Times are seconds after ``time_s``, the first request's Unix time.
    """
    shown = _choose_rollouts(timeline.rollouts)
    origin = min([timeline.began_at, *(each.requested_at for each in shown)])

    def offset(at: float) -> float:
        return round(at - origin, 4)

    return {
        "step": timeline.step,
        "time_s": round(time.time() - (time.perf_counter() - origin), 3),
        "began_s": offset(timeline.began_at),
        "trained_s": offset(timeline.trained_at),
        "published_s": offset(timeline.published_at),
        "weight_version": timeline.weight_version,
        "num_rollouts": len(timeline.rollouts),
        "rollouts": [
            {
                "group": each.group,
                "member": each.member,
                "turns": each.num_turns,
                "tokens": each.num_tokens,
                "reward": each.reward if math.isfinite(each.reward or 0.0) else None,
                "version": each.weight_version,
                "requested_s": offset(each.requested_at),
                "scored_s": offset(each.scored_at),
                "spans": [
                    [span.phase, offset(span.begin), offset(span.end)]
                    for span in each.spans
                    if span.end - span.begin >= MIN_SPAN_FRACTION * each.seconds
                ],
            }
            for each in shown
        ],
        "capacity": timeline.capacity,
        "servers": {
            str(number): {
                "begin_s": offset(server.begin),
                "bin_s": server.bin_s,
                "open": [round(each, 2) for each in server.open_requests],
            }
            for number, server in timeline.servers.items()
        },
        "staleness": {str(age): n for age, n in sorted(timeline.tokens_by_staleness.items())},
    }


def _choose_rollouts(rollouts: Sequence[TimedRollout]) -> list[TimedRollout]:
    """Return at most MAX_ROLLOUTS rollouts, from the fastest to the slowest at even ranks."""
    if len(rollouts) <= MAX_ROLLOUTS:
        return list(rollouts)
    ranked = sorted(range(len(rollouts)), key=lambda i: rollouts[i].seconds)
    last = len(rollouts) - 1
    chosen = sorted(ranked[i * last // (MAX_ROLLOUTS - 1)] for i in range(MAX_ROLLOUTS))
    return [rollouts[i] for i in chosen]
