"""Score the completions of a round one by one, as they finish, and stop after too many failures."""

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from temper_engine_api.errors import TemperError
from temper_trainer.concurrency import DaemonThreads, PriorityLimit
from temper_trainer.config.reward import REWARD_MODEL, RewardConfig
from temper_trainer.reward.reward_calls import (
    CallRound,
    FailureKind,
    Item,
    JudgeUsage,
    Outcome,
    PartScoring,
)
from temper_trainer.types import Prompt, Score


class RewardModel(Protocol):
    """A reward model, wherever it runs."""

    def score_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return one score per token sequence, in order."""
        ...


class RewardFailureError(TemperError, RuntimeError):
    """So many reward calls failed that training on the others would be misleading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredItem:
    """A scored completion."""

    prompt: Prompt
    score: Score
    outcomes: Mapping[str, Outcome]
    """Outcome per part of the reward, by name."""

    @property
    def failure(self) -> Outcome:
        """The first failure among its parts, else the outcome of the first part.

        An item with several failed parts counts once. Its message goes to the log and to
        samples.jsonl.
        """
        known = list(self.outcomes.values())
        return next((each for each in known if each.kind is not None), known[0]).redact()


@dataclass(slots=True)
class ModelCohort:
    """Completions that the reward model scores in one pass.

    The pass starts when every open rollout of the cohort waits for its score. Its batch is then the
    same in every run, and scores are rounded in the same way.
    """

    num_open: int
    """Rollouts that may still need a score."""
    waiting: dict[int, tuple[Item, Sequence[int], "asyncio.Future[Outcome]"]] = field(
        default_factory=dict
    )
    """Completions with their tokens, by rollout index."""


