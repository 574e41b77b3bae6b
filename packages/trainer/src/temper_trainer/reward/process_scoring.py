"""Scoring in worker processes, which are killed and replaced when a call takes too long or takes them down."""

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
from temper_trainer.reward.outcome import Call, FailureKind, Item, Outcome, timeout_outcome

logger = logging.getLogger(__name__)

_SHARE = 16
"""Items a worker is given at once: few enough that none idles at the end of a batch."""
_START_TIMEOUT_S = 120.0
"""Longest wait for a new process: it imports this package first, which is no part of the time of a call."""

_KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a process that the kernel, short of memory, or a person has ended."""
_PR_SET_PDEATHSIG = 1

Task = tuple[int, Item]


class WorkerStartError(TemperError, RuntimeError):
    """A reward worker did not come up."""


class ProcessScoring:
    """Runs calls in ``num_workers`` spawned processes; the results come one by one, so that each call has its own time."""

    def __init__(self, call: Call, *, timeout_s: float, num_workers: int) -> None:
        """Start the workers.

        Raises:
            ConfigError: the function can't be sent to another process.
            WorkerStartError: a worker did not come up.
        """
        try:
            pickle.dumps(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"the reward function can't be sent to worker processes ({error}): define it at the top of a module, or set "
                "reward.num_workers to 0."
            ) from error
        self._call = call
        self._timeout_s = timeout_s
        # Workers die with the thread that started them: one that lives as long as they should.
        self._starter = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="temper-reward-starter"
        )
        self._workers = [self._start_worker() for _ in range(num_workers)]
        for worker in self._workers:
            worker.wait_until_ready()

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order.

        A call whose process is killed from outside is made once more.
        """
        waiting = deque(enumerate(items))
        repeated: set[int] = set()
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(items):
            for worker in self._workers:
                if not worker.tasks and waiting:
                    worker.give([waiting.popleft() for _ in range(min(_SHARE, len(waiting)))])
            busy = [worker for worker in self._workers if worker.tasks]
            patience = min(worker.since + self._timeout_s for worker in busy) - time.monotonic()
            ready = wait([worker.connection for worker in busy], timeout=max(0.0, patience))
            for worker in busy:
                if worker.connection in ready:
                    self._collect(worker, outcomes, repeated)
                elif time.monotonic() - worker.since >= self._timeout_s:
                    index, item = worker.tasks.popleft()
                    outcomes[index] = timeout_outcome(item, timeout_s=self._timeout_s)
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

    def _collect(self, worker: "_Worker", outcomes: dict[int, Outcome], repeated: set[int]) -> None:
        """Take every result that has arrived.

        A closed connection means that the process died in its current call.
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
            if worker.process.exitcode in _KILLED_FROM_OUTSIDE and index not in repeated:
                repeated.add(index)
                self._replace(worker, item=item, reason=f"{reason} and is called again")
                return
            worker.tasks.popleft()
            message = f"the worker process {reason} (prompt {prompt.prompt_id}, {prompt.source})"
            outcomes[index] = Outcome(kind=FailureKind.RAISED, message=message)
            self._replace(worker, item=item, reason=f"{reason}, which counts as failed")

    def _replace(self, worker: "_Worker", *, item: Item, reason: str) -> None:
        """Start a process in place of this one and give it the tasks that this one had left."""
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
            successor.give(list(worker.tasks))


class _Worker:
    """One process and what it has been given."""

    def __init__(self, call: Call) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, call), name="temper-reward", daemon=True
        )
        self.process.start()
        theirs.close()
        self.tasks: deque[Task] = deque()
        self.since = 0.0

    def wait_until_ready(self) -> None:
        """Wait for the first sign of life."""
        try:
            is_up = self.connection.poll(_START_TIMEOUT_S) and self.connection.recv() == "ready"
        except EOFError:
            is_up = False
        if not is_up:
            self.kill()
            raise WorkerStartError(
                f"a reward worker did not start (exit code {self.process.exitcode}): its own message is above. A script that starts "
                "workers needs `if __name__ == '__main__':` around its beginning."
            )

    def give(self, tasks: Sequence[Task]) -> None:
        """Send tasks; the time of the first begins now."""
        self.tasks = deque(tasks)
        self.since = time.monotonic()
        # A process that is already dead is noticed when its results are collected.
        with contextlib.suppress(ConnectionError):
            self.connection.send([item for _, item in tasks])

    def kill(self) -> None:
        """End the process and wait for its end."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, call: Call) -> None:
    """Run a worker: lists of items in, one outcome after the other out, until the driver is gone."""
    try:
        _die_with_driver()
        connection.send("ready")
        while True:
            for item in connection.recv():
                connection.send(call(item))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


def _die_with_driver() -> None:
    """Have the kernel kill this process when its driver dies.

    A function that hangs, or a process that is stopped, does not notice the closed connection.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() != parent.pid:  # it died before the request
        os._exit(0)
