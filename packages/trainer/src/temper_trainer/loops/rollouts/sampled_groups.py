"""Sample and score groups: all completions of a prompt, and a greedy one if ReMax compares them."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from temper_engine_api.errors import BatchError, ConfigError
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.loops.rollouts.group_pipeline import GroupSink
from temper_trainer.loops.rollouts.multi_turn import Conversation
from temper_trainer.loops.rollouts.scored_rollouts import (
    ScoredRollout,
    measure_scoring,
    run_scored_rollouts,
)
from temper_trainer.loops.run.run_components import RunComponents
from temper_trainer.loops.run.seeds import derive_seed
from temper_trainer.metrics.timeline import Span, TimedRollout
from temper_trainer.reward.scoring import Scorer
from temper_trainer.types import Completion, FinishReason, Prompt, Rollout, SamplingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedPrompt:
    """A prompt, and the numbers from which the seeds of its completions are derived."""

    prompt: Prompt
    step: int
    """Number of a step, from 1."""
    index: int
    """Number of the group among those of the step, from 0."""
    position: int = 0
    """Number of the prompt in the run; used by loop ``async`` only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    """The scored rollouts of a prompt."""

    position: int
    """See `NumberedPrompt`."""
    requested_at: float
    """`time.perf_counter` when its rollouts were requested."""
    rollouts: Sequence[ScoredRollout]
    """``group_size`` rollouts; some may have failed."""
    baseline: ScoredRollout | None
    """Greedy rollout, whose reward is the baseline of the others; only with ReMax."""

    @property
    def is_given(self) -> bool:
        """True if the completion is the given one of the prompt."""
        return self.rollouts[0].conversation.is_given

    @property
    def members(self) -> list[ScoredRollout]:
        """All rollouts, with the baseline."""
        return [*self.rollouts, *([] if self.baseline is None else [self.baseline])]


async def sample_groups(
    components: RunComponents,
    prompts: Sequence[NumberedPrompt],
    *,
    priority: int,
    off_policy_seed: int,
    sink: GroupSink[SampledGroup] | None = None,
) -> list[SampledGroup]:
    """Sample and score ``group_size`` completions of each prompt.

    Args:
        components: Components of the run.
        prompts: Prompts of the groups.
        priority: Groups with a smaller number continue first.
        off_policy_seed: Determines the prompts whose given completion is trained.
        sink: Receives each group, by the position of its prompt, when it is ready.
    """
    config, num_groups = components.config, len(prompts)
    group_size = config.algorithm.group_size
    request_prompts, requests = _make_requests(
        prompts, algorithm=config.algorithm, sampling=config.sampling, seed=config.run.seed
    )
    given = choose_off_policy_prompts(
        num_groups, fraction=config.distillation.off_policy_fraction, seed=off_policy_seed
    )
    requested_at = time.perf_counter()
    num_sampled = num_groups * group_size
    group_numbers = [_find_group(i, num_sampled, group_size) for i in range(len(requests))]
    num_missing = Counter(group_numbers)
    scored: dict[int, ScoredRollout] = {}

    def make_group(group: int) -> SampledGroup:
        first = group * group_size
        return SampledGroup(
            position=prompts[group].position,
            requested_at=requested_at,
            rollouts=[scored[i] for i in range(first, first + group_size)],
            baseline=scored.get(num_sampled + group),
        )

    def on_start(index: int) -> None:
        if sink is not None:
            sink.start(prompts[group_numbers[index]].position)

    def on_scored(index: int, rollout: ScoredRollout) -> None:
        scored[index] = rollout
        group = group_numbers[index]
        num_missing[group] -= 1
        if sink is not None and num_missing[group] == 0:
            sink.add(prompts[group].position, make_group(group))

    version = components.publisher.version
    await run_scored_rollouts(
        components,
        requests,
        prompts=request_prompts,
        given={
            i: _make_given_conversation(
                requests[i], prompt=request_prompts[i], weight_version=version
            )
            for i in given
        },
        priority=priority,
        on_start=on_start,
        on_scored=on_scored,
        # A group whose rollouts are scored must not wait for others. With the other loops it would
        # be trained together with them anyway, and one pass is faster.
        cohorts=group_numbers if config.loop == "async" else None,
    )
    return [make_group(group) for group in range(num_groups)]


def _find_group(index: int, num_sampled: int, group_size: int) -> int:
    """Return the group of a request: the greedy ones of ReMax follow all others."""
    return index // group_size if index < num_sampled else index - num_sampled


def form_rollouts(
    groups: Sequence[SampledGroup],
    *,
    config: TrainerConfig,
    scorer: Scorer,
    step: int,
    first_group: int = 0,
) -> tuple[list[Rollout], dict[str, float]]:
    """Return the rollouts of groups with their scores as rewards, and their metrics.

    Completions without a reward are counted and left out.

    Args:
        groups: Sampled groups.
        config: The configuration.
        scorer: Has scored the rollouts; names the metrics of its rewards.
        step: Number of the step, for messages.
        first_group: Number of groups in earlier rounds of the step; ids continue from it.

    Raises:
        BatchError: If no completion has a reward.
    """
    conversations = [each.conversation for group in groups for each in group.rollouts]
    _check_environment_rewards(
        [each.conversation for group in groups for each in group.members],
        algorithm=config.algorithm,
    )
    _check_branches(conversations, algorithm=config.algorithm)
    rollouts = [
        rollout
        for i, group in enumerate(groups)
        for rollout in _make_rollouts(group, group_id=first_group + i)
    ]
    if not any(not rollout.completion.is_given for rollout in rollouts):
        raise BatchError(
            f"none of {len(conversations)} completions of step {step} has a reward: check the "
            "reward function."
        )
    # Metrics describe the policy, about which given completions say nothing.
    metrics = measure_round(
        [rollout for rollout in rollouts if not rollout.completion.is_given],
        conversations=[each for each in conversations if not each.is_given and not each.failure],
    )
    if num_given := sum(group.is_given for group in groups):
        metrics["rollout/off_policy_fraction"] = num_given / len(groups)
    in_order = [each for group in groups for each in group.rollouts]
    in_order += [group.baseline for group in groups if group.baseline is not None]
    return rollouts, metrics | measure_scoring(in_order, scorer=scorer, config=config)


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
    """Return a conversation with the completion that the data gives for the prompt.

    The completion is cut after `max_tokens` tokens, as a sampled one would be.
    """
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
    return Conversation(request=request, first=completion)


