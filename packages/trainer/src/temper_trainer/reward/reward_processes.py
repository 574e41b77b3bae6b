"""Call reward functions with a time limit in worker processes (reward.num_workers above 0).

A process whose call hangs or crashes is killed and replaced, with the programs that it has started.
`reward_threads` makes calls in threads of the driver instead.
"""

import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait

from temper_engine_api.errors import ConfigError, TemperError
from temper_trainer.concurrency import DaemonThreads, PriorityLimit
from temper_trainer.config.reward import RewardFunctionConfig
from temper_trainer.process_groups import kill_group, kill_group_on_exit
from temper_trainer.redaction import (
    configure_logging,
    list_registered_secrets,
    redact_standard_streams,
    register_secrets,
)
from temper_trainer.reward.registry import resolve_reward
from temper_trainer.reward.reward_calls import (
    BLOCKED_AFTER_S,
    CallRound,
    FailureKind,
    Item,
    Outcome,
    RewardCall,
    call_with_retries,
    make_timeout_outcome,
)

logger = logging.getLogger(__name__)

_MAX_EXTRA_WORKERS = 32
"""Additional processes for a round where calls time out; each may import heavy libraries."""
_START_TIMEOUT_S = 120.0
"""Maximum time for a new process to start; it imports this package, which is not part of a call's
time.
"""

_EXTERNAL_KILL_CODES = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes after the kernel (out of memory) or a user has killed a process."""
_PR_SET_PDEATHSIG = 1


class WorkerStartError(TemperError, RuntimeError):
    """A reward worker did not start."""


class ProcessScoring:
    """Makes calls in ``num_workers`` spawned processes, one call at a time in each."""

    def __init__(
        self, call: RewardCall, *, timeout_s: float, num_workers: int, max_retries: int = 0
    ) -> None:
        """Start the workers.

        Raises:
            ConfigError: If the function cannot be pickled.
            WorkerStartError: If a worker does not start.
        """
        try:
            # Pickled first, to name the setting: the error of multiprocessing would not. The
            # function's module is imported only after the worker has set up its logging.
            self._load_call = partial(pickle.loads, pickle.dumps(call))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"the reward function cannot be sent to worker processes ({error}): define it at "
                "the top level of a module, or set reward.num_workers to 0."
            ) from error
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        # PR_SET_PDEATHSIG kills a worker when the thread that started it ends, so this thread must
        # live as long as the workers.
        self._starter = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="temper-reward-starter"
        )
        self._num_workers = num_workers
        self._limit = PriorityLimit(num_workers)
        self._threads = DaemonThreads("temper-reward")
        # Guards the three below, which the threads of the calls share.
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._is_closed = False
        starting = [self._starter.submit(_Worker, self._load_call) for _ in range(num_workers)]
        self._idle = [each.result() for each in starting]
        self._workers = set(self._idle)
        for worker in self._idle:
            worker.wait_until_ready()

    async def score(self, item: Item, *, calls: CallRound, priority: tuple[int, int]) -> Outcome:
        """Score one completion in a process.

        A call whose process was killed externally is repeated once. After a timeout, the calls of
        the round also run in additional processes, so that a function that always hangs does not
        cost ``timeout_s`` per call.
        """
        self._resize(calls)
        async with self._limit.acquire(priority):
            outcome = await call_with_retries(
                partial(self._threads.call, self._make_call, item), max_retries=self._max_retries
            )
            calls.add(outcome, item=item)
        self._resize(calls)
        return outcome

    def close(self) -> None:
        """Kill the workers."""
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.close()
        self._starter.shutdown()

    def _resize(self, calls: CallRound) -> None:
        num_calls = calls.choose_num_calls(self._num_workers)
        self._limit.resize(min(num_calls, self._num_workers + _MAX_EXTRA_WORKERS))

    def _make_call(self, item: Item) -> Outcome:
        """Make a call in a free worker; in a thread, because it blocks."""
        prompt, _ = item
        for may_retry in (True, False):
            worker = self._take_worker()
            try:
                outcome = worker.call(item, timeout_s=self._timeout_s)
            except TimeoutError:
                limit = f"took longer than reward.timeout_s = {self._timeout_s:g} s"
                self._drop(worker, item=item, reason=f"{limit}, which counts as failed")
                return make_timeout_outcome(item, timeout_s=self._timeout_s)
            except (EOFError, ConnectionError):
                exit_code = worker.collect_exit_code()
                reason = f"died with exit code {exit_code}"
            else:
                self._give_back(worker)
                return outcome
            was_killed = exit_code in _EXTERNAL_KILL_CODES
            is_repeated = was_killed and may_retry and not self._is_closed
            end = "and is retried" if is_repeated else "which counts as failed"
            self._drop(worker, item=item, reason=f"{reason}{' ' if is_repeated else ', '}{end}")
            if not is_repeated:
                break
        message = f"the worker process {reason} (prompt {prompt.prompt_id}, {prompt.location})"
        return Outcome(kind=FailureKind.EXCEPTION, message=message)

    def _take_worker(self) -> "_Worker":
        """Return an idle worker, or a new one if others were killed or more calls may run."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        worker = self._starter.submit(_Worker, self._load_call).result()
        with self._lock:
            self._workers.add(worker)
        worker.wait_until_ready()
        return worker

    def _give_back(self, worker: "_Worker") -> None:
        """Keep a worker for other calls, unless there are enough."""
        with self._lock:
            if len(self._workers) <= self._num_workers and not self._is_closed:
                self._idle.append(worker)
                return
            self._workers.discard(worker)
        worker.kill()

    def _drop(self, worker: "_Worker", *, item: Item, reason: str) -> None:
        """Kill a worker; the next call starts a new one."""
        prompt, _ = item
        process = worker.process.pid
        with self._lock:
            self._workers.discard(worker)
            if not self._is_closed:
                logger.warning(
                    "replaced reward process %s: prompt %s (%s) %s",
                    process,
                    prompt.prompt_id,
                    prompt.location,
                    reason,
                )
        worker.kill()


