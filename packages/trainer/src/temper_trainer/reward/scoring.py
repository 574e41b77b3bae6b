"""Completions in, scores out; failures are counted by kind, and too many of them stop the run."""

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from temper_engine_api.errors import TemperError
from temper_trainer.config.data import RewardConfig
from temper_trainer.reward.outcome import Call, FailureKind, Item, Outcome
from temper_trainer.reward.process_scoring import ProcessScoring
from temper_trainer.reward.registry import resolve_reward
from temper_trainer.reward.thread_scoring import ThreadScoring
from temper_trainer.types import Score


class RewardFailureError(TemperError, RuntimeError):
    """So many calls of the reward function failed that training on the others would mislead."""


class _Scoring(Protocol):
    def run(self, items: Sequence[Item]) -> list[Outcome]: ...

    def close(self) -> None: ...


class Scorer:
    """Scores completions as the configuration says; a context manager, because it may hold processes."""

    def __init__(self, config: RewardConfig) -> None:
        """Resolve the function; processes start on entering.

        Raises:
            ConfigError: see resolve_reward.
        """
        self._config = config
        self._call = Call(function=resolve_reward(config), arguments=dict(config.arguments))
        self._scoring: _Scoring | None = None
        self._failures: Counter[FailureKind] = Counter()

    def __enter__(self) -> "Scorer":
        config = self._config
        if config.num_workers:
            self._scoring = ProcessScoring(self._call, timeout_s=config.timeout_s, num_workers=config.num_workers)
        else:
            self._scoring = ThreadScoring(self._call, timeout_s=config.timeout_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._scoring is not None
        self._scoring.close()
        self._scoring = None

    def score(self, items: Sequence[Item]) -> list[Score]:
        """One score per (prompt, completion text), in order.

        Raises:
            RewardFailureError: a larger share of these failed than reward.max_failure_share.
        """
        assert self._scoring is not None, "a Scorer scores inside its `with` only"
        outcomes = self._scoring.run(items)
        failed = [outcome for outcome in outcomes if outcome.kind is not None]
        self._failures = Counter(outcome.kind for outcome in failed if outcome.kind is not None)
        if len(failed) > self._config.max_failure_share * len(items):
            counts = ", ".join(f"{count} {kind}" for kind, count in self._failures.items())
            raise RewardFailureError(
                f"{len(failed)} of {len(items)} calls of reward.function {self._config.function} failed ({counts}), more than "
                f"reward.max_failure_share = {self._config.max_failure_share}. The first: {failed[0].kind}: {failed[0].message}\n"
                f"{failed[0].trace}"
            )
        return [outcome.as_score() for outcome in outcomes]

    def metrics(self) -> dict[str, float]:
        """How many calls of the last ``score`` failed, by kind."""
        return {f"reward/{kind}": float(self._failures[kind]) for kind in FailureKind}
