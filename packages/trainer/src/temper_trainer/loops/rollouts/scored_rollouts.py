"""Run rollouts to their end, and score each of them when it ends."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.loops.rollouts.multi_turn import Conversation, measure_turns
from temper_trainer.loops.run.run_components import RunComponents
from temper_trainer.progress import track_progress
from temper_trainer.reward.scoring import Scorer
from temper_trainer.reward.scoring_round import ScoredItem, ScoringRound
from temper_trainer.types import Prompt, SamplingRequest, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """A finished rollout with its score."""

    prompt: Prompt
    conversation: Conversation
    text: str
    """Everything after the prompt, without special tokens."""
    item: ScoredItem | None
    """Result of the scorer; None if the rollout failed."""
    ended_at: float
    """`time.perf_counter` when the rollout ended, before it was scored."""
    scored_at: float
    """The same when its score was known."""

    @property
    def score(self) -> Score:
        """Score of the reward function or model, without the environment's rewards."""
        if self.item is not None:
            return self.item.score
        return Score(reward=None, failure=self.conversation.failure)

    @property
    def reward(self) -> float | None:
        """Score plus the environment's rewards; None if the rollout or its scoring failed."""
        score = self.score.reward
        return None if score is None else score + self.conversation.reward


async def run_scored_rollouts(
    components: RunComponents,
    requests: Sequence[SamplingRequest],
    *,
    prompts: Sequence[Prompt],
    given: Mapping[int, Conversation] | None = None,
    priority: int = 0,
    on_start: Callable[[int], None] | None = None,
    on_scored: Callable[[int, ScoredRollout], None] | None = None,
    cohorts: Sequence[int] | None = None,
) -> list[ScoredRollout]:
    """Complete the rollout of each request, and score it when it ends.

    Args:
        components: Components of the run.
        requests: Requests of the first completions.
        prompts: Prompt of each request.
        given: Rollouts that need not be sampled, by the index of their request.
        priority: Rollouts with a smaller number continue first.
        on_start: Called with the index of a request that reaches the sampler.
        on_scored: Called with each rollout and the index of its request.
        cohorts: Rollouts that a reward model scores in one pass; see `Scorer.open_round`.
    """
    given = given or {}
    scoring = components.scorer.open_round(prompts, priority=priority, cohorts=cohorts)
    scored: dict[int, ScoredRollout] = {}

    async def finish(index: int, conversation: Conversation) -> None:
        scored[index] = await _score(
            index,
            conversation,
            prompt=prompts[index],
            text=components.text_decoder.decode(conversation.tokens),
            scoring=scoring,
        )
        if on_scored is not None:
            on_scored(index, scored[index])

    is_single_turn = not components.config.all_environments
    num_sampled = len(requests) - len(given)
    with (
        track_progress("rewards", total=len(requests)),
        track_progress("completions", total=num_sampled if is_single_turn else None),
    ):
        await components.scheduler.run_rollouts(
            requests,
            prompts=prompts,
            priority=priority,
            given=given,
            on_start=on_start,
            finish=finish,
        )
    return [scored[i] for i in range(len(requests))]


async def _score(
    index: int, conversation: Conversation, *, prompt: Prompt, text: str, scoring: ScoringRound
) -> ScoredRollout:
    """Score a rollout that has ended, unless it failed."""
    ended_at = time.perf_counter()
    item = None
    if conversation.failure is None:
        item = await scoring.score(index, text=text, tokens=conversation.full_tokens)
    else:
        scoring.leave(index)
    return ScoredRollout(
        # The first observation of an environment is not trained, like the prompt. An agent writes
        # its own prompt.
        prompt=replace(prompt, tokens=(*conversation.request.prompt_tokens, *conversation.opening)),
        conversation=conversation,
        text=text,
        item=item,
        ended_at=ended_at,
        scored_at=time.perf_counter(),
    )


def measure_scoring(
    rollouts: Sequence[ScoredRollout], *, scorer: Scorer, config: TrainerConfig
) -> dict[str, float]:
    """Return the metrics of rewards and failures and, with an environment, of turns and tools.

    The turns of given completions do not count.
    """
    items = [each.item for each in rollouts if each.item is not None]
    metrics = scorer.measure(items)
    if not config.all_environments:
        if config.rollout.max_failure_fraction:
            metrics["rollout/failed"] = float(len(rollouts) - len(items))
        return metrics
    sampled = [each for each in rollouts if not each.conversation.is_given]
    metrics |= measure_turns([each.conversation for each in sampled])
    for name in config.environments:
        metrics |= _measure_environment(
            name, [each for each in sampled if each.prompt.environment == name]
        )
    return metrics


def _measure_environment(name: str, rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """Return the metrics of the rollouts of one of several environments; none if it had none."""
    if not rollouts:
        return {}
    rewards = [each.reward for each in rollouts if each.reward is not None]
    num_turns = sum(len(each.conversation.completions) for each in rollouts)
    num_failed = sum(each.conversation.failure is not None for each in rollouts)
    metrics = {
        f"environment/{name}/rollouts": float(len(rollouts)),
        f"environment/{name}/turns_mean": num_turns / len(rollouts),
        f"environment/{name}/failed": float(num_failed),
    }
    if rewards:
        metrics[f"environment/{name}/reward_mean"] = sum(rewards) / len(rewards)
    return metrics
