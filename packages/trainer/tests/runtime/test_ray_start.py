"""Test which signals interrupt the start of Ray."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest
import ray

from temper_trainer.loops.run.interrupts import StopRequest, WorkAbandoned
from temper_trainer.runtime.ray.ray_runtime import _defer_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_request_takes_effect_after_the_start(number: signal.Signals) -> None:
    done = []

    def start() -> None:
        with _defer_signals():
            signal.raise_signal(number)
            done.append("started")
        done.append("went on")

    with StopRequest(grace_s=60.0) as stop:
        with pytest.raises(WorkAbandoned):
            start()
        assert stop.requested == number
    assert done == ["started"]


def test_second_ctrl_c_interrupts_the_start_and_second_sigterm_does_not() -> None:
    with StopRequest(grace_s=60.0), _defer_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(WorkAbandoned):
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def without_handler() -> Iterator[None]:
    """Remove the handler that an earlier start of Ray in this process may have installed."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.usefixtures("without_handler")
def test_ray_does_not_replace_the_handler_of_a_run() -> None:
    def exit_at_once(number: int, frame: FrameType | None) -> None:
        raise SystemExit(number)

    with StopRequest(grace_s=60.0) as stop:
        with _defer_signals():
            ray._private.utils.set_sigterm_handler(exit_at_once)
        assert signal.getsignal(signal.SIGTERM) == stop._handle
    # Outside of a run, which has no handler, Ray's is the best there is.
    with _defer_signals():
        ray._private.utils.set_sigterm_handler(exit_at_once)
    assert signal.getsignal(signal.SIGTERM) is exit_at_once
