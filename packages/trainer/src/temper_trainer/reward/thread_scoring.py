"""Score in a thread of this process, which is abandoned and replaced if a call takes too long.

A thread cannot be killed. An abandoned one ends when its call returns, and scores nothing more. A
call that never releases the GIL, such as a runaway regular expression, blocks the whole process and
counts as timed out when it returns: such functions need worker processes (reward.num_workers).
"""

import queue
import threading
import time
from collections.abc import Sequence

from temper_trainer.progress import advance_progress
from temper_trainer.reward.outcome import Item, Outcome, RewardCall, make_timeout_outcome


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
