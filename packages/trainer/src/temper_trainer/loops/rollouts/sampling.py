"""Sample and score the rollouts of a step, in one round or in several with dynamic sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from temper_engine_api.errors import BatchError
from temper_trainer.algorithms.advantages.advantage_statistics import compute_group_statistics
from temper_trainer.config.algorithm import DynamicSamplingConfig
from temper_trainer.config.reward import ShapingConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.streams import measure_difficulty
from temper_trainer.loops.rollouts.sampled_groups import (
    NumberedPrompt,
    SampledGroup,
    form_rollouts,
    sample_groups,
    time_groups,
)
from temper_trainer.loops.run.run_components import RunComponents
from temper_trainer.loops.run.seeds import derive_seed
from temper_trainer.metrics.timeline import TimedRollout
from temper_trainer.progress import StepTimer
from temper_trainer.reward.scoring import RunningStats, shape_rewards
from temper_trainer.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """The scored rollouts of a step, whose rewards are not shaped yet."""

    rollouts: list[Rollout]
    """Complete groups, except for rollouts that failed. Group ids count from 0."""
    metrics: dict[str, float]
    times: Sequence[TimedRollout] = ()
    """Times of all sampled rollouts, also of those that were discarded."""

    def shape_rewards(
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
        return replace(self, rollouts=rollouts, metrics=metrics), reward_stats


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
        return await sample_round(components, num_prompts, step=step, timer=timer)
    kept: list[Rollout] = []
    times: list[TimedRollout] = []
    rounds: list[dict[str, float]] = []
    num_kept = num_sampled = num_zero_std = 0
    while num_kept < num_prompts and len(rounds) < dynamic.max_rounds:
        num_requested = dynamic.prompts_per_round or num_prompts
        sampled = await sample_round(
            components, num_requested, step=step, timer=timer, first_group=num_sampled
        )
        rollouts = sampled.rollouts
        num_sampled += num_requested
        rounds.append(sampled.metrics)
        times += sampled.times
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
        times=times,
    )


async def sample_round(
    components: RunComponents,
    num_prompts: int,
    *,
    step: int,
    timer: StepTimer,
    first_group: int = 0,
) -> SampledStep:
    """Sample and score the groups of the next prompts.

    Args:
        components: Components of the run.
        num_prompts: Number of prompts.
        step: Number of the step, from 1.
        timer: Measures the time of the rewards.
        first_group: Number of groups in earlier rounds of the step; ids and seeds continue from it.
    """
    prompts = [
        NumberedPrompt(prompt=prompt, step=step, index=first_group + i)
        for i, (_, prompt) in enumerate(components.prompts.take(num_prompts))
    ]
    groups = await sample_groups(
        components,
        prompts,
        priority=step,
        off_policy_seed=derive_seed(components.config.run.seed, "off-policy", step, first_group),
    )
    timer.add("reward", measure_reward_seconds(groups))
    rollouts, metrics = form_rollouts(
        groups,
        config=components.config,
        scorer=components.scorer,
        step=step,
        first_group=first_group,
    )
    times = time_groups(groups, first_group=first_group)
    return SampledStep(rollouts=rollouts, metrics=metrics, times=times)


def measure_reward_seconds(groups: Sequence[SampledGroup]) -> float:
    """Return the time from the end of the last rollout to the last score."""
    members = [each for group in groups for each in group.members]
    return max(each.scored_at for each in members) - max(each.ended_at for each in members)


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
    """Merge the metrics of rounds: sum counts, take maxima, and average means and fractions.

    The average is not weighted, because all rounds request equally many completions. It leaves out
    rounds that lack the metric: a round without prompts of an environment has none of its metrics.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in rounds for name in metrics):
        values = [metrics[name] for metrics in rounds if name in metrics]
        if _is_builtin(name) and name.endswith(("_max", "_max_s", "/total_cost_usd")):
            merged[name] = max(values)
        elif _is_builtin(name) and name.endswith(("mean", "/std", "_fraction", "_mean_s")):
            merged[name] = sum(values) / len(values)
        else:
            merged[name] = sum(values)
    return merged


def _is_builtin(name: str) -> bool:
    """Return False if an environment of the user gave the metric, which is always a count."""
    return name.startswith(("reward/", "judge/", "rollout/", "environment/"))
