"""Score in worker processes, which are killed and replaced if a call hangs or crashes."""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait

from temper_engine_api.errors import ConfigError, TemperError
from temper_trainer.progress import advance_progress
from temper_trainer.reward.outcome import (
    FailureKind,
    Item,
    Outcome,
    RewardCall,
    make_timeout_outcome,
)

logger = logging.getLogger(__name__)

_ITEMS_PER_MESSAGE = 16
"""Items that a worker receives at once; few, so that no worker idles at the end of a batch."""
_START_TIMEOUT_S = 120.0
"""Maximum time for a new process to start; it imports this package, which is not part of a call's
time.
"""

_EXTERNAL_KILL_CODES = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a process that the kernel (out of memory) or a person has killed."""
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
            message = f"the worker process {reason} (prompt {prompt.prompt_id}, {prompt.source})"
            outcomes[index] = Outcome(kind=FailureKind.RAISED, message=message)
            self._replace(worker, item=item, reason=f"{reason}, which counts as failed")

    def _replace(self, worker: "_Worker", *, item: Item, reason: str) -> None:
        """Start a new process in place of a worker and send it the worker's remaining tasks."""
        prompt, _ = item
        process = worker.process.pid
        logger.warning(
            "replaced reward process %s: prompt %s (%s) %s",
            process,
            prompt.prompt_id,
            prompt.source,
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
