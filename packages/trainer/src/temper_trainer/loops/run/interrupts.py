"""Handle SIGINT and SIGTERM: finish or abandon the step, save, exit within `run.stop_grace_s`."""

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
from temper_trainer.loops.run.stop_watcher import SIGNALS, StopWatcher, find_signal

logger = logging.getLogger(__name__)

_NOT_STOPPED = (
    "{signal}: not stopped within {grace}, so this process ends now. Steps after the last "
    "checkpoint are lost; run.resume=auto continues from it, or starts at step 1 if there is none."
)


class RunInterrupted(TemperError):
    """The run was stopped by a signal; it can be resumed from `checkpoint`."""

    def __init__(self, *, step: int, checkpoint: Path | None, stop: "StopRequest") -> None:
        if checkpoint is None:
            text = "interrupted before the first checkpoint: run again to start at step 1."
        else:
            text = (
                f"interrupted after step {step}: continue from {checkpoint} with run.resume=auto."
            )
        super().__init__(text)
        self.step = step
        self.checkpoint = checkpoint
        self.signal_number = int(stop.requested or signal.SIGINT)
        self.deadline = stop.deadline
        """`time.monotonic` by which the process must have exited; None without a signal."""


class WorkAbandoned(KeyboardInterrupt):
    """Raised in the main thread after a stop request, where the current work may be abandoned.

    A KeyboardInterrupt, so that `except Exception` does not swallow it.
    """


class _Mode(enum.IntEnum):
    """Effect of a stop request on the current work."""

    DEFER = 0
    """Only set the flag, for example during an optimizer update or a save."""
    ABANDON_LATE = 1
    """Interrupt it after half of the grace period, so that a step that ends earlier is kept."""
    ABANDON = 2
    """Interrupt it at once."""


