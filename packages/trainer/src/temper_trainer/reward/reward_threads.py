"""Call reward functions with a time limit in threads of this process.

A thread cannot be killed: one that takes too long is abandoned, ends when its call returns, and
scores nothing more. A call that never releases the GIL, such as a runaway regular expression,
blocks the process and counts as timed out when it returns. Such functions need worker processes
(`reward_calls.ProcessScoring`).
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from temper_trainer.reward.reward_calls import (
    CallBatch,
    Item,
    Outcome,
    RewardCall,
    make_timeout_outcome,
)

logger = logging.getLogger(__name__)

_MAX_THREADS = 1024
"""Maximum number of threads in a batch whose calls hang."""


class ThreadScoring:
    """Run calls in daemon threads: one at a time, but many at a time if too many calls hang."""

    def __init__(self, call: RewardCall, *, timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s

    def run(self, items: Sequence[Item], *, max_failures: int) -> list[Outcome]:
        """Return one outcome per item, in order; those of the calls made if too many failed."""
        batch = CallBatch(items, max_failures=max_failures, timeout_s=self._timeout_s)
        results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        # Held while a thread takes a task and while it is abandoned, so that no task is lost.
        lock = threading.Lock()
        threads: list[_CallThread] = []
        while not batch.is_over:
            with lock:
                num_missing = min(batch.choose_num_calls(1), _MAX_THREADS) - len(threads)
                threads += [
                    _CallThread(
                        self._call, batch, lock=lock, results=results, timeout_s=self._timeout_s
                    )
                    for _ in range(min(num_missing, len(batch.waiting)))
                ]
                since = min((thread.since for thread in threads), default=0.0)
            try:
                remaining_s = since + self._timeout_s - time.monotonic()
                result = results.get(timeout=max(0.0, remaining_s))
                batch.add(result.index, result.outcome, seconds=result.seconds)
            except queue.Empty:
                with lock:
                    _abandon_late_threads(threads, batch, timeout_s=self._timeout_s)
            threads = [thread for thread in threads if thread.is_active]
        for thread in threads:
            thread.is_active = False
        return batch.list_outcomes()

    def close(self) -> None:
        """Do nothing; threads need no cleanup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    index: int
    outcome: Outcome
    seconds: float


class _CallThread:
    """A daemon thread that makes one call after another until none waits, or it is abandoned."""

    def __init__(
        self,
        call: RewardCall,
        batch: CallBatch,
        *,
        lock: threading.Lock,
        results: "queue.SimpleQueue[_Result]",
        timeout_s: float,
    ) -> None:
        self._call = call
        self._batch = batch
        self._lock = lock
        self._results = results
        self._timeout_s = timeout_s
        self.is_active = True
        """False if the thread has ended or shall make no more calls."""
        self.task = batch.waiting.popleft()
        """Index and item of the current call."""
        self.since = time.monotonic()
        """Start of the current call."""
        # A daemon, because an abandoned thread must not keep the process from exiting.
        threading.Thread(target=self._make_calls, name="temper-reward", daemon=True).start()

    def _make_calls(self) -> None:
        while self.is_active:
            index, item = self.task
            started = time.monotonic()
            outcome = self._call(item)
            # The waiting thread may have been blocked during the call, so it cannot measure the
            # time itself.
            seconds = time.monotonic() - started
            if seconds > self._timeout_s:
                outcome = make_timeout_outcome(item, timeout_s=self._timeout_s)
            self._results.put(_Result(index=index, outcome=outcome, seconds=seconds))
            with self._lock:
                if not self._batch.waiting:
                    self.is_active = False
                if self.is_active:
                    self.task = self._batch.waiting.popleft()
                    self.since = time.monotonic()


def _abandon_late_threads(
    threads: Sequence[_CallThread], batch: CallBatch, *, timeout_s: float
) -> None:
    """Record the timeouts of calls that take too long."""
    now = time.monotonic()
    for thread in threads:
        if now - thread.since < timeout_s:
            continue
        thread.is_active = False
        index, item = thread.task
        if not batch.has_timeout:
            prompt, _ = item
            logger.warning(
                "the reward of prompt %s (%s) took longer than reward.timeout_s = %g s, which "
                "counts as failed; %s of %s calls are done",
                prompt.prompt_id,
                prompt.location,
                timeout_s,
                batch.num_called,
                batch.num_items,
            )
        batch.add_timeout(index, item)
