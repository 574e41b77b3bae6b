"""Call reward functions with a time limit in worker processes (reward.num_workers above 0).

A process whose call hangs or crashes is killed and replaced. `reward_threads` runs calls in threads
of the driver instead.
"""

import contextlib
import ctypes
import logging
import math
import multiprocessing
import numbers
import os
import pickle
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from multiprocessing.connection import Connection, wait

from temper_engine_api.errors import ConfigError, TemperError
from temper_trainer.config.reward import Argument
from temper_trainer.progress import advance_progress
from temper_trainer.redaction import (
    configure_logging,
    list_registered_secrets,
    redact_secrets,
    register_secrets,
)
from temper_trainer.reward.registry import RewardFunction
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
        except KeyboardInterrupt:
            raise
        # A user's function may raise anything, also SystemExit, which would end the thread without
        # a word; each failure is counted and shown.
        except BaseException as error:  # noqa: BLE001
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


_MIN_TIMEOUTS_OF_HANG = 3
"""Timeouts in a row after which the function is taken to hang, however slow its results were."""


class CallBatch:
    """The calls of one batch: those that wait, the outcomes, and how many may run at a time."""

    def __init__(self, items: Sequence[Item], *, max_failures: int, timeout_s: float) -> None:
        self.waiting = deque(enumerate(items))
        """Items whose call has not started, with their indices."""
        self.num_items = len(items)
        self._max_failures = max_failures
        self._timeout_s = timeout_s
        self._outcomes: dict[int, Outcome] = {}
        self._num_failures = 0
        self._num_timeouts_in_row = 0
        self._slowest_s = 0.0

    @property
    def num_called(self) -> int:
        """Number of known outcomes."""
        return len(self._outcomes)

    @property
    def has_timeout(self) -> bool:
        """True if a call took too long."""
        return any(each.kind == FailureKind.TIMEOUT for each in self._outcomes.values())

    @property
    def is_over(self) -> bool:
        """True if all outcomes are known, or so many calls failed that the run stops anyway."""
        is_complete = self.num_called == self.num_items
        return is_complete or self._num_failures > self._max_failures

    def add(self, index: int, outcome: Outcome, *, seconds: float) -> None:
        """Record the outcome of a call that took this time; later ones for its item are ignored."""
        if index in self._outcomes:
            return
        self._outcomes[index] = outcome
        self._num_failures += outcome.kind is not None
        if outcome.kind == FailureKind.TIMEOUT:
            self._num_timeouts_in_row += 1
        else:
            self._num_timeouts_in_row = 0
            self._slowest_s = max(self._slowest_s, seconds)
        advance_progress("rewards")

    def add_timeout(self, index: int, item: Item) -> None:
        """Record that a call took too long."""
        self.add(
            index, make_timeout_outcome(item, timeout_s=self._timeout_s), seconds=self._timeout_s
        )

    def list_outcomes(self) -> list[Outcome]:
        """Return the outcomes so far, in the order of the items."""
        return [outcome for _, outcome in sorted(self._outcomes.items(), key=lambda pair: pair[0])]

    def choose_num_calls(self, usual: int) -> int:
        """Return how many calls may run at a time.

        That is the usual number until more calls fail than accepted. From then on it is the number
        of failures that would stop the run: if the function hangs, this takes one more
        ``timeout_s``, and not one per call. After a slow call that returned it takes two more.
        """
        if self._num_failures * self.num_items <= self._max_failures * self.num_called:
            return usual
        num_calls = self._max_failures + 1 - self._num_failures
        if self._slowest_s > 0 and self._num_timeouts_in_row < _MIN_TIMEOUTS_OF_HANG:
            # Calls that compute take turns on the cores: so many of them would all be too slow. Two
            # at once show whether the function still returns, or hangs since its last result.
            num_parallel = max(
                int(self._timeout_s / (4 * self._slowest_s)),
                2 if self._num_timeouts_in_row else 1,
            )
            num_calls = min(num_calls, num_parallel)
        return max(usual, num_calls)


logger = logging.getLogger(__name__)