def call_as_driver(function: RewardFunctionConfig, item: Item, *, timeout_s: float) -> Outcome:
    """Make one call as with reward.num_workers=0, but in a new process, which can be killed.

    The process makes the call in a thread and stops waiting after `timeout_s`. If it does not
    answer soon after that, the call holds the GIL, which would end a run.

    Raises:
        WorkerStartError: If the process does not start.
    """
    prompt, _ = item
    function = replace(function, arguments=dict(function.arguments))
    worker = _Worker(partial(_load_thread_call, function, timeout_s))
    try:
        worker.wait_until_ready()
        return worker.call(item, timeout_s=timeout_s + BLOCKED_AFTER_S)
    except TimeoutError:
        outcome = make_timeout_outcome(item, timeout_s=timeout_s)
        return replace(
            outcome,
            message=f"{outcome.message}. It never released Python's global lock (GIL), which ends "
            "a run: correct the function, or set reward.num_workers=1, which calls it in a process "
            "that is killed after reward.timeout_s",
        )
    except (EOFError, ConnectionError):
        message = (
            f"the function ended its process with exit code {worker.collect_exit_code()} (prompt "
            f"{prompt.prompt_id}, {prompt.location}), and would end the run: correct it, or set "
            "reward.num_workers=1"
        )
        return Outcome(kind=FailureKind.EXCEPTION, message=message)
    finally:
        worker.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ThreadCall:
    """Makes each call in a thread, and stops waiting for it after `timeout_s`."""

    call: RewardCall
    timeout_s: float

    def __call__(self, item: Item) -> Outcome:
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.append(self.call(item)), daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        return outcomes[0] if outcomes else make_timeout_outcome(item, timeout_s=self.timeout_s)


def _load_thread_call(function: RewardFunctionConfig, timeout_s: float) -> _ThreadCall:
    """Import a function by its name, because not every function of a run can be pickled."""
    call = RewardCall(function=resolve_reward(function), arguments=dict(function.arguments))
    return _ThreadCall(call=call, timeout_s=timeout_s)


class _Worker:
    """One process, which makes one call at a time."""

    def __init__(self, load_call: Callable[[], Callable[[Item], Outcome]]) -> None:
        """Start the process, which first calls `load_call`; it must be picklable."""
        # The driver has threads and may have initialized CUDA, and neither survives a fork.
        context = multiprocessing.get_context("spawn")
        self.connection, child_connection = context.Pipe()
        self.process = context.Process(
            target=_serve,
            args=(child_connection, load_call, list_registered_secrets()),
            name="temper-reward",
        )
        self.process.start()
        # Keep multiprocessing from waiting for this process. Otherwise, if it dies before another
        # process is started, its id becomes free and may be reused. `kill` ends the process group
        # by this id, and would then end other processes.
        multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]
        assert self.process.pid is not None
        self._group = self.process.pid
        self._watch = ExitStack()
        self._kill_lock = threading.Lock()
        self._is_killed = False
        try:
            self._watch.enter_context(kill_group_on_exit(self._group))
        except OSError:  # too many processes or open files
            self.kill()
            raise
        finally:
            # The process must be the only one with that end: otherwise its death would not close
            # the connection.
            child_connection.close()

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

    def call(self, item: Item, *, timeout_s: float) -> Outcome:
        """Send an item and wait for its outcome.

        Raises:
            TimeoutError: If it takes too long.
            EOFError, ConnectionError: If the process has died.
        """
        self.connection.send(item)
        if not self.connection.poll(timeout_s):
            raise TimeoutError
        outcome = self.connection.recv()
        assert isinstance(outcome, Outcome)
        return outcome

    def collect_exit_code(self) -> int | None:
        """Return the exit code of a process that has died; None if it still runs. Ends it."""
        # Before kill(), which would hide how the process ended.
        has_ended = bool(wait([self.process.sentinel], timeout=1.0))
        # Before the exit code is read, which frees the id of the process.
        self.kill()
        return self.process.exitcode if has_ended else None

    def kill(self) -> None:
        """Kill the process and the programs that it has started, and wait for its end. Idempotent.

        The thread of a call and `close` of the scoring may both do this.
        """
        with self._kill_lock:
            if self._is_killed:
                return
            self._is_killed = True
            # All of this comes before join, after which the group id may be reused: the watcher
            # would kill the new group with this id if the present process is killed.
            kill_group(self._group)
            self.process.kill()  # while it starts, it is not yet in a group of its own
            self._watch.close()
            self.process.join()
            self.connection.close()


def _serve(
    connection: Connection,
    load_call: Callable[[], Callable[[Item], Outcome]],
    secrets: Sequence[str],
) -> None:
    """Receive items and send their outcomes, until the driver is gone."""
    try:
        _die_with_driver()
        # Create a process group, so that programs started by the function end with it.
        os.setsid()
        # What the function prints must hide the same values as the driver's output.
        register_secrets(secrets)
        redact_standard_streams()
        configure_logging()
        call = load_call()
        connection.send("ready")
        while True:
            connection.send(call(connection.recv()))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


def _die_with_driver() -> None:
    """Have the kernel kill this process when the driver dies.

    A function that hangs, or a process that is stopped, would not notice the closed connection. The
    watcher of its process group kills it, too, but only after this process has created the group.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() != parent.pid:  # the driver died before prctl took effect
        os._exit(0)
