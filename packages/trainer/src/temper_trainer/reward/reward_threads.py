"""Call reward functions with a time limit in threads in this process.

A thread cannot be killed: one that takes too long is abandoned, ends when its call returns, and
scores nothing more. A call that never releases the GIL, such as a runaway regular expression,
blocks all threads; `stop_watcher` then ends the process. Such functions need worker processes
(`reward_processes.ProcessScoring`).
"""

import asyncio
import os
import threading
import time
from pathlib import Path

from temper_trainer.concurrency import DaemonThreads, PriorityLimit
from temper_trainer.reward.reward_calls import (
    BLOCKED_AFTER_S,
    CallRound,
    Item,
    Outcome,
    RewardCall,
    call_with_retries,
    make_timeout_outcome,
)
from temper_trainer.stop_watcher import kill_started_processes, open_call_table, watch_call

_MAX_THREADS = 1024
"""Maximum number of calls at a time when too many hang."""


_MAX_WAITING_CALLS = 8
"""Maximum number of calls at a time that wait, unless the user sets another."""
_MIN_WAIT_S = 0.01
"""Minimum wait that is worth another thread; waits for the GIL are often half as long."""


class CallPace:
    """Number of calls that may run at a time, doubled each time that all threads had fast waits.

    Calls that compute run one after the other. In parallel they would share the GIL, so each call
    would take longer and might exceed its timeout. When calls wait for something that serves one at
    a time, they take longer with each doubling. Doubling ends at a third of the timeout.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Allow one call at first."""
        self.num_calls = 1
        self._timeout_s = timeout_s
        self._threads: list[int] = []
        """The thread of each fast wait since the number last changed."""

    def add(self, *, seconds: float, busy_s: float, thread: int) -> None:
        """Count a call that returned.

        Args:
            seconds: Time of the call.
            busy_s: The part when the thread computed, or waited only for a core.
            thread: Identifier of the thread.
        """
        is_wait = seconds - busy_s > max(busy_s, _MIN_WAIT_S)
        if not is_wait or 3 * seconds > self._timeout_s:
            self.num_calls = max(self.num_calls // 2, 1)
            self._threads.clear()
            return
        self._threads.append(thread)
        # Two waits of each, because a busy machine may delay any call once. Threads are counted in
        # addition to calls, because one may return often while the others starve.
        is_proven = len(self._threads) >= 2 * self.num_calls
        if is_proven and len(set(self._threads)) >= self.num_calls:
            self.num_calls = min(2 * self.num_calls, _MAX_WAITING_CALLS)
            self._threads.clear()


class ThreadScoring:
    """Calls the reward in daemon threads, and uses more threads if calls wait or hang."""

    def __init__(
        self,
        call: RewardCall,
        *,
        name: str,
        timeout_s: float,
        num_threads: int | None = None,
        max_retries: int = 0,
    ) -> None:
        """Start no thread yet; `name` is for messages, and for `num_threads` see RewardConfig."""
        self._call = call
        self._name = name
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._max_retries = max_retries
        self._pace = CallPace(timeout_s=timeout_s)
        self._limit = PriorityLimit(num_threads or self._pace.num_calls)
        self._threads = DaemonThreads("temper-reward")

    async def score(self, item: Item, *, calls: CallRound, priority: tuple[int, int]) -> Outcome:
        """Score one completion in a thread."""
        self._resize(calls)
        async with self._limit.acquire(priority):
            outcome = await call_with_retries(
                lambda: self._make_call(item), max_retries=self._max_retries
            )
            calls.add(outcome, item=item)
            self._resize(calls)
        return outcome

    def close(self) -> None:
        """End idle threads, and kill the processes that calls which still run have started.

        A thread whose call hangs ends with this process.
        """
        self._threads.close()
        kill_started_processes(open_call_table(os.getpid()).list_threads())

    def _resize(self, calls: CallRound) -> None:
        num_calls = calls.choose_num_calls(self._num_threads or self._pace.num_calls)
        self._limit.resize(min(num_calls, _MAX_THREADS))

    async def _make_call(self, item: Item) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome, busy_s, thread = await self._threads.call(self._measure_call, item)
        except TimeoutError:
            return make_timeout_outcome(item, timeout_s=self._timeout_s)
        self._pace.add(seconds=outcome.seconds, busy_s=busy_s, thread=thread)
        # The event loop may have been blocked during the call, so it cannot measure the time.
        if outcome.seconds > self._timeout_s:
            return make_timeout_outcome(item, timeout_s=self._timeout_s)
        return outcome

    def _measure_call(self, item: Item) -> tuple[Outcome, float, int]:
        """Return the outcome, and `busy_s` and `thread` of `CallPace.add`."""
        prompt, _ = item
        limit_s = self._timeout_s + BLOCKED_AFTER_S
        message = (
            f"ERROR: the reward {self._name} has held Python's global lock (GIL) for "
            f"{{seconds}} s, so reward.timeout_s cannot end the call, and the run is ended (prompt "
            f"{prompt.prompt_id}, {prompt.location}). {{saved}} Before that, correct the function, "
            "or set reward.num_workers=1, which only ends the call."
        )
        busy_before_s = _measure_busy_s()
        with watch_call(message, limit_s=limit_s):
            outcome = self._call(item)
        return outcome, _measure_busy_s() - busy_before_s, threading.get_ident()


def _measure_busy_s() -> float:
    """Return how long this thread has computed or waited for a core.

    Time on the run queue is no reason for more threads; Linux counts it.
    """
    try:
        on_core, on_run_queue, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:
        return time.thread_time()
    return (int(on_core) + int(on_run_queue)) / 1e9
