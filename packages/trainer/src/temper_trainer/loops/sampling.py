"""From prompts to scored rollouts: one round, or as many rounds as dynamic sampling needs for a full step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from temper_engine_api.errors import BatchError, ConfigError
from temper_trainer.algorithms.group_advantages import compute_group_statistics
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.loops.clock import StepClock
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.loops.staleness import check_staleness
from temper_trainer.loops.turns import Conversation, all_tokens, complete, rewards_of
from temper_trainer.progress import track_progress
from temper_trainer.reward.shaping import RunningStats, shape_rewards
from temper_trainer.types import FinishReason, Prompt, Rollout, SamplingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The rollouts of a step, scored and shaped."""

    rollouts: list[Rollout]
    """Complete groups but for failed rewards; group and sample ids count from 0."""
    moments: RunningStats
    """Of all rewards so far."""
    metrics: dict[str, float]
    """Numbers for the log."""


def collect(rooms: Rooms, *, step: int, clock: StepClock, moments: RunningStats) -> Collected:
    """A step's rollouts.

    With dynamic sampling, groups whose scores are all equal are passed over, whole, and further prompts drawn, until there are
    ``prompts_per_step`` groups; those beyond are passed over too. A group is kept or passed over as it was sampled, so its statistics are
    exact; the step's denominators count what is kept.

    Raises:
        BatchError: not one completion has a reward, or dynamic sampling found too few groups.
    """
    config = rooms.config
    dynamic, wanted = config.algorithm.dynamic_sampling, config.batching.prompts_per_step
    if dynamic is None:
        rollouts, metrics = sample_rollouts(
            rooms, rooms.prompts.take(wanted), step=step, clock=clock
        )
        rollouts, moments, shaped = _shape(config, rollouts, moments=moments)
        return Collected(rollouts=rollouts, moments=moments, metrics=metrics | shaped)
    kept: list[Rollout] = []
    rounds: list[dict[str, float]] = []
    num_groups = num_asked = num_flat = 0
    while num_groups < wanted and len(rounds) < dynamic.max_rounds:
        prompts = rooms.prompts.take(dynamic.prompts_per_round or wanted)
        rollouts, metrics = sample_rollouts(
            rooms, prompts, step=step, clock=clock, first_group=num_asked
        )
        num_asked += len(prompts)
        rounds.append(metrics)
        teaching = _groups_that_teach(config, rollouts, moments=moments)
        num_flat += len({rollout.group_id for rollout in rollouts}) - len(teaching)
        chosen = teaching[: wanted - num_groups]
        kept += [rollout for rollout in rollouts if rollout.group_id in set(chosen)]
        num_groups += len(chosen)
    _check_enough(rooms, num_groups=num_groups, num_asked=num_asked, step=step)
    rollouts, moments, shaped = _shape(config, _renumbered(kept), moments=moments)
    found = _over_rounds(rounds) | shaped
    found |= {
        "dynamic_sampling/rounds": float(len(rounds)),
        "dynamic_sampling/flat_groups": float(num_flat),
        "dynamic_sampling/surplus_groups": float(num_asked - num_flat - num_groups),
        "dynamic_sampling/kept_groups": float(num_groups),
    }
    return Collected(rollouts=rollouts, moments=moments, metrics=found)