_ITEMS_PER_MESSAGE = 16
"""Items that a worker receives at once; few, so that no worker idles at the end of a batch."""
_MAX_EXTRA_WORKERS = 32
"""Additional processes of a batch in which calls time out; each may import heavy libraries."""
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
        self._num_workers = num_workers
        self._workers = [self._start_worker() for _ in range(num_workers)]
        for worker in self._workers:
            worker.wait_until_ready()

    def run(self, items: Sequence[Item], *, max_failures: int) -> list[Outcome]:
        """Return one outcome per item, in order; those of the calls made if too many failed.

        A call whose process was killed externally is repeated once. After a timeout, the rest of
        the batch also runs in additional processes, so that a function that always hangs does not
        cost ``timeout_s`` per call.
        """
        batch = CallBatch(items, max_failures=max_failures, timeout_s=self._timeout_s)
        retried: set[int] = set()
        self._replace_unfinished_workers()
        while not batch.is_over:
            self._send_waiting(batch)
            busy = [worker for worker in self._workers if worker.tasks]
            remaining_s = min(worker.since + self._timeout_s for worker in busy) - time.monotonic()
            ready = wait([worker.connection for worker in busy], timeout=max(0.0, remaining_s))
            for worker in busy:
                if worker.connection in ready:
                    self._collect(worker, batch, retried)
            now = time.monotonic()
            late = [
                worker
                for worker in busy
                if worker.connection not in ready and now - worker.since >= self._timeout_s
            ]
            for worker in late:
                batch.add_timeout(*worker.tasks[0])
            # If the run stops now, the workers need not be replaced.
            if not batch.is_over:
                for worker in late:
                    self._give_up(worker, batch)
        for worker in self._workers[self._num_workers :]:
            worker.kill()
        del self._workers[self._num_workers :]
        return batch.list_outcomes()

    def _send_waiting(self, batch: CallBatch) -> None:
        """Send tasks to idle workers; start more of these if too many calls fail."""
        num_calls = batch.choose_num_calls(self._num_workers)
        limit = min(num_calls, self._num_workers + _MAX_EXTRA_WORKERS)
        num_new = min(limit - len(self._workers), len(batch.waiting))
        new = [self._start_worker() for _ in range(num_new)]
        self._workers += new
        for worker in new:
            worker.wait_until_ready()
        # One by one if calls hang, so that none waits behind another.
        size = _ITEMS_PER_MESSAGE if num_calls == self._num_workers else 1
        for worker in self._workers:
            if not worker.tasks and batch.waiting:
                count = min(size, len(batch.waiting))
                worker.send([batch.waiting.popleft() for _ in range(count)])

    def _give_up(self, worker: "_Worker", batch: CallBatch) -> None:
        """Kill a worker whose call takes too long; its other tasks wait for any worker."""
        _, item = worker.tasks.popleft()
        batch.waiting.extendleft(reversed(worker.tasks))
        worker.tasks.clear()
        if self._workers.index(worker) < self._num_workers:
            limit = f"took longer than reward.timeout_s = {self._timeout_s:g} s"
            self._replace(worker, item=item, reason=f"{limit}, which counts as failed")
        else:
            worker.kill()
            self._workers.remove(worker)

    def _replace_unfinished_workers(self) -> None:
        """Replace workers that were still busy when the batch before this one stopped early."""
        for i, worker in enumerate(self._workers):
            if worker.tasks:
                worker.kill()
                self._workers[i] = self._start_worker()
                self._workers[i].wait_until_ready()

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            worker.kill()
        self._starter.shutdown()

    def _start_worker(self) -> "_Worker":
        return self._starter.submit(_Worker, self._call).result()

    def _collect(self, worker: "_Worker", batch: CallBatch, retried: set[int]) -> None:
        """Take every result that has arrived.

        A closed connection means that the process died during its current call.
        """
        try:
            while worker.tasks and worker.connection.poll():
                outcome = worker.connection.recv()
                assert isinstance(outcome, Outcome)
                index, _ = worker.tasks.popleft()
                now = time.monotonic()
                batch.add(index, outcome, seconds=now - worker.since)
                worker.since = now
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
            outcome = Outcome(kind=FailureKind.EXCEPTION, message=message)
            batch.add(index, outcome, seconds=time.monotonic() - worker.since)
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
        # The driver has threads and may have initialized CUDA, and neither survives a fork.
        context = multiprocessing.get_context("spawn")
        self.connection, child_connection = context.Pipe()
        self.process = context.Process(
            target=_serve,
            # Pickled here, so that the function's module is imported only after logging is set up.
            args=(child_connection, pickle.dumps(call), list_registered_secrets()),
            name="temper-reward",
            daemon=True,
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


def _serve(connection: Connection, pickled_call: bytes, secrets: Sequence[str]) -> None:
    """Receive lists of items and send one outcome per item, until the driver is gone."""
    try:
        _die_with_driver()
        # What the function logs must hide the same values as the driver's log.
        register_secrets(secrets)
        configure_logging()
        call: RewardCall = pickle.loads(pickled_call)  # noqa: S301 - from the parent process
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
