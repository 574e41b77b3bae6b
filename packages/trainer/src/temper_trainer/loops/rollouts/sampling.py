"""Sample and score the rollouts of a step, in one round or in several with dynamic sampling."""

import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from temper_engine_api.errors import BatchError, ConfigError
from temper_trainer.algorithms.advantages.advantage_statistics import compute_group_statistics
from temper_trainer.config.algorithm import AlgorithmConfig, DynamicSamplingConfig
from temper_trainer.config.reward import ShapingConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.streams import measure_difficulty
from temper_trainer.loops.rollouts.multi_turn import Conversation, add_environment_rewards
from temper_trainer.loops.run.run_components import RunComponents
from temper_trainer.loops.run.seeds import derive_seed
from temper_trainer.progress import StepTimer, track_progress
from temper_trainer.reward.scoring import RunningStats, shape_rewards
from temper_trainer.reward.scoring_round import ScoredItem
from temper_trainer.types import (
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    SamplingRequest,
    Score,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """The scored rollouts of a step, whose rewards are not shaped yet."""

    rollouts: list[Rollout]
    """Complete groups, except for rollouts that failed. Group ids count from 0."""
    metrics: dict[str, float]

    def shape(
        self, config: TrainerConfig, *, reward_stats: RunningStats
    ) -> tuple["SampledStep", RunningStats]:
        """Return the step with shaped rewards, and the statistics after it.

        Args:
            config: The configuration.
            reward_stats: Statistics of the rewards of all earlier steps.
        """
        rollouts, reward_stats, metrics = _shape(
            self.rollouts,
            shaping=config.reward.shaping,
            max_tokens=config.max_completion_tokens,
            reward_stats=reward_stats,
        )
        metrics = self.metrics | metrics
        metrics |= measure_difficulty(rollout.prompt for rollout in rollouts)
        return SampledStep(rollouts=rollouts, metrics=metrics), reward_stats


async def sample_step(
    components: RunComponents, *, step: int, timer: StepTimer, reward_stats: RunningStats
) -> SampledStep:
    """Sample the rollouts of a step.

    With dynamic sampling, groups whose scores are all equal are discarded, and further prompts are
    sampled until there are ``prompts_per_step`` groups. Surplus groups are discarded, too. A group
    is kept or discarded as a unit, so the statistics of a group are exact. The denominators of the
    step count only what is kept.

    Args:
        components: Components of the run.
        step: Number of the step, from 1.
        timer: Measures the time of the rewards.
        reward_stats: Statistics of earlier rewards, with which dynamic sampling compares.

    Raises:
        BatchError: If no completion has a reward, or dynamic sampling finds too few groups.
    """
    config = components.config
    dynamic, num_prompts = config.algorithm.dynamic_sampling, config.batching.prompts_per_step
    if dynamic is None:
        rollouts, metrics = await sample_rollouts(
            components, components.prompts.take(num_prompts), step=step, timer=timer
        )
        return SampledStep(rollouts=rollouts, metrics=metrics)
    kept: list[Rollout] = []
    rounds: list[dict[str, float]] = []
    num_kept = num_sampled = num_zero_std = 0
    while num_kept < num_prompts and len(rounds) < dynamic.max_rounds:
        prompts = components.prompts.take(dynamic.prompts_per_round or num_prompts)
        rollouts, metrics = await sample_rollouts(
            components, prompts, step=step, timer=timer, first_group=num_sampled
        )
        num_sampled += len(prompts)
        rounds.append(metrics)
        compared = rollouts
        if dynamic.on != "score":
            # The updated statistics are dropped: groups that are discarded must not count in them.
            compared, _, _ = _shape(
                rollouts,
                shaping=config.reward.shaping,
                max_tokens=config.max_completion_tokens,
                reward_stats=reward_stats,
            )
        useful = _find_useful_groups(compared)
        num_zero_std += len({rollout.group_id for rollout in rollouts}) - len(useful)
        selected = useful[: num_prompts - num_kept]
        kept += [rollout for rollout in rollouts if rollout.group_id in set(selected)]
        num_kept += len(selected)
    _check_num_groups(
        dynamic, num_prompts=num_prompts, num_kept=num_kept, num_sampled=num_sampled, step=step
    )
    # Rewards are shaped after the selection, because the running statistics count only rollouts
    # that are trained.
    return SampledStep(
        rollouts=_renumber_groups(kept),
        metrics=_merge_rounds(rounds)
        | {
            "dynamic_sampling/rounds": float(len(rounds)),
            "dynamic_sampling/zero_std_groups": float(num_zero_std),
            "dynamic_sampling/surplus_groups": float(num_sampled - num_zero_std - num_kept),
            "dynamic_sampling/kept_groups": float(num_kept),
        },
    )


async def sample_rollouts(
    components: RunComponents,
    prompts: Sequence[Prompt],
    *,
    step: int,
    timer: StepTimer,
    first_group: int = 0,
) -> tuple[list[Rollout], dict[str, float]]:
    """Sample and score ``group_size`` completions of each prompt.

    Completions without a reward are counted and left out.

    Args:
        components: Components of the run.
        prompts: Prompts of this round.
        step: Number of the step, from 1.
        timer: Measures the time of the rewards.
        first_group: Number of groups in earlier rounds of the step; ids and seeds continue from it.

    Returns:
        Rollouts with their scores as rewards, and the metrics of the round.

    Raises:
        BatchError: If no completion has a reward.
    """
    config, group_size = components.config, components.config.algorithm.group_size
    request_prompts, requests = _make_requests(
        prompts,
        algorithm=config.algorithm,
        sampling=config.sampling,
        seed=config.run.seed,
        step=step,
        first_sample=first_group * group_size,
    )
    given = choose_off_policy_prompts(
        len(prompts),
        fraction=config.distillation.off_policy_fraction,
        seed=derive_seed(config.run.seed, "off-policy", step, first_group),
    )
    scored = await complete_and_score(
        components, requests, prompts=request_prompts, timer=timer, given=given, priority=step
    )
    _check_environment_rewards(scored.conversations, algorithm=config.algorithm)
    rollouts = _make_rollouts(
        scored, num_prompts=len(prompts), group_size=group_size, first_group=first_group
    )
    num_sampled = len(prompts) * group_size
    if not any(not rollout.completion.is_given for rollout in rollouts):
        raise BatchError(
            f"none of {num_sampled} completions of step {step} has a reward: check the reward "
            "function."
        )
    # Of the policy only: given completions say nothing about it.
    metrics = measure_round(
        [rollout for rollout in rollouts if not rollout.completion.is_given],
        conversations=[
            each
            for i, each in enumerate(scored.conversations[:num_sampled])
            if i not in given and each.failure is None
        ],
    )
    if given:
        metrics["rollout/off_policy_fraction"] = len(given) / len(prompts)
    return rollouts, metrics | scored.turn_metrics | scored.reward_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCompletions:
    """Finished rollouts with their rewards; all lists have one entry per request."""

    prompts: Sequence[Prompt]
    conversations: list[Conversation]
    texts: list[str]
    scores: list[Score]
    """Scores of the reward function or model alone."""
    rewards: list[float | None]
    """Scores plus the environment's rewards; None if scoring failed."""
    turn_metrics: dict[str, float]
    """Metrics of turns and tools."""
    reward_metrics: dict[str, float]
    """Metrics of the scorer."""


async def complete_and_score(
    components: RunComponents,
    requests: Sequence[SamplingRequest],
    *,
    prompts: Sequence[Prompt],
    timer: StepTimer | None = None,
    given: Collection[int] = (),
    priority: int = 0,
) -> ScoredCompletions:
    """Complete the rollout of each request and score it.

    Args:
        components: Components of the run.
        requests: Requests of the first completions.
        prompts: Prompt of each request.
        timer: Measures the time of the rewards; None does not measure it.
        given: Indices of requests that are answered by the given completions of their prompts.
        priority: Rollouts with a smaller number continue first.
    """
    environment, version = components.config.environment, components.publisher.version
    given_conversations = {
        i: _make_given_conversation(requests[i], prompt=prompts[i], weight_version=version)
        for i in given
    }
    scoring = _RolloutScoring(components, prompts=prompts, priority=priority)
    num_sampled = len(requests) - len(given)
    with (
        track_progress("rewards", total=len(requests)),
        track_progress("completions", total=num_sampled if environment is None else None),
    ):
        conversations, turn_metrics = await components.scheduler.run_rollouts(
            requests,
            prompts=prompts,
            priority=priority,
            given=given_conversations,
            finish=scoring.score,
        )
    if timer is not None:
        timer.add("reward", scoring.seconds_after_sampling)
    scores = [
        scoring.scored[i].score
        if each.failure is None
        else Score(reward=None, failure=each.failure)
        for i, each in enumerate(conversations)
    ]
    in_order = [scored for _, scored in sorted(scoring.scored.items(), key=lambda each: each[0])]
    return ScoredCompletions(
        prompts=prompts,
        conversations=conversations,
        texts=[scoring.texts[i] for i in range(len(requests))],
        scores=scores,
        rewards=add_environment_rewards(scores, conversations=conversations),
        turn_metrics=turn_metrics,
        reward_metrics=components.scorer.measure(in_order),
    )


class _RolloutScoring:
    """Scores the rollouts of a round as they end."""

    def __init__(
        self, components: RunComponents, *, prompts: Sequence[Prompt], priority: int
    ) -> None:
        self._tokenizer = components.tokenizer
        self._round = components.scorer.open_round(prompts, priority=priority)
        self._num_open = len(prompts)
        self._last_end = time.perf_counter()
        self.texts: dict[int, str] = {}
        """Everything after the prompt, by the index of the rollout."""
        self.scored: dict[int, ScoredItem] = {}
        """Scores by the index of the rollout, except of failed ones."""

    async def score(self, index: int, conversation: Conversation) -> None:
        """Score a rollout that has ended."""
        self._num_open -= 1
        if self._num_open == 0:
            self._last_end = time.perf_counter()
        text = self._tokenizer.decode(conversation.tokens, skip_special_tokens=True)
        self.texts[index] = text
        if conversation.failure is not None:
            self._round.leave(index)
            return
        self.scored[index] = await self._round.score(
            index, text=text, tokens=conversation.full_tokens
        )

    @property
    def seconds_after_sampling(self) -> float:
        """Seconds since the last rollout ended, which only scoring has taken."""
        return time.perf_counter() - self._last_end


def choose_off_policy_prompts(num_prompts: int, *, fraction: float, seed: int) -> frozenset[int]:
    """Choose the prompts of a step whose given completion is trained, by their indices.

    At least one prompt is left for the policy.

    Example:
        >>> len(choose_off_policy_prompts(8, fraction=0.25, seed=0))
        2
    """
    count = min(round(fraction * num_prompts), num_prompts - 1)
    return frozenset(random.Random(seed).sample(range(num_prompts), count))


def _make_given_conversation(
    request: SamplingRequest, *, prompt: Prompt, weight_version: int
) -> Conversation:
    """Return the conversation with the prompt's given completion, up to the limit of samples."""
    tokens = prompt.given_completion[: request.sampling.max_tokens]
    is_complete = len(tokens) == len(prompt.given_completion)
    completion = Completion(
        request_id=request.request_id,
        tokens=tokens,
        # No sampler has computed any; see `rl_step._replace_given_logprobs`.
        rollout_logprobs=(0.0,) * len(tokens),
        finish_reason=FinishReason.END_TOKEN if is_complete else FinishReason.MAX_TOKENS,
        weight_version=weight_version,
        is_given=True,
    )
    return Conversation(request=request, environment=None, first=completion)


def _make_rollouts(
    scored: ScoredCompletions, *, num_prompts: int, group_size: int, first_group: int
) -> list[Rollout]:
    """Return the rollouts that have a reward and, with ReMax, a baseline.

    Args:
        scored: Completions of `_make_requests`: ``group_size`` per prompt, then with ReMax a greedy
            one per prompt.
        num_prompts: Number of prompts.
        group_size: Number of sampled completions per prompt.
        first_group: Id of the first group.
    """
    num_sampled = num_prompts * group_size
    # One per prompt; empty without ReMax. They include the environment's rewards too: a baseline
    # without them would shift all advantages of its prompt.
    baselines = scored.rewards[num_sampled:]
    greedy_conversations = scored.conversations[num_sampled:]
    return [
        Rollout(
            prompt=scored.prompts[i],
            completion=scored.conversations[i].completions[0],
            turns=tuple(scored.conversations[i].turns),
            text=scored.texts[i],
            reward=reward,
            group_id=first_group + i // group_size,
            sample_id=first_group * group_size + i,
            components=scored.scores[i].components,
            baseline=baselines[i // group_size] if baselines else None,
            baseline_tokens=len(greedy_conversations[i // group_size].tokens) if baselines else 0,
            turn_rewards=tuple(scored.conversations[i].rewards),
        )
        for i, reward in enumerate(scored.rewards[:num_sampled])
        # If a prompt has no baseline, none of its completions can be trained.
        if reward is not None and (not baselines or baselines[i // group_size] is not None)
    ]


def _make_requests(
    prompts: Sequence[Prompt],
    *,
    algorithm: AlgorithmConfig,
    sampling: SamplingConfig,
    seed: int,
    step: int,
    first_sample: int,
) -> tuple[list[Prompt], list[SamplingRequest]]:
    """Return the requests of a round, and the prompt of each.

    They are ``group_size`` requests per prompt, group after group. With ReMax a greedy one per
    prompt follows: its reward is the baseline of the prompt.
    """
    sampled_prompts = [p for p in prompts for _ in range(algorithm.group_size)]
    requests = [
        SamplingRequest(
            request_id=i,
            prompt_tokens=prompt.tokens,
            sampling=sampling,
            seed=derive_seed(seed, "sampling", step, first_sample + i),
        )
        for i, prompt in enumerate(sampled_prompts)
    ]
    if not algorithm.reads("baselines"):
        return sampled_prompts, requests
    greedy = replace(sampling, temperature=0.0)
    baseline_requests = [
        # Any seed will do: greedy decoding draws no random numbers.
        SamplingRequest(
            request_id=len(requests) + i, prompt_tokens=prompt.tokens, sampling=greedy, seed=0
        )
        for i, prompt in enumerate(prompts)
    ]
    return [*sampled_prompts, *prompts], [*requests, *baseline_requests]


def measure_round(
    rollouts: Sequence[Rollout], *, conversations: Sequence[Conversation]
) -> dict[str, float]:
    """Return the reward and length metrics of a round.

    Args:
        rollouts: Rollouts that have a reward.
        conversations: All sampled rollouts whose environment did not fail, including those without
            a reward.
    """
    completions = [completion for each in conversations for completion in each.completions]
    lengths = [
        sum(len(completion.tokens) for completion in each.completions) for each in conversations
    ]
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    # The mean of equal rewards may round, and then the deviation is tiny but positive.
    is_equal = bool(rewards.min() == rewards.max())
    num_truncated = sum(c.finish_reason == FinishReason.MAX_TOKENS for c in completions)
    return {
        "reward/mean": float(rewards.mean()),
        # Population deviation: the sample deviation of a single rollout would be NaN.
        "reward/std": 0.0 if is_equal else float(rewards.std(correction=0)),
        "reward/failed": float(len(conversations) - len(rollouts)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated_fraction": num_truncated / len(completions),
    }


def _check_environment_rewards(
    conversations: Sequence[Conversation], *, algorithm: AlgorithmConfig
) -> None:
    """Refuse an environment's rewards if the advantage estimator would ignore them."""
    reward = next((each.reward for each in conversations if each.reward), None)
    if algorithm.reads("components") and reward is not None:
        raise ConfigError(
            "algorithm.advantage gdpo uses only reward.components, but the environment gave a "
            f"reward ({reward:g}), which would be ignored: compute it in a reward function among "
            "the components, or choose another algorithm.advantage."
        )


def _shape(
    rollouts: list[Rollout], *, shaping: ShapingConfig, max_tokens: int, reward_stats: RunningStats
) -> tuple[list[Rollout], RunningStats, dict[str, float]]:
    """Replace scores and baselines of the rollouts by shaped rewards."""
    shaped = shape_rewards(
        [rollout.reward for rollout in rollouts],
        lengths=[rollout.num_tokens for rollout in rollouts],
        max_tokens=max_tokens,
        config=shaping,
        running_stats=reward_stats,
        # Baselines are subtracted from shaped rewards, so they must be shaped in the same way.
        baselines=[
            (rollout.baseline, rollout.baseline_tokens)
            for rollout in rollouts
            if rollout.baseline is not None
        ],
    )
    baselines = iter(shaped.baselines)
    shaped_rollouts = [
        replace(
            rollout,
            reward=reward,
            baseline=None if rollout.baseline is None else next(baselines),
            turn_rewards=tuple(shaping.scale * each for each in rollout.turn_rewards),
        )
        for rollout, reward in zip(rollouts, shaped.rewards, strict=True)
    ]
    return shaped_rollouts, shaped.running_stats, shaped.metrics


def _find_useful_groups(rollouts: Sequence[Rollout]) -> list[int]:
    """Return the ids of the groups whose rewards differ, in their order."""
    group_ids = torch.tensor([rollout.group_id for rollout in rollouts])
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    has_zero_std = compute_group_statistics(rewards, group_ids=group_ids).is_zero_std.tolist()
    return list(
        dict.fromkeys(
            rollout.group_id
            for rollout, is_zero in zip(rollouts, has_zero_std, strict=True)
            if not is_zero
        )
    )


def _check_num_groups(
    dynamic: DynamicSamplingConfig, *, num_prompts: int, num_kept: int, num_sampled: int, step: int
) -> None:
    if num_kept == num_prompts or (num_kept and dynamic.shortage == "train"):
        return
    raise BatchError(
        f"dynamic sampling found {num_kept} of {num_prompts} groups with different scores in step "
        f"{step}, among {num_sampled} prompts of {dynamic.max_rounds} rounds: the problems are too "
        "easy or too hard. Raise algorithm.dynamic_sampling.max_rounds or algorithm.group_size, or "
        "set algorithm.dynamic_sampling.shortage=train."
    )


def _renumber_groups(rollouts: list[Rollout]) -> list[Rollout]:
    """Return the rollouts with group ids 0, 1, 2, ...; sample ids are already unique."""
    unique = dict.fromkeys(rollout.group_id for rollout in rollouts)
    new_ids = {group_id: i for i, group_id in enumerate(unique)}
    return [replace(rollout, group_id=new_ids[rollout.group_id]) for rollout in rollouts]


def _merge_rounds(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of rounds: sum counts, take maxima, and average the others.

    The average is not weighted, because all rounds request equally many completions.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in rounds for name in metrics):
        values = [metrics.get(name, 0.0) for metrics in rounds]
        # All other metrics of rewards and judges are counts, such as time-outs.
        is_count = name.startswith(("reward/", "judge/")) and not name.endswith(
            ("/mean", "/std", "_mean_s")
        )
        if name.endswith(("_max", "_max_s", "/total_cost_usd")):
            merged[name] = max(values)
        else:
            is_sum = (
                is_count or name in ("rollout/tokens", "rollout/failed") or name.startswith("tool/")
            )
            merged[name] = sum(values) if is_sum else sum(values) / len(values)
    return merged