class ModelScoring:
    """Scores completions with the reward model; one pass at a time."""

    def __init__(self, model: RewardModel) -> None:
        """Wrap a model that is ready."""
        self._model = model
        self._limit = PriorityLimit(1)
        self._threads = DaemonThreads("scoring")
        self._passes: set[asyncio.Task[None]] = set()

    async def score(
        self, item: Item, *, tokens: Sequence[int], cohort: ModelCohort, priority: tuple[int, int]
    ) -> Outcome:
        """Score one completion together with the others in its cohort."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        _, index = priority
        cohort.waiting[index] = (item, tokens, future)
        self.start_if_complete(cohort, priority=priority)
        return await future

    def start_if_complete(self, cohort: ModelCohort, *, priority: tuple[int, int]) -> None:
        """Start the pass of a cohort if every open rollout waits for it."""
        if not cohort.waiting or len(cohort.waiting) < cohort.num_open:
            return
        # In the order of the rollouts, because the model's batches depend on it.
        waiting = [entry for _, entry in sorted(cohort.waiting.items(), key=lambda each: each[0])]
        cohort.waiting = {}
        task = asyncio.create_task(self._run_pass(waiting, priority=priority))
        # The loop has only weak references to tasks.
        self._passes.add(task)
        task.add_done_callback(self._passes.discard)

    def close(self) -> None:
        """End the thread."""
        self._threads.close()

    async def _run_pass(
        self,
        waiting: "Sequence[tuple[Item, Sequence[int], asyncio.Future[Outcome]]]",
        *,
        priority: tuple[int, int],
    ) -> None:
        items = [item for item, _, _ in waiting]
        tokens = [each for _, each, _ in waiting]
        try:
            async with self._limit.acquire(priority):
                outcomes = await self._threads.call(
                    score_with_model, self._model, items, tokens=tokens
                )
        except BaseException as error:
            for _, _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, _, future), outcome in zip(waiting, outcomes, strict=True):
            if not future.done():  # its rollout may have been cancelled
                future.set_result(outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """The parts of a reward that prompts select."""

    weights: Mapping[str, float]
    """Weights of the parts by name."""
    is_sum: bool
    """False if the only part is the reward itself."""


class ScoringRound:
    """Scores the completions of rollouts that were requested together. Use in one event loop."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        prompts: Sequence[Prompt],
        rewards: Mapping[str, RewardParts],
        parts: Mapping[str, PartScoring | ModelScoring],
        name: str,
        priority: int,
        cohorts: Sequence[int] | None = None,
    ) -> None:
        """Prepare the round; call `score` for each completion.

        Args:
            config: The run's reward configuration.
            prompts: One prompt per rollout.
            rewards: The rewards that prompts select, by name.
            parts: Functions, judges and models of the rewards, by the name of their part.
            name: Name of the reward in messages.
            priority: Completions of rounds with a smaller number are scored first.
            cohorts: One number per rollout. The reward model scores those with the same number in
                one pass; None is one pass for all.
        """
        self._config = config
        self._prompts = prompts
        self._parts = parts
        self._name = name
        self._priority = priority
        self._rewards = [rewards[prompt.reward] for prompt in prompts]
        self._calls = {
            part: CallRound(
                num_items=len(prompts),
                max_failures=int(config.max_failure_fraction * len(prompts)),
                timeout_s=config.timeout_s,
            )
            for part in parts
        }
        self._cohort_numbers = cohorts or [0] * len(prompts)
        num_open = Counter(
            number
            for number, reward in zip(self._cohort_numbers, self._rewards, strict=True)
            if REWARD_MODEL in reward.weights
        )
        self._cohorts = {number: ModelCohort(count) for number, count in num_open.items()}
        self.failures: Counter[FailureKind] = Counter()
        """Failed completions by the kind of their first failure."""
        self._first_failure: Outcome | None = None
        self._num_scored = 0

    async def score(self, index: int, *, text: str, tokens: Sequence[int]) -> ScoredItem:
        """Score one rollout's completion; its parts run at the same time.

        Args:
            index: Index of the rollout.
            text: Everything after the prompt, for functions and judges.
            tokens: Tokens of prompt and completion, for a reward model.

        Raises:
            RewardFailureError: If a larger fraction of the round has failed than
                reward.max_failure_fraction.
        """
        prompt, reward = self._prompts[index], self._rewards[index]
        names = list(reward.weights)
        outcomes = await asyncio.gather(
            *(self._score_part(name, (prompt, text), index=index, tokens=tokens) for name in names)
        )
        by_part = dict(zip(names, outcomes, strict=True))
        scored = ScoredItem(
            prompt=prompt,
            score=_combine(by_part, reward),
            outcomes=by_part,
        )
        self._count(scored.failure)
        return scored

    def leave(self, index: int) -> None:
        """Record that a rollout ended without a completion to score."""
        if REWARD_MODEL in self._rewards[index].weights:
            cohort, model = self._find_cohort(index), self._parts[REWARD_MODEL]
            assert isinstance(model, ModelScoring)
            cohort.num_open -= 1
            model.start_if_complete(cohort, priority=(self._priority, index))

    async def _score_part(
        self, name: str, item: Item, *, index: int, tokens: Sequence[int]
    ) -> Outcome:
        part, priority = self._parts[name], (self._priority, index)
        if isinstance(part, ModelScoring):
            cohort = self._find_cohort(index)
            return await part.score(item, tokens=tokens, cohort=cohort, priority=priority)
        return await part.score(item, calls=self._calls[name], priority=priority)

    def _find_cohort(self, index: int) -> ModelCohort:
        return self._cohorts[self._cohort_numbers[index]]

    def _count(self, outcome: Outcome) -> None:
        """Count a scored completion, and raise if too many have failed."""
        self._num_scored += 1
        if outcome.kind is None:
            return
        self.failures[outcome.kind] += 1
        first = self._first_failure = self._first_failure or outcome
        num_failed, num_items = self.failures.total(), len(self._prompts)
        if num_failed <= self._config.max_failure_fraction * num_items:
            return
        counts = ", ".join(f"{count} {kind}" for kind, count in self.failures.items())
        num_left = num_items - self._num_scored
        not_made = f"; the last {num_left} were not made" if num_left else ""
        raise RewardFailureError(
            f"{num_failed} of {num_items} calls of {self._name} failed ({counts}){not_made}: more "
            f"than reward.max_failure_fraction = {self._config.max_failure_fraction}. The "
            f"first: {first.kind}: {first.message}. Correct the reward, or allow more failures or "
            f"time (reward.timeout_s).\n{first.trace}".rstrip()
        )


