"""Collect the times of the rollouts of a step for its timeline."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from temper_trainer.loops.rollouts.sampled_groups import SampledGroup
from temper_trainer.loops.rollouts.scored_rollouts import ScoredRollout
from temper_trainer.metrics.timeline import Span, TimedRollout
from temper_trainer.types import Rollout


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


def count_tokens_by_staleness(rollouts: Sequence[Rollout], *, version: int) -> dict[int, int]:
    """Count the tokens of completions by the age of the weights that sampled them, in updates.

    Args:
        rollouts: Rollouts of a step.
        version: Version of the weights when the training of the step starts.
    """
    counts: Counter[int] = Counter()
    for completion in (each for rollout in rollouts for each in rollout.completions):
        # Empty unless the completion continued under newer weights.
        if completion.token_versions:
            ages, numbers = np.unique(
                version - np.asarray(completion.token_versions), return_counts=True
            )
            counts.update(dict(zip(ages.tolist(), numbers.tolist(), strict=True)))
        else:
            counts[version - completion.weight_version] += len(completion.tokens)
    return dict(counts)
