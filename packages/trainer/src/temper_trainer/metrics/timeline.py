"""The timeline of RL steps: what each rollout and each server did, for the report.

`timeline.jsonl` has only the newest steps, with a bounded number of rollouts per step, so that its
size does not grow with the run. Means over all rollouts of all steps are metrics.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from temper_trainer.metrics.rollout_trace import Phase, ServerOccupancy, Span

TIMELINE_FILE = "timeline.jsonl"
NUM_STEPS = 20
"""Minimum number of steps in the file; it has at most twice as many."""
MAX_ROLLOUTS = 64
"""Maximum number of rollouts per step in the file."""
MIN_SPAN_FRACTION = 1 / 200
"""Spans shorter than this fraction of their rollout are left out of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRollout:
    """A scored rollout and what it did when. Times come from `time.perf_counter`."""

    group: int
    """Number of its prompt in the step."""
    member: int
    """Number among the rollouts of the prompt; -1 is the greedy one of ReMax."""
    num_turns: int
    num_tokens: int
    """Number of sampled tokens."""
    reward: float | None
    """Before shaping; None if the environment or scoring failed."""
    weight_version: int
    """Version of the oldest weights that sampled it."""
    spans: Sequence[Span]
    """Spans in the order of their ends. Those of sampling may overlap each other and others."""
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
    """When training began, with all rollouts of the step."""
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
    """Return a step as a line of the file.

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
    """Return at most MAX_ROLLOUTS of all durations, with the fastest and the slowest one."""
    if len(rollouts) <= MAX_ROLLOUTS:
        return list(rollouts)
    ranked = sorted(range(len(rollouts)), key=lambda i: rollouts[i].seconds)
    last = len(rollouts) - 1
    chosen = sorted(ranked[i * last // (MAX_ROLLOUTS - 1)] for i in range(MAX_ROLLOUTS))
    return [rollouts[i] for i in chosen]