class StopRequest:
    """Context in which SIGINT and SIGTERM end the run in an orderly way.

    The first signal starts the grace period. WorkAbandoned interrupts work that may be abandoned:
    start-up and evaluation at once, sampling after half of the grace period. Other work is
    finished. If the process still runs at the end of the grace period, a thread ends it, or half a
    second later a second process if no thread can run, so that no SIGKILL is needed. A second
    SIGINT acts as before this context. A repeated SIGTERM has no effect, because launchers send it
    several times.
    """

    def __init__(self, *, grace_s: float) -> None:
        self.grace_s = grace_s
        self.requested: signal.Signals | None = None
        """The first signal received."""
        self.deadline: float | None = None
        self.on_late: Callable[[], object] = lambda: None
        """Called from another thread after half of the grace period."""
        self._mode = _Mode.ABANDON
        self._is_late = self._has_raised = self._is_handled = False
        self._is_closed = threading.Event()
        # Reentrant: the signal handler may interrupt the main thread while it has the lock.
        self._guard = threading.RLock()
        self._previous: dict[
            signal.Signals, signal.Handlers | Callable[[int, FrameType | None], object] | int | None
        ] = {}
        self._wakeup: tuple[socket.socket, int] | None = None
        self._watcher: StopWatcher | None = None

    @property
    def _grace(self) -> str:
        return f"run.stop_grace_s = {self.grace_s:g} s"

    @property
    def is_set(self) -> bool:
        """True if a signal was received."""
        return self.requested is not None

    def __enter__(self) -> "StopRequest":
        global _active
        if threading.current_thread() is threading.main_thread():
            # The interpreter writes the signal's number to the socket at once. The Python handler
            # runs only when the main thread returns from a C call, and the grace period must not
            # start that late.
            reader, writer = socket.socketpair()
            # Before `install`, whose handlers may raise.
            self._watcher = StopWatcher(
                reader,
                grace_s=self.grace_s,
                message=f"ERROR: {_NOT_STOPPED.replace('{grace}', self._grace)}",
            )
            self.install()
            # `set_wakeup_fd` refuses a blocking descriptor, because a handler must never wait for a
            # reader.
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
        # The lock keeps this from happening between the thread's check of the event and its signal,
        # which would then reach the restored handlers.
        with self._guard:
            self._is_closed.set()
        self._restore_handlers()
        writer.close()  # ends the thread if there was no signal
        if self._watcher is not None:
            self._watcher.close()

    def install(self) -> None:
        """Set the handlers, also after a library such as Ray has replaced them."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                previous = signal.signal(number, self._handle)
                if previous != self._handle:
                    self._previous.setdefault(number, previous)

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Let signals only set the flag during the body, which must not be interrupted."""
        with self._use_mode(_Mode.DEFER):
            yield

    @contextmanager
    def allow_abandon(self) -> Iterator[None]:
        """Let a signal interrupt the body at once.

        Raises:
            WorkAbandoned: If a signal was received, now or before.
        """
        with self._use_mode(_Mode.ABANDON):
            yield

    @contextmanager
    def _use_mode(self, mode: _Mode) -> Iterator[None]:
        previous, self._mode = self._mode, mode
        try:
            self._raise_if_due()
            yield
        finally:
            self._mode = previous
        # A signal in the body may be due only now, in the mode outside.
        self._raise_if_due()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Ctrl-C after an earlier signal means that the user does not want to wait: the previous
        # handler, usually Python's own, raises KeyboardInterrupt at once.
        if self._is_handled and number == signal.SIGINT:
            self._restore_handlers()
            signal.raise_signal(number)
            return
        self._is_handled = True
        self._start_grace(number)
        self._raise_if_due()

    def _start_grace(self, number: int) -> None:
        """Record the first signal; called by the handler and by the thread, in either order."""
        with self._guard:
            if self.requested is None:
                self.deadline = time.monotonic() + self.grace_s
                self.requested = signal.Signals(number)

    def _raise_if_due(self) -> None:
        is_due = self._mode == _Mode.ABANDON or (self._mode == _Mode.ABANDON_LATE and self._is_late)
        if self.requested is not None and is_due and not self._has_raised:
            self._has_raised = True  # only once: clean-up must not be interrupted again
            raise WorkAbandoned

    def _restore_handlers(self) -> None:
        with self._guard:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous.clear()

    def _watch(self, reader: socket.socket) -> None:
        """Wait for the first signal and enforce the deadline; runs in its own thread."""
        with reader:
            # The watcher peeks, too, so the number of a stop signal stays in the socket.
            while received := reader.recv(4096, socket.MSG_PEEK):
                if (number := find_signal(received)) is not None:
                    self._start_grace(number)
                    self._enforce_deadline()
                    return
                reader.recv(len(received))

    def _enforce_deadline(self) -> None:
        assert self.requested is not None
        assert self.deadline is not None
        name = self.requested.name
        logger.warning(
            "%s: stopping within %s; Ctrl-C from now on stops at once", name, self._grace
        )
        # Half of the period, so that the other half is left to save the step before the abandoned
        # one.
        if self._is_closed.wait(self.grace_s / 2):
            return
        with self._guard:
            if self._is_closed.is_set():
                return
            self._is_late = True
            # Wakes the main thread from a blocking call, so that its handler can raise. After a
            # second SIGINT the handlers from before are active, which would end the process.
            if self._previous:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        self.on_late()
        if not self._is_closed.wait(max(0.0, self.deadline - time.monotonic())):
            logger.error(_NOT_STOPPED.format(signal=name, grace=self._grace))
            end_process(128 + self.requested)


_active: StopRequest | None = None
"""The stop request of this process: signal handlers are global, so there is at most one."""


@contextmanager
def allow_stop_after_half_grace() -> Iterator[None]:
    """Let a stop request interrupt the body after half of the grace period.

    The body must not change weights. No effect in other threads than the main thread, without a
    StopRequest, or if the body may be interrupted at once anyway.
    """
    stop = _active
    if (
        stop is None
        or stop._mode != _Mode.DEFER
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    with stop._use_mode(_Mode.ABANDON_LATE):
        yield


def end_process(code: int) -> None:
    """End this process at once, without waiting for threads, after flushing its output."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: called from a thread, it would end only that thread.
    os._exit(code)


def end_process_at(deadline: float | None, *, signal_number: int) -> None:
    """End this process at a value of `time.monotonic`, if it still runs then.

    Handlers of atexit and destructors may hang after `main` has returned. The watcher of the
    StopRequest has ended with it, because a program that calls `train` may go on after a stop. No
    thread takes its place: none runs while a handler holds the GIL, or once Python is finalized.

    Args:
        deadline: None has no effect.
        signal_number: The signal that stopped the run; the exit code is 128 more.
    """
    if deadline is None:
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.send(bytes([signal_number]))
        StopWatcher(
            reader,
            grace_s=max(0.0, deadline - time.monotonic()),
            message="ERROR: {signal}: this process did not exit after the run had stopped, so it "
            "is ended now.",
        )
