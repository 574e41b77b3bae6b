"""SIGINT and SIGTERM: finish or abandon the step, save, and end within `run.stop_grace_s`."""

import enum
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from temper_engine_api.errors import TemperError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunInterrupted(TemperError):
    """The run was stopped by a signal; `checkpoint` is what it can be resumed from."""

    def __init__(self, *, step: int, checkpoint: Path | None, stop: "StopRequest") -> None:
        if checkpoint is None:
            text = "interrupted before the first checkpoint: a new start begins at step 1."
        else:
            text = (
                f"interrupted after step {step}: continue from {checkpoint} with run.resume=auto."
            )
        super().__init__(text)
        self.step = step
        self.checkpoint = checkpoint
        self.signal_number = int(stop.requested or signal.SIGINT)
        self.deadline = stop.deadline
        """Time of `time.monotonic` at which the process has to be gone; None without a signal."""


class RunStopped(KeyboardInterrupt):
    """Raised in the main thread by a stop request, where the work at hand may be abandoned.

    A KeyboardInterrupt, so that code which continues after an Exception does not swallow it.
    """


class _Mode(enum.IntEnum):
    """What a stop request may do to the work at hand."""

    DEFER = 0
    """Only set the flag, for example during an optimizer update or a save."""
    ABANDON_LATE = 1
    """Interrupt it once half of the grace is over: a step that ends before is kept."""
    ABANDON = 2
    """Interrupt it at once."""


class StopRequest:
    """A context in which SIGINT and SIGTERM end the run in an orderly way.

    The first signal starts the grace. Work that may be abandoned (start-up, evaluation, and after
    half of the grace sampling) is interrupted by RunStopped; other work is finished. If the process
    is still there when the grace is over, a thread ends it, so that no SIGKILL is needed. A second
    SIGINT acts as usual; a repeated SIGTERM changes nothing, since launchers send it several times.
    """

    def __init__(self, *, grace_s: float) -> None:
        self.grace_s = grace_s
        self.requested: signal.Signals | None = None
        """The first signal received."""
        self.deadline: float | None = None
        self.on_late: Callable[[], object] = lambda: None
        """Called from another thread when half of the grace is over."""
        self._mode = _Mode.ABANDON
        self._is_late = self._has_raised = self._is_handled = False
        self._is_closed = threading.Event()
        self._guard = (
            threading.RLock()
        )  # the handler may interrupt the main thread while it holds it
        self._previous: dict[
            signal.Signals, signal.Handlers | Callable[[int, FrameType | None], object] | int | None
        ] = {}
        self._wakeup: tuple[socket.socket, int] | None = None

    @property
    def is_set(self) -> bool:
        """Whether the run was asked to stop."""
        return self.requested is not None

    def __enter__(self) -> "StopRequest":
        global _active
        if threading.current_thread() is threading.main_thread():
            self.install()
            # The interpreter writes the signal's number here at once, also while the main thread is
            # in a C call and runs no Python handler, so that the grace counts from the signal.
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            self._wakeup = (
                writer,
                signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False),
            )
            threading.Thread(
                target=self._watch, args=(reader,), daemon=True, name="stop-request"
            ).start()
            _active = self
        return self

    def __exit__(self, *exception: object) -> None:
        global _active
        if self._wakeup is None:
            return
        _active = None
        writer, previous = self._wakeup
        signal.set_wakeup_fd(previous)
        with self._guard:  # not between the thread's look at the event and its signal
            self._is_closed.set()
        self._restore_handlers()
        writer.close()  # ends the thread if no signal came

    def install(self) -> None:
        """Set the handlers, again if a library such as Ray has replaced them."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                found = signal.signal(number, self._handle)
                if found != self._handle:
                    self._previous.setdefault(number, found)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """In the body a signal only sets the flag; for work that must not be cut in two."""
        with self._in_mode(_Mode.DEFER):
            yield

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """In the body a signal raises RunStopped at once.

        Raises:
            RunStopped: If the run was asked to stop, here or before.
        """
        with self._in_mode(_Mode.ABANDON):
            yield

    @contextmanager
    def _in_mode(self, mode: _Mode) -> Iterator[None]:
        before, self._mode = self._mode, mode
        try:
            self._raise_if_due()
            yield
        finally:
            self._mode = before
        self._raise_if_due()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_handled and number == signal.SIGINT:
            self._restore_handlers()
            signal.raise_signal(number)
            return
        self._is_handled = True
        self._begin_grace(number)
        self._raise_if_due()

    def _begin_grace(self, number: int) -> None:
        """Note the first signal; called by the handler and by the thread, whichever is first."""
        with self._guard:
            if self.requested is None:
                self.deadline = time.monotonic() + self.grace_s
                self.requested = signal.Signals(number)

    def _raise_if_due(self) -> None:
        is_due = self._mode == _Mode.ABANDON or (self._mode == _Mode.ABANDON_LATE and self._is_late)
        if self.requested is not None and is_due and not self._has_raised:
            self._has_raised = True  # what unwinds is not interrupted a second time
            raise RunStopped

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _watch(self, reader: socket.socket) -> None:
        """Run in a thread: keep the deadline, whatever the main thread is doing."""
        with reader:
            while (received := reader.recv(1)) and received[0] not in SIGNALS:
                continue
            if received:
                self._begin_grace(received[0])
                self._keep_deadline()

    def _keep_deadline(self) -> None:
        assert self.requested is not None
        assert self.deadline is not None
        name, grace = self.requested.name, f"run.stop_grace_s = {self.grace_s:g} s"
        logger.warning("%s: stopping within %s; Ctrl-C from now on stops at once", name, grace)
        if self._is_closed.wait(self.grace_s / 2):
            return
        with self._guard:
            if self._is_closed.is_set():
                return
            self._is_late = True
            # Wakes the main thread from a blocking call; its handler then raises where it may.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        self.on_late()
        if not self._is_closed.wait(max(0.0, self.deadline - time.monotonic())):
            logger.error(
                "%s: not stopped within %s, so this process ends now. Steps after the last checkpoint are lost; "
                "run.resume=auto continues from it, or begins at step 1 if there is none.",
                name,
                grace,
            )
            end_process(128 + self.requested)


_active: StopRequest | None = None


@contextmanager
def abandonable_late() -> Iterator[None]:
    """In the body, which changes no weight, a stop request interrupts once half of the grace is over.

    No effect outside the main thread or outside a StopRequest, and where more is allowed already.
    """
    stop = _active
    if (
        stop is None
        or stop._mode != _Mode.DEFER
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    with stop._in_mode(_Mode.ABANDON_LATE):
        yield


def end_process(code: int) -> None:
    """End this process without waiting for its threads; what was printed is flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_process_at(deadline: float | None, *, code: int) -> None:
    """End this process at a time of `time.monotonic`, should it still be there, for example in atexit."""
    if deadline is not None:
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), end_process, args=(code,))
        timer.daemon = True
        timer.start()
