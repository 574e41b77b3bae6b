"""Call reward functions with a time limit, in threads of this process or in worker processes.

A thread cannot be killed: one that takes too long is abandoned, ends when its call returns, and
scores nothing more. A call that never releases the GIL, such as a runaway regular expression,
blocks the process and counts as timed out when it returns. Such functions need worker processes
(reward.num_workers), which are killed and replaced if a call hangs or crashes.
"""

import contextlib
import ctypes
import logging
import math
import multiprocessing
import numbers
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from multiprocessing.connection import Connection, wait

from temper_engine_api.errors import ConfigError, TemperError
from temper_trainer.progress import advance_progress
from temper_trainer.redaction import redact_secrets
from temper_trainer.reward.registry import Argument, RewardFunction
from temper_trainer.types import Prompt, Score

Item = tuple[Prompt, str]
"""A prompt and the text of a completion."""


class FailureKind(StrEnum):
    """Reason why there is no reward."""

    EXCEPTION = "exception"
    """The function raised, or its process died."""
    TIMEOUT = "timeout"
    """The call took longer than reward.timeout_s."""
    NOT_FINITE = "not_finite"
    """The function returned NaN, infinity, or something other than a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A reward, or the reason why there is none."""

    reward: float | None = None
    """Finite; None if the call failed."""
    kind: FailureKind | None = None
    """None if there is a reward."""
    message: str = ""
    """One line that describes the failure."""
    trace: str = ""
    """Traceback, if the function raised."""

    def redacted(self) -> "Outcome":
        """Return this outcome with the values of secrets hidden, which exceptions may quote."""
        if self.kind is None:
            return self
        return replace(self, message=redact_secrets(self.message), trace=redact_secrets(self.trace))

    def to_score(self) -> Score:
        """Return the score for the training loop."""
        return Score(
            reward=self.reward,
            failure=None if self.kind is None else f"{self.kind}: {self.message}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """A reward function with its arguments; picklable if the function is importable."""

    function: RewardFunction
    arguments: Mapping[str, Argument]
    """Keyword arguments of the function."""

    def __call__(self, item: Item) -> Outcome:
        """Score one completion; whatever the function raises becomes a failed outcome."""
        prompt, text = item
        try:
            value: object = self.function(prompt, text, **self.arguments)
        # A user's function may raise anything; each failure is counted and shown.
        except Exception as error:  # noqa: BLE001
            return Outcome(
                kind=FailureKind.EXCEPTION,
                message=(
                    f"{type(error).__name__}: {error} (prompt {prompt.prompt_id}, "
                    f"{prompt.location})"
                ),
                trace=traceback.format_exc(),
            )
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            message = (
                f"returned {value!r:.80} ({type(value).__name__}), but a reward is a finite number"
            )
            message += f" (prompt {prompt.prompt_id}, {prompt.location})"
            return Outcome(kind=FailureKind.NOT_FINITE, message=message)
        return Outcome(reward=float(value))


def make_timeout_outcome(item: Item, *, timeout_s: float) -> Outcome:
    """Return the outcome of a call that was abandoned."""
    prompt, _ = item
    return Outcome(
        kind=FailureKind.TIMEOUT,
        message=(
            f"took longer than reward.timeout_s = {timeout_s} (prompt {prompt.prompt_id}, "
            f"{prompt.location})"
        ),
    )


class ThreadScoring:
    """Run calls in daemon threads, one at a time."""

    def __init__(self, call: RewardCall, *, timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(items):
            outcomes += self._run_until_timeout(items[len(outcomes) :])
        return outcomes

    def close(self) -> None:
        """Do nothing; threads need no cleanup."""

    def _run_until_timeout(self, items: Sequence[Item]) -> list[Outcome]:
        """Return the outcomes up to the first timeout, inclusive."""
        results: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        is_abandoned = threading.Event()

        def score_all() -> None:
            for item in items:
                if is_abandoned.is_set():
                    return
                started = time.monotonic()
                outcome = self._call(item)
                # The waiting thread may have been blocked during the call, so it cannot measure the
                # time itself.
                is_late = time.monotonic() - started > self._timeout_s
                results.put(
                    make_timeout_outcome(item, timeout_s=self._timeout_s) if is_late else outcome
                )

        # A daemon, because an abandoned thread must not keep the process from exiting.
        threading.Thread(target=score_all, name="temper-reward", daemon=True).start()
        outcomes: list[Outcome] = []
        for item in items:
            try:
                outcomes.append(results.get(timeout=self._timeout_s))
                advance_progress("rewards")
            except queue.Empty:
                is_abandoned.set()
                return [*outcomes, make_timeout_outcome(item, timeout_s=self._timeout_s)]
        return outcomes


logger = logging.getLogger(__name__)

_ITEMS_PER_MESSAGE = 16
"""Items that a worker receives at once; few, so that no worker idles at the end of a batch."""
_START_TIMEOUT_S = 120.0
"""Maximum time for a new process to start; it imports this package, which is not part of a call's
time.
"""

_EXTERNAL_KILL_CODES = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a process that the kernel (out of memory) or a user has killed."""
_PR_SET_PDEATHSIG = 1

Task = tuple[int, Item]


class WorkerStartError(TemperError, RuntimeError):
    """A reward worker did not start."""


class ProcessScoring:
    """Run calls in ``num_workers`` spawned processes, each with its own time limit per call."""

    def __init__(self, call: RewardCall, *, timeout_s: float, num_workers: int) -> None:
        """Start the workers.

        Raises:
            ConfigError: If the function cannot be pickled.
            WorkerStartError: If a worker does not start.
        """
        try:
            # Checked first, to name the setting: the error of multiprocessing would not.
            pickle.dumps(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"the reward function cannot be sent to worker processes ({error}): define it at "
                "the top level of a module, or set reward.num_workers to 0."
            ) from error
        self._call = call
        self._timeout_s = timeout_s
        # PR_SET_PDEATHSIG kills a worker when the thread that started it ends, so this thread must
        # live as long as the workers.
        self._starter = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="temper-reward-starter"
        )
        self._workers = [self._start_worker() for _ in range(num_workers)]
        for worker in self._workers:
            worker.wait_until_ready()

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order.

        A call whose process was killed externally is repeated once.
        """
        waiting = deque(enumerate(items))
        retried: set[int] = set()
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(items):
            for worker in self._workers:
                if not worker.tasks and waiting:
                    worker.send(
                        [waiting.popleft() for _ in range(min(_ITEMS_PER_MESSAGE, len(waiting)))]
                    )
            busy = [worker for worker in self._workers if worker.tasks]
            remaining_s = min(worker.since + self._timeout_s for worker in busy) - time.monotonic()
            ready = wait([worker.connection for worker in busy], timeout=max(0.0, remaining_s))
            for worker in busy:
                if worker.connection in ready:
                    self._collect(worker, outcomes, retried)
                elif time.monotonic() - worker.since >= self._timeout_s:
                    index, item = worker.tasks.popleft()
                    outcomes[index] = make_timeout_outcome(item, timeout_s=self._timeout_s)
                    limit = f"took longer than reward.timeout_s = {self._timeout_s:g} s"
                    self._replace(worker, item=item, reason=f"{limit}, which counts as failed")
        return [outcomes[index] for index in range(len(items))]

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            worker.kill()
        self._starter.shutdown()

    def _start_worker(self) -> "_Worker":
        return self._starter.submit(_Worker, self._call).result()

    def _collect(self, worker: "_Worker", outcomes: dict[int, Outcome], retried: set[int]) -> None:
        """Take every result that has arrived.

        A closed connection means that the process died during its current call.
        """
        try:
            while worker.tasks and worker.connection.poll():
                outcome = worker.connection.recv()
                assert isinstance(outcome, Outcome)
                index, _ = worker.tasks.popleft()
                outcomes[index] = outcome
                advance_progress("rewards")
                worker.since = time.monotonic()
        except (EOFError, ConnectionError):
            worker.process.join(timeout=1.0)  # before kill(), which would hide how it ended
            worker.kill()
            index, item = worker.tasks[0]
            prompt, _ = item
            reason = f"died with exit code {worker.process.exitcode}"
            if worker.process.exitcode in _EXTERNAL_KILL_CODES and index not in retried:
                retried.add(index)
                self._replace(worker, item=item, reason=f"{reason} and is retried")
                return
            worker.tasks.popleft()
            message = f"the worker process {reason} (prompt {prompt.prompt_id}, {prompt.location})"
            outcomes[index] = Outcome(kind=FailureKind.EXCEPTION, message=message)
            self._replace(worker, item=item, reason=f"{reason}, which counts as failed")

    def _replace(self, worker: "_Worker", *, item: Item, reason: str) -> None:
        """Start a new process in place of a worker and send it the worker's remaining tasks."""
        prompt, _ = item
        process = worker.process.pid
        logger.warning(
            "replaced reward process %s: prompt %s (%s) %s",
            process,
            prompt.prompt_id,
            prompt.location,
            reason,
        )
        worker.kill()
        successor = self._start_worker()
        self._workers[self._workers.index(worker)] = successor
        successor.wait_until_ready()
        if worker.tasks:
            successor.send(list(worker.tasks))


