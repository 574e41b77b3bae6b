import threading
import time

from temper_trainer.progress import (
    Watchdog,
    advance_progress,
    describe_long_waits,
    list_active_tasks,
    track_progress,
    track_wait,
)


def names() -> list[tuple[str, int | None, int]]:
    return [(each.name, each.total, each.done) for each in list_active_tasks()]


def test_items_of_active_operations_are_counted() -> None:
    with track_progress("rollout"), track_progress("completions", total=3):
        advance_progress("completions", 2)
        advance_progress("rewards")  # none is open, as in a worker's process
        assert names() == [("rollout", None, 0), ("completions", 3, 2)]
    assert names() == []


def test_newest_operation_with_a_name_is_counted() -> None:
    with track_progress("rewards", total=4):
        with track_progress("rewards", total=2):
            advance_progress("rewards")
        advance_progress("rewards", 3)
        assert names() == [("rewards", 4, 3)]


def test_long_wait_is_reported_with_pending_ranks() -> None:
    late, is_logged = [0, 2], threading.Event()
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        is_logged.set()

    with (
        Watchdog(0.05, log=log),
        track_wait("actor: update", describe_pending=lambda: f"; ranks {late} have not answered"),
    ):
        assert is_logged.wait(30)
    assert "s: actor: update; ranks [0, 2] have not answered" in lines[0]
    assert lines[0].startswith("watchdog: waiting for ")


def test_finished_wait_is_not_reported() -> None:
    with track_wait("something"):
        time.sleep(0.01)
    assert describe_long_waits(0.0) == []


def test_longest_wait_is_reported_first() -> None:
    with track_wait("first"), track_wait("second"):
        time.sleep(0.01)
        assert [line.rpartition(": ")[2] for line in describe_long_waits(0.001)] == [
            "first",
            "second",
        ]


def test_waits_for_the_same_thing_are_one_line() -> None:
    with track_wait("replica 0"), track_wait("replica 0"), track_wait("replica 1"):
        time.sleep(0.01)
        lines = [line.partition("s: ")[2] for line in describe_long_waits(0.001)]
    assert lines == ["replica 0 (2 calls)", "replica 1"]


def test_watchdog_without_an_interval_starts_no_thread() -> None:
    with Watchdog(None, log=lambda line: None):
        assert "watchdog" not in {thread.name for thread in threading.enumerate()}
