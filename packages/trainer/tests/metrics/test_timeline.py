"""Test the rows of the timeline, and that its file does not grow with the run."""

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from temper_trainer.metrics.run_log import RunLog
from temper_trainer.metrics.timeline import (
    MAX_ROLLOUTS,
    NUM_STEPS,
    ServerOccupancy,
    Span,
    StepTimeline,
    TimedRollout,
    measure_phases,
    measure_timeline,
    to_timeline_row,
)


def make_rollout(
    *, begin: float = 0.0, seconds: float = 10.0, spans: Sequence[Span] = (), group: int = 0
) -> TimedRollout:
    return TimedRollout(
        group=group,
        member=0,
        num_turns=1,
        num_tokens=8,
        reward=0.5,
        weight_version=1,
        spans=spans,
        requested_at=begin,
        scored_at=begin + seconds,
    )


def make_timeline(rollouts: Sequence[TimedRollout], *, step: int = 1) -> StepTimeline:
    return StepTimeline(
        step=step,
        began_at=5.0,
        trained_at=20.0,
        published_at=30.0,
        weight_version=2,
        rollouts=rollouts,
        servers={
            0: ServerOccupancy(
                begin=5.0, bin_s=12.5, open_requests=(4.0, 2.0), mean=3.0, idle_fraction=0.25
            )
        },
        capacity=8,
        tokens_by_staleness={1: 30, 0: 90},
    )


def test_phases_and_waiting_add_up_to_the_time_of_a_rollout() -> None:
    spans = [Span("sampling", 1, 3), Span("environment", 4, 5), Span("scoring", 7, 10)]
    phases = measure_phases(make_rollout(spans=spans))
    assert phases == {"sampling": 2.0, "environment": 1.0, "scoring": 3.0, "waiting": 4.0}


def test_overlapping_spans_count_once_and_sampling_first() -> None:
    spans = [
        Span("sampling", 1, 4),
        Span("sampling", 2, 5),
        Span("environment", 3, 7),
        Span("scoring", 8, 10),
    ]
    phases = measure_phases(make_rollout(spans=spans))
    assert phases == {"sampling": 4.0, "environment": 2.0, "scoring": 2.0, "waiting": 2.0}


def test_metrics_are_means_over_all_rollouts() -> None:
    rollouts = [
        make_rollout(seconds=4.0, spans=[Span("sampling", 0, 4)]),
        make_rollout(seconds=8.0, spans=[Span("sampling", 2, 4)]),
    ]
    metrics = measure_timeline(make_timeline(rollouts))
    assert metrics["time/per_rollout/sampling_s"] == 3.0
    assert metrics["time/per_rollout/waiting_s"] == 3.0
    assert metrics["time/per_rollout/max_s"] == 8.0
    assert metrics["speed/server_open_requests"] == 3.0
    assert metrics["speed/server_idle_fraction"] == 0.25


def test_times_of_a_row_count_from_its_first_request() -> None:
    row = json.loads(json.dumps(to_timeline_row(make_timeline([make_rollout(begin=2.0)]))))
    assert (row["began_s"], row["trained_s"], row["published_s"]) == (3.0, 18.0, 28.0)
    assert row["rollouts"][0]["requested_s"] == 0.0
    assert row["servers"]["0"] == {"begin_s": 3.0, "bin_s": 12.5, "open": [4.0, 2.0]}
    assert row["staleness"] == {"0": 90, "1": 30}


def test_of_many_rollouts_the_fastest_the_slowest_and_some_between_are_kept() -> None:
    rollouts = [make_rollout(seconds=1.0 + (i * 7) % 1000, group=i) for i in range(1000)]
    shown = to_timeline_row(make_timeline(rollouts))["rollouts"]
    assert isinstance(shown, list)
    durations = sorted(each["scored_s"] - each["requested_s"] for each in shown)
    assert len(durations) == MAX_ROLLOUTS
    assert (durations[0], durations[-1]) == (1.0, 1000.0)
    steps = [b - a for a, b in itertools.pairwise(durations)]
    assert max(steps) < 2 * 1000 / MAX_ROLLOUTS


def test_spans_too_short_to_be_seen_are_left_out() -> None:
    spans = [Span("environment", i / 1000, (i + 0.5) / 1000) for i in range(10_000)]
    row = to_timeline_row(make_timeline([make_rollout(spans=[*spans, Span("sampling", 1, 9)])]))
    assert row["rollouts"][0]["spans"] == [["sampling", 1.0, 9.0]]  # type: ignore[index]


def open_log(folder: Path, *, resume_step: int | None = None) -> RunLog:
    console = Console(file=io.StringIO())
    return RunLog(folder, trackers=(), progress=False, console=console, resume_step=resume_step)


@pytest.mark.parametrize("num_steps", [30, 200])
def test_file_keeps_the_newest_steps(tmp_path: Path, num_steps: int) -> None:
    with open_log(tmp_path) as log:
        for step in range(1, num_steps + 1):
            log.add_timeline(make_timeline([make_rollout()], step=step))
    lines = (tmp_path / "timeline.jsonl").read_text().splitlines()
    assert NUM_STEPS <= len(lines) <= 2 * NUM_STEPS
    assert [json.loads(line)["step"] for line in lines] == list(
        range(num_steps - len(lines) + 1, num_steps + 1)
    )


def test_resumed_run_repeats_no_step(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        for step in range(1, 6):
            log.add_timeline(make_timeline([make_rollout()], step=step))
    with open_log(tmp_path, resume_step=3) as log:
        log.add_timeline(make_timeline([make_rollout()], step=4))
    lines = (tmp_path / "timeline.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
