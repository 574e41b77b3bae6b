"""The first signal asks for the end of the step, the second one acts as if nobody had asked."""

import os
import signal
from types import FrameType

import pytest

from temper_trainer.loops.interrupts import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_once_and_stops_at_once_the_second_time(number: signal.Signals) -> None:
    class StoppedError(Exception):
        pass

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError

    before = signal.signal(number, stop)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), number)
            assert request.is_set
            with pytest.raises(StoppedError):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