def sample_rollouts(
    rooms: Rooms, prompts: Sequence[Prompt], *, step: int, clock: StepClock, first_group: int = 0
) -> tuple[list[Rollout], dict[str, float]]:
    """``group_size`` completions of each prompt, scored; those without a reward are counted and left out.

    Args:
        rooms: open ones.
        prompts: of this round.
        step: its number, from 1.
        clock: gets the reward's time.
        first_group: groups of the step before this round; ids and seeds go on from there.
    """
    config, group_size = rooms.config, rooms.config.algorithm.group_size
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    first = first_group * group_size
    requests = [
        SamplingRequest(
            request_id=i,
            prompt_tokens=prompt.tokens,
            sampling=config.sampling,
            seed=derive_seed(config.run.seed, "sampling", step, first + i),
        )
        for i, prompt in enumerate(asked)
    ]
    if config.algorithm.advantage == "remax":
        greedy = replace(config.sampling, temperature=0.0)
        requests += [
            SamplingRequest(
                request_id=len(asked) + i, prompt_tokens=prompt.tokens, sampling=greedy, seed=0
            )
            for i, prompt in enumerate(prompts)
        ]
        asked += prompts
    with track_progress("completions", total=len(requests) if config.environment is None else None):
        talks, turn_metrics = complete(rooms, requests, prompts=asked)
    completions = [completion for talk in talks for completion in talk.completions]
    texts = [rooms.tokenizer.decode(talk.tokens, skip_special_tokens=True) for talk in talks]
    with clock.phase("reward"):
        scores = rooms.scorer.score(list(zip(asked, texts, strict=True)), tokens=all_tokens(talks))
    check_staleness(completions, config=config, version=rooms.publisher.version)
    num_sampled = len(prompts) * group_size
    _check_components(config, talks)
    rewards, compared = rewards_of(scores, talks=talks), talks[num_sampled:]
    # Of each prompt's greedy completion, where there are some; a prompt whose own failed is left out whole.
    baselines = rewards[num_sampled:]
    rollouts = [
        Rollout(
            prompt=asked[i],
            completion=talks[i].completions[0],
            turns=tuple(talks[i].turns),
            text=texts[i],
            reward=reward,
            group_id=first_group + i // group_size,
            sample_id=first + i,
            components=scores[i].components,
            baseline=baselines[i // group_size] if baselines else None,
            baseline_tokens=len(compared[i // group_size].tokens) if compared else 0,
        )
        for i, reward in enumerate(rewards[:num_sampled])
        if reward is not None and (not baselines or baselines[i // group_size] is not None)
    ]
    if not rollouts:
        raise BatchError(
            f"not one of {num_sampled} completions of step {step} has a reward: look at the reward function."
        )
    return rollouts, describe_round(
        rollouts, talks=talks[:num_sampled]
    ) | turn_metrics | rooms.scorer.metrics()


def describe_round(
    rollouts: Sequence[Rollout], *, talks: Sequence[Conversation]
) -> dict[str, float]:
    """Numbers of one round: of the rollouts that have a reward, and of all that were sampled."""
    completions = [completion for talk in talks for completion in talk.completions]
    lengths = [sum(len(completion.tokens) for completion in talk.completions) for talk in talks]
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/failed": float(len(talks) - len(rollouts)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/cut_share": sum(c.finish_reason == FinishReason.MAX_TOKENS for c in completions)
        / len(completions),
    }


def _check_components(config: TrainerConfig, talks: Sequence[Conversation]) -> None:
    """Refuse rewards of an environment where nobody reads them."""
    given = next((talk.reward for talk in talks if talk.reward), None)
    if config.algorithm.advantage == "gdpo" and given is not None:
        raise ConfigError(
            f"algorithm.advantage gdpo learns from reward.components alone, but the environment gave rewards of its own, {given:g} for "
            "example, which would be lost: let a reward function among the components give them, or take another algorithm.advantage."
        )


def _shape(
    config: TrainerConfig, rollouts: list[Rollout], *, moments: RunningStats
) -> tuple[list[Rollout], RunningStats, dict[str, float]]:
    """The rollouts with rewards in place of scores, and their baselines with them."""
    shaped = shape_rewards(
        [rollout.reward for rollout in rollouts],
        lengths=[rollout.num_tokens for rollout in rollouts],
        max_tokens=config.max_completion_tokens,
        config=config.reward.shaping,
        moments=moments,
        baselines=[
            (rollout.baseline, rollout.baseline_tokens)
            for rollout in rollouts
            if rollout.baseline is not None
        ],
    )
    baselines = iter(shaped.baselines)
    made = [
        replace(
            rollout, reward=reward, baseline=None if rollout.baseline is None else next(baselines)
        )
        for rollout, reward in zip(rollouts, shaped.rewards, strict=True)
    ]
    return made, shaped.moments, shaped.metrics


def _groups_that_teach(
    config: TrainerConfig, rollouts: list[Rollout], *, moments: RunningStats
) -> list[int]:
    """Ids of the groups whose scores, or rewards, differ, in their order."""
    dynamic = config.algorithm.dynamic_sampling
    assert dynamic is not None
    judged = rollouts if dynamic.on == "score" else _shape(config, rollouts, moments=moments)[0]
    ids = torch.tensor([rollout.group_id for rollout in judged])
    flat = compute_group_statistics(
        torch.tensor([rollout.reward for rollout in judged]), group_ids=ids
    ).is_zero_std.tolist()
    return list(
        dict.fromkeys(
            rollout.group_id
            for rollout, is_zero_std in zip(judged, flat, strict=True)
            if not is_zero_std
        )
    )


def _check_enough(rooms: Rooms, *, num_groups: int, num_asked: int, step: int) -> None:
    dynamic, wanted = (
        rooms.config.algorithm.dynamic_sampling,
        rooms.config.batching.prompts_per_step,
    )
    assert dynamic is not None
    if num_groups == wanted or (num_groups and dynamic.shortage == "train"):
        return
    raise BatchError(
        f"dynamic sampling found {num_groups} of {wanted} groups with different scores in step {step}, among {num_asked} prompts of "
        f"{dynamic.max_rounds} rounds: the problems are too easy or too hard. Raise algorithm.dynamic_sampling.max_rounds or "
        "algorithm.group_size, or set algorithm.dynamic_sampling.shortage=train."
    )


def _renumbered(rollouts: list[Rollout]) -> list[Rollout]:
    """The same with group ids from 0, without gaps; sample ids are unique as they are."""
    place = {
        group: i for i, group in enumerate(dict.fromkeys(rollout.group_id for rollout in rollouts))
    }
    return [replace(rollout, group_id=place[rollout.group_id]) for rollout in rollouts]


def _over_rounds(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Counts added up, maxima, and the plain mean of the rest: rounds ask for equally many completions."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in rounds for name in metrics):
        values = [metrics.get(name, 0.0) for metrics in rounds]
        is_count = name.startswith("reward/") and name not in ("reward/mean", "reward/std")
        if name.endswith("_max"):
            found[name] = max(values)
        else:
            is_sum = is_count or name == "rollout/tokens" or name.startswith("tool/")
            found[name] = sum(values) if is_sum else sum(values) / len(values)
    return found
