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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TypeVar

from temper_engine_api.errors import TemperError
from temper_trainer.stop_watcher import (
    SIGNALS,
    StopWatcher,
    describe_saved_step,
    find_signal,
    kill_started_processes,
    open_call_table,
)

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_S = 0.1
"""Longest time before a WorkAbandoned that a finalizer swallowed is raised again."""
_BEAT_S = 1.0
"""Interval at which a thread shows the watcher process that no call holds the GIL."""
_NOT_STOPPED = "{signal}: not stopped within {grace}, so this process ends now. {saved}"


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
    """Finish the work, for example an optimizer update or a save."""
    ABANDON_LATE = 1
    """Interrupt it after half of the grace period, to keep a step that ends before that."""
    ABANDON = 2
    """Interrupt it at once."""


class StopRequest:
    """Context that lets SIGINT and SIGTERM end the run in an orderly way.

    The first signal starts the grace period. WorkAbandoned interrupts work that may be abandoned:
    start-up and evaluation at once, sampling after half of the grace period. Other work is
    finished. If the process still runs when the grace period ends, a thread ends it, or half a
    second later a second process if no thread can run, so that no SIGKILL is needed. A second
    SIGINT acts as before this context. A repeated SIGTERM has no effect, because launchers send it
    several times.

    Args:
        grace_s: Time from the first signal until the process must have ended.
        ends_process: True if the process ends after this context. SIGTERM is then ignored after
            the context too, if the run was interrupted.
        run_dir: Run folder whose last checkpoint is named if the process has to be ended.
    """

    def __init__(
        self, *, grace_s: float, ends_process: bool = False, run_dir: str | None = None
    ) -> None:
        self.grace_s = grace_s
        self._run_dir = "" if run_dir is None else os.path.abspath(run_dir)
        self._ends_process = ends_process
        self.requested: signal.Signals | None = None
        """The first signal received."""
        self.deadline: float | None = None
        self.on_late: Callable[[], object] = lambda: None
        """Called from another thread after half of the grace period."""
        self._mode = _Mode.ABANDON
        self._is_late = self._is_handled = False
        self._has_raised = False
        """True once WorkAbandoned was raised and not swallowed: it is raised only once."""
        self._is_settled = False
        """True once the run ends in any case, so that only clean-up is left."""
        self._is_closed = threading.Event()
        self._was_swallowed = threading.Event()
        # Reentrant: the signal handler may interrupt the main thread while it has the lock.
        self._guard = threading.RLock()
        self._previous: dict[
            signal.Signals, signal.Handlers | Callable[[int, FrameType | None], object] | int | None
        ] = {}
        self._wakeup: tuple[socket.socket, int] | None = None
        self._watcher: StopWatcher | None = None
        self._previous_hook: Callable[[UnraisableHookArgs], object] = sys.unraisablehook

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
                run_dir=self._run_dir,
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
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
            _active = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _active
        if self._wakeup is None:
            return
        _active = None
        sys.unraisablehook = self._previous_hook
        writer, previous = self._wakeup
        signal.set_wakeup_fd(previous)
        # The lock keeps this from happening between the thread's check of the event and its signal,
        # which would then reach the restored handlers.
        with self._guard:
            self._is_closed.set()
        if isinstance(error, RunInterrupted) and self._ends_process:
            self._previous[signal.SIGTERM] = signal.SIG_IGN
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
    def protect_exit(self, context: AbstractContextManager[T]) -> Iterator[T]:
        """Open a context that no signal interrupts while it closes.

        Opening the context and the body can be interrupted as before. An exception in either ends
        the run, so later signals are ignored.

        Raises:
            WorkAbandoned: After the context has closed, for a signal that arrived meanwhile.
        """
        mode = self._mode
        with self.defer(), ExitStack() as stack:
            try:
                with self._use_mode(mode):
                    value = stack.enter_context(context)
                    yield value
            except BaseException:
                self.settle()
                raise

    def settle(self) -> None:
        """Ignore signals from now on, because the run ends in any case."""
        self._is_settled = True

    def make_interrupted(self, *, step: int, checkpoint: Path | None) -> RunInterrupted:
        """Return the exception that ends the run, and ignore signals from now on.

        Args:
            step: The last saved step.
            checkpoint: Its checkpoint; None if no step was saved.
        """
        self.settle()
        return RunInterrupted(step=step, checkpoint=checkpoint, stop=self)

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
        has_ended = self._has_raised or self._is_settled
        if self.requested is not None and is_due and not has_ended:
            self._has_raised = True  # only once: clean-up must not be interrupted again
            raise WorkAbandoned

    def _on_unraisable(self, unraisable: "UnraisableHookArgs") -> None:
        """Notice that a finalizer, which cannot raise, has swallowed WorkAbandoned."""
        if unraisable.exc_type is WorkAbandoned:
            self._has_raised = False
            self._was_swallowed.set()
        else:
            self._previous_hook(unraisable)

    def _restore_handlers(self) -> None:
        with self._guard:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous.clear()

    def _watch(self, reader: socket.socket) -> None:
        """Wait for the first signal, then enforce the deadline; runs in its own thread."""
        table = open_call_table(os.getpid())
        reader.settimeout(_BEAT_S)
        with reader:
            while True:
                try:
                    # Peek to leave a stop signal's number in the socket for the watcher process.
                    received = reader.recv(4096, socket.MSG_PEEK)
                except TimeoutError:
                    table.beat()
                    continue
                if not received:
                    return
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
        # Wait for half of the period. The other half is needed to save the last completed step.
        if self._closes_until(self.deadline - self.grace_s / 2):
            return
        self._is_late = True
        self._wake_main_thread()
        self.on_late()
        if not self._closes_until(self.deadline):
            saved = describe_saved_step(self._run_dir)
            logger.error(_NOT_STOPPED.format(signal=name, grace=self._grace, saved=saved))
            kill_started_processes(open_call_table(os.getpid()).list_threads())
            end_process(128 + self.requested)

    def _closes_until(self, deadline: float) -> bool:
        """Wait until this context ends; return False if it has not ended at the deadline."""
        while (left_s := deadline - time.monotonic()) > 0:
            if self._is_closed.wait(min(left_s, _POLL_S)):
                return True
            if self._was_swallowed.is_set():
                self._was_swallowed.clear()
                self._wake_main_thread()
        return self._is_closed.is_set()

    def _wake_main_thread(self) -> None:
        """Interrupt a blocking call of the main thread, so that its handler can raise."""
        with self._guard:
            # After a second SIGINT or the end of this context, the previous handlers are active and
            # would end the process.
            if self._previous and not self._is_closed.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


_active: StopRequest | None = None
"""The stop request of this process: signal handlers are global, so there is at most one."""


@contextmanager
def allow_stop_after_half_grace() -> Iterator[None]:
    """Let a stop request interrupt the body after half of the grace period.

    The body must not change weights. This has no effect outside of the main thread, without a
    StopRequest, or when the body may already be interrupted.
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

    Use it when `main` has returned, because atexit handlers and destructors may hang. The watcher
    of the StopRequest has ended by then, since a program that calls `train` may continue after a
    stop. A thread can't do this: it does not run while a handler holds the GIL, or once Python is
    finalized.

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