def _make_rollouts(group: SampledGroup, *, group_id: int) -> list[Rollout]:
    """Return the rollouts of a group that have a reward and, with ReMax, a baseline."""
    baseline = group.baseline
    # The baseline includes the environment's rewards too: without them it would shift all
    # advantages of its prompt. If it failed, none of the completions can be trained.
    if baseline is not None and baseline.reward is None:
        return []
    return [
        Rollout(
            prompt=each.prompt,
            completion=each.conversation.completions[0],
            turns=tuple(each.conversation.turns),
            branches=each.conversation.branches,
            text=each.text,
            reward=each.reward,
            group_id=group_id,
            sample_id=group_id * len(group.rollouts) + i,
            components=each.score.components,
            baseline=None if baseline is None else baseline.reward,
            baseline_tokens=0 if baseline is None else baseline.conversation.num_tokens,
            turn_rewards=tuple(each.conversation.rewards),
        )
        for i, each in enumerate(group.rollouts)
        if each.reward is not None
    ]


def _make_requests(
    prompts: Sequence[NumberedPrompt],
    *,
    algorithm: AlgorithmConfig,
    sampling: SamplingConfig,
    seed: int,
) -> tuple[list[Prompt], list[SamplingRequest]]:
    """Return the requests of a round, and the prompt of each.

    They are ``group_size`` requests per prompt, group after group. With ReMax a greedy one per
    prompt follows: its reward is the baseline of the prompt.
    """
    size = algorithm.group_size
    members = [(each, i) for each in prompts for i in range(size)]
    requests = [
        SamplingRequest(
            request_id=request_id,
            prompt_tokens=each.prompt.tokens,
            sampling=sampling,
            seed=derive_seed(seed, "sampling", each.step, each.index * size + i),
        )
        for request_id, (each, i) in enumerate(members)
    ]
    sampled_prompts = [each.prompt for each, _ in members]
    if not algorithm.reads("baselines"):
        return sampled_prompts, requests
    greedy = replace(sampling, temperature=0.0)
    baseline_requests = [
        # Any seed will do: greedy decoding draws no random numbers.
        SamplingRequest(
            request_id=len(requests) + i,
            prompt_tokens=each.prompt.tokens,
            sampling=greedy,
            seed=0,
        )
        for i, each in enumerate(prompts)
    ]
    return [*sampled_prompts, *(each.prompt for each in prompts)], [*requests, *baseline_requests]


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


def time_groups(groups: Sequence[SampledGroup], *, first_group: int = 0) -> list[TimedRollout]:
    """Return the times of all sampled rollouts of some groups.

    Args:
        groups: Sampled groups.
        first_group: Number of groups in earlier rounds of the step; numbers continue from it.
    """
    return [
        _time_rollout(each, group=first_group + i, member=-1 if each is group.baseline else j)
        for i, group in enumerate(groups)
        if not group.is_given
        for j, each in enumerate(group.members)
    ]


def _time_rollout(scored: ScoredRollout, *, group: int, member: int) -> TimedRollout:
    conversation = scored.conversation
    completions = conversation.completions
    return TimedRollout(
        group=group,
        member=member,
        num_turns=len(completions),
        num_tokens=sum(len(each.tokens) for each in completions),
        reward=scored.reward,
        weight_version=min((each.weight_version for each in completions), default=0),
        spans=[*conversation.trace.spans, Span("scoring", scored.ended_at, scored.scored_at)],
        requested_at=conversation.trace.requested_at,
        scored_at=scored.scored_at,
    )


def _check_environment_rewards(
    conversations: Sequence[Conversation], *, algorithm: AlgorithmConfig
) -> None:
    """Refuse an environment's rewards if the advantage estimator would ignore them."""
    reward = next((each.reward for each in conversations if each.reward), None)
    if algorithm.reads("components") and reward is not None:
        raise ConfigError(
            "algorithm.advantage gdpo uses only reward.components, but the environment gave a "
            f"reward ({reward:g}), which would be ignored: compute it in a function of "
            "reward.components, or choose another algorithm.advantage."
        )


def _check_branches(conversations: Sequence[Conversation], *, algorithm: AlgorithmConfig) -> None:
    """Refuse rollouts of several samples if their tokens have different advantages."""
    if algorithm.has_equal_token_advantages or not any(each.branches for each in conversations):
        return
    raise ConfigError(
        "the agent changed what the policy had read before, so its rollout is several samples, "
        "which need one advantage per rollout: set algorithm.advantage to an estimator such as "
        "grpo, algorithm.kl_reward_coef=0 and algorithm.reweight=null, or let the agent only "
        "append to its conversation."
    )