def score_with_model(
    model: RewardModel, items: Sequence[Item], *, tokens: Sequence[Sequence[int]]
) -> list[Outcome]:
    """Return one outcome per item, in order; a non-finite score is a failure."""
    outcomes = []
    for (prompt, _), score in zip(items, model.score_rows(tokens), strict=True):
        if math.isfinite(score):
            outcomes.append(Outcome(reward=score))
        else:
            message = (
                f"the reward model gave {score} (prompt {prompt.prompt_id}, {prompt.location})"
            )
            outcomes.append(Outcome(kind=FailureKind.NOT_FINITE, message=message))
    return outcomes


def _combine(outcomes: Mapping[str, Outcome], parts: RewardParts) -> Score:
    """Return an item's reward or, if none of its parts failed, their weighted sum."""
    failed = next((each for each in outcomes.values() if each.kind is not None), None)
    if failed is not None or not parts.is_sum:
        return (failed or next(iter(outcomes.values()))).redact().to_score()
    rewards = [reward for name in parts.weights if (reward := outcomes[name].reward) is not None]
    return Score(
        reward=sum(w * each for w, each in zip(parts.weights.values(), rewards, strict=True)),
        components=tuple(rewards),
    )


def measure_scores(
    items: Sequence[ScoredItem], *, config: RewardConfig, has_parts: bool
) -> dict[str, float]:
    """Return failures by kind, the mean per part, and how many calls were repeated.

    Args:
        items: Scored completions.
        config: The run's reward configuration.
        has_parts: True if the rewards of the run have several parts.
    """
    failures = Counter(each.failure.kind for each in items)
    metrics = {f"reward/{kind}": float(failures[kind]) for kind in FailureKind}
    if config.max_retries:
        metrics["reward/retries"] = float(
            sum(outcome.num_retries for each in items for outcome in each.outcomes.values())
        )
    if has_parts:
        metrics |= _measure_parts(items)
    return metrics | _measure_sums(items, names=config.sums)


def list_usages(items: Sequence[ScoredItem], *, judge: str) -> list[JudgeUsage]:
    """Return requests, tokens and time per score of a judge."""
    outcomes = [each.outcomes[judge] for each in items if judge in each.outcomes]
    return [each.usage for each in outcomes if each.usage is not None]


def _measure_parts(items: Sequence[ScoredItem]) -> dict[str, float]:
    """Return mean and number of failures per part, over the items that have it."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for each in items for name in each.outcomes):
        outcomes = [each.outcomes[name] for each in items if name in each.outcomes]
        rewards = [each.reward for each in outcomes if each.reward is not None]
        # Import paths have a colon, which not every tracker accepts.
        key = "reward/" + re.sub(r"[^.\w-]", "_", name)
        metrics[f"{key}/failed"] = float(len(outcomes) - len(rewards))
        if rewards:
            metrics[f"{key}/mean"] = math.fsum(rewards) / len(rewards)
    return metrics


def _measure_sums(items: Sequence[ScoredItem], *, names: Iterable[str]) -> dict[str, float]:
    """Return the mean per sum in reward.sums, over the completions that it scored."""
    metrics: dict[str, float] = {}
    for name in names:
        chosen = [
            each.score.reward
            for each in items
            if each.prompt.reward == name and each.score.reward is not None
        ]
        if chosen:
            metrics[f"reward/{name}/mean"] = math.fsum(chosen) / len(chosen)
    return metrics
