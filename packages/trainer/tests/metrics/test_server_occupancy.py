"""Test the occupancy of servers with a clock of the test's own."""

import pytest

from temper_trainer.metrics.timeline import MAX_BINS, OccupancyGauge


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_occupancy_is_the_time_average_of_open_requests() -> None:
    clock = Clock()
    gauge = OccupancyGauge(clock=clock)
    clock.now += 1
    with gauge.count(2) as on_server:
        on_server(0)
        clock.now += 2
        with gauge.count() as on_other_server:
            on_other_server(1)
            clock.now += 1
    clock.now += 4
    first, second = gauge.drain().values()
    # Two requests for 3 of 8 seconds, and one for 1 of 8.
    assert (first.mean, first.idle_fraction) == pytest.approx((0.75, 0.625))
    assert (second.mean, second.idle_fraction) == pytest.approx((0.125, 0.875))
    assert sum(first.open_requests) * first.bin_s == pytest.approx(6.0, abs=2 * first.bin_s)


def test_open_requests_count_in_the_next_step_too() -> None:
    clock = Clock()
    gauge = OccupancyGauge(clock=clock)
    with gauge.count() as on_server:
        on_server(3)
        clock.now += 1
        assert gauge.drain()[3].mean == pytest.approx(1.0)
        clock.now += 1
    clock.now += 1
    assert gauge.drain()[3].mean == pytest.approx(0.5)
    clock.now += 1
    assert gauge.drain() == {}


def test_request_that_moves_to_another_server_counts_there() -> None:
    clock = Clock()
    gauge = OccupancyGauge(clock=clock)
    with gauge.count() as on_server:
        on_server(0)
        clock.now += 1
        on_server(1)
        clock.now += 3
    drained = gauge.drain()
    assert [drained[number].mean for number in (0, 1)] == pytest.approx([0.25, 0.75])


def test_bins_are_bounded_and_keep_the_integral() -> None:
    clock = Clock()
    gauge = OccupancyGauge(clock=clock)
    for _ in range(5000):
        with gauge.count() as on_server:
            on_server(0)
            clock.now += 1.5
        clock.now += 0.5
    occupancy = gauge.drain()[0]
    assert len(occupancy.open_requests) <= MAX_BINS
    assert occupancy.bin_s * MAX_BINS < 4 * 10_000
    assert occupancy.mean == pytest.approx(0.75)
    assert all(each == pytest.approx(0.75, abs=0.05) for each in occupancy.open_requests[:-1])
