"""Call reward functions with a time limit in threads of this process.

A thread cannot be killed: one that takes too long is abandoned, ends when its call returns, and
scores nothing more. A call that never releases the GIL, such as a runaway regular expression,
blocks the process and counts as timed out when it returns. Such functions need worker processes
(`reward_processes.ProcessScoring`).
"""

import asyncio

from temper_trainer.concurrency import DaemonThreads, PriorityLimit
from temper_trainer.reward.reward_calls import (
    CallRound,
    Item,
    Outcome,
    RewardCall,
    call_with_retries,
    make_timeout_outcome,
)

_MAX_THREADS = 1024
"""Maximum number of calls at a time if too many of them hang."""


class ThreadScoring:
    """Makes calls in daemon threads, more of them at a time if too many calls hang."""

    def __init__(
        self, call: RewardCall, *, timeout_s: float, num_threads: int = 1, max_retries: int = 0
    ) -> None:
        """Start no thread yet."""
        self._call = call
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._max_retries = max_retries
        self._limit = PriorityLimit(num_threads)
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
        """End idle threads; one whose call hangs ends with the process."""
        self._threads.close()

    def _resize(self, calls: CallRound) -> None:
        self._limit.resize(min(calls.choose_num_calls(self._num_threads), _MAX_THREADS))

    async def _make_call(self, item: Item) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome = await self._threads.call(self._call, item)
        except TimeoutError:
            return make_timeout_outcome(item, timeout_s=self._timeout_s)
        # The event loop may have been blocked during the call, so it cannot measure the time.
        if outcome.seconds > self._timeout_s:
            return make_timeout_outcome(item, timeout_s=self._timeout_s)
        return outcome