class _Worker:
    """One process and the tasks that it was given."""

    def __init__(self, call: RewardCall) -> None:
        # Not fork: the driver has threads and may have initialized CUDA, and neither survives a
        # fork.
        context = multiprocessing.get_context("spawn")
        self.connection, child_connection = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(child_connection, call), name="temper-reward", daemon=True
        )
        self.process.start()
        # The process must be the only one with that end: otherwise its death would not close the
        # connection.
        child_connection.close()
        self.tasks: deque[Task] = deque()
        self.since = 0.0

    def wait_until_ready(self) -> None:
        """Wait for the process's first message."""
        try:
            is_up = self.connection.poll(_START_TIMEOUT_S) and self.connection.recv() == "ready"
        except EOFError:
            is_up = False
        if not is_up:
            self.kill()
            raise WorkerStartError(
                f"a reward worker did not start (exit code {self.process.exitcode}): see its "
                "message above. A script that starts workers must protect its code with `if "
                "__name__ == '__main__':`."
            )

    def send(self, tasks: Sequence[Task]) -> None:
        """Send tasks; the time of the first one starts now."""
        self.tasks = deque(tasks)
        self.since = time.monotonic()
        # A process that died already is handled when its results are collected.
        with contextlib.suppress(ConnectionError):
            self.connection.send([item for _, item in tasks])

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, call: RewardCall) -> None:
    """Receive lists of items and send one outcome per item, until the driver is gone."""
    try:
        _die_with_driver()
        connection.send("ready")
        while True:
            for item in connection.recv():
                connection.send(call(item))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


def _die_with_driver() -> None:
    """Have the kernel kill this process when the driver dies.

    A function that hangs, or a process that is stopped, would not notice the closed connection.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() != parent.pid:  # the driver died before prctl took effect
        os._exit(0)
