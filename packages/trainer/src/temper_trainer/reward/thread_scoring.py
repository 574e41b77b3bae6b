"""Scoring in this process: one thread for a whole batch, given up and replaced when a call takes too long.

A thread can't be stopped. One that was given up ends when its call returns, and never scores anything more. A call that runs without
releasing the interpreter (a runaway regular expression) stops this process too, and is a time-out once it is over: such functions belong
in worker processes.
"""

import queue
import threading
import time
from collections.abc import Sequence

from temper_trainer.progress import advance_progress
from temper_trainer.reward.outcome import Call, Item, Outcome, timeout_outcome


class ThreadScoring:
    """Runs calls in daemon threads, one at a time."""

    def __init__(self, call: Call, *, timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item, in order."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(items):
            outcomes += self._run_until_timeout(items[len(outcomes) :])
        return outcomes

    def close(self) -> None:
        """Nothing is held."""

    def _run_until_timeout(self, items: Sequence[Item]) -> list[Outcome]:
        """Outcomes up to the first time-out, that one included."""
        results: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        is_given_up = threading.Event()

        def score_all() -> None:
            for item in items:
                if is_given_up.is_set():
                    return
                begun = time.monotonic()
                outcome = self._call(item)
                # Whoever waits for it may have been stopped all the while, and would take a late answer for a prompt one.
                is_late = time.monotonic() - begun > self._timeout_s
                results.put(
                    timeout_outcome(item, timeout_s=self._timeout_s) if is_late else outcome
                )

        threading.Thread(target=score_all, name="temper-reward", daemon=True).start()
        outcomes: list[Outcome] = []
        for item in items:
            try:
                outcomes.append(results.get(timeout=self._timeout_s))
                advance_progress("rewards")
            except queue.Empty:
                is_given_up.set()
                return [*outcomes, timeout_outcome(item, timeout_s=self._timeout_s)]
        return outcomes
