import threading
import time

from temper_trainer.waits import Watchdog, describe_long_waits, track_wait


def test_long_wait_is_reported_with_pending_ranks() -> None:
    late, told = [0, 2], threading.Event()
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        told.set()

    with (
        Watchdog(0.05, log=say),
        track_wait("actor: update", describe_pending=lambda: f"; ranks {late} have not answered"),
    ):
        assert told.wait(30)
    assert "s: actor: update; ranks [0, 2] have not answered" in said[0]
    assert said[0].startswith("watchdog: waiting for ")


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


def test_watchdog_without_an_interval_starts_no_thread() -> None:
    with Watchdog(None, log=lambda sentence: None):
        assert "watchdog" not in {thread.name for thread in threading.enumerate()}
