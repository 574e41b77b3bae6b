"""Turn rollouts, demonstrations and preferences into one batch of token sequences.

The loss masks for all tasks are made here and nowhere else.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import BatchError
from temper_engine_api.objective import ROUTED_EXPERTS
from temper_trainer.types import (
    IS_CHOSEN,
    LOSS_WEIGHTS,
    MARGIN,
    TURN_REWARDS,
    TURNS_AFTER,
    Completion,
    Demonstration,
    LabeledCompletion,
    Pair,
    Rollout,
    pack_logprobs,
    pack_tokens,
)


def to_samples(
    rollouts: Sequence[Rollout], *, temperature: float, overlong_filter: bool = False
) -> SequenceBatch:
    """Make one sample per rollout: prompt, completions and observations concatenated.

    The tokens of completions are trained. Those of the prompt, and what an environment returned
    between two completions, are not. Branches of rollouts are further samples, see
    `split_branches`.

    Args:
        rollouts: At least one rollout, each with a unique sample_id.
        temperature: The sampler's temperature, above 0. The engine divides logits by it, so that
            log-probs of sampler and engine describe the same distribution.
        overlong_filter: True to train no token of rollouts that reached the token limit. They keep
            counting in the statistics of their group.

    Returns:
        [B] samples in the order of the rollouts, then of their branches, with column
        ``rollout_logprobs`` [T] float32 (0 at untrained tokens), with ``turns_after`` [T] float32
        if a rollout has several turns, with ``turn_rewards`` [T] float32 if an environment gave a
        reward, and with ``routed_experts`` [T, layers, K] int16 if the sampler recorded them.

    Raises:
        BatchError: If there is no rollout, a sample_id is repeated, the temperature is not above 0,
            or a completion does not have one log-prob per token.

    Example:
        >>> from temper_trainer.types import FinishReason, Prompt
        >>> completion = Completion(
        ...     request_id=0,
        ...     tokens=(8, 9),
        ...     rollout_logprobs=(-0.5, -0.25),
        ...     finish_reason=FinishReason.END_TOKEN,
        ...     weight_version=1,
        ... )
        >>> rollout = Rollout(
        ...     prompt=Prompt(prompt_id=0, text="1+1=", tokens=(5, 6, 7), answer="2"),
        ...     completion=completion,
        ...     text="2",
        ...     reward=1.0,
        ...     group_id=0,
        ...     sample_id=0,
        ... )
        >>> samples = to_samples([rollout], temperature=1.0)
        >>> samples.tokens.tolist()
        [5, 6, 7, 8, 9]
        >>> samples.loss_mask.tolist()
        [False, False, False, True, True]
        >>> samples.columns["rollout_logprobs"].tolist()
        [0.0, 0.0, 0.0, -0.5, -0.25]
    """
    _check_rollouts(rollouts, temperature=temperature)
    is_kept = [not (overlong_filter and rollout.is_truncated) for rollout in rollouts]
    rollouts, parents = split_branches(rollouts)
    by_sample = [
        _split_segments(rollout, is_kept=is_kept[parent])
        for rollout, parent in zip(rollouts, parents, strict=True)
    ]
    lengths = [sum(len(segment.tokens) for segment in sample) for sample in by_sample]
    # Each column is made for all samples at once: a tensor per sample is slow, and the tokens of a
    # step are copied only once.
    segments = [segment for sample in by_sample for segment in sample]
    columns = _make_segment_columns(segments)
    experts = _concatenate_experts(rollouts, lengths=lengths)
    if experts is not None:
        columns[ROUTED_EXPERTS] = experts
    sample_ids = torch.tensor([rollout.sample_id for rollout in rollouts])
    return SequenceBatch(
        tokens=_concatenate_tokens(segments, num_tokens=sum(lengths)),
        sequence_starts=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        loss_mask=_repeat_per_token([each.is_trained for each in segments], segments),
        sample_ids=sample_ids,
        group_ids=torch.tensor([rollout.group_id for rollout in rollouts]),
        pack_group_ids=sample_ids.clone(),
        temperature=torch.full((len(rollouts),), temperature, dtype=torch.float32),
        columns=columns,
    )


def split_branches(rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[int]]:
    """Return one rollout per sample, because each history of an agent becomes a sample.

    Returns:
        The rollouts without their branches, followed by one rollout with a new sample_id for each
        branch. Then the index of each result's original rollout.

    Example:
        >>> from temper_trainer.types import Branch, FinishReason, Prompt
        >>> completion = Completion(
        ...     request_id=0,
        ...     tokens=(8,),
        ...     rollout_logprobs=(-0.5,),
        ...     finish_reason=FinishReason.END_TOKEN,
        ...     weight_version=1,
        ... )
        >>> rollout = Rollout(
        ...     prompt=Prompt(prompt_id=0, text="1+1=", tokens=(5, 6, 7), answer="2"),
        ...     completion=completion,
        ...     text="2",
        ...     reward=1.0,
        ...     group_id=0,
        ...     sample_id=0,
        ...     branches=(Branch(prompt_tokens=(5, 9), completion=completion),),
        ... )
        >>> samples, parents = split_branches([rollout])
        >>> [each.prompt.tokens for each in samples], parents
        ([(5, 6, 7), (5, 9)], [0, 0])
    """
    parents = list(range(len(rollouts)))
    if not any(rollout.branches for rollout in rollouts):
        return list(rollouts), parents
    samples = [replace(rollout, branches=()) for rollout in rollouts]
    new_ids = itertools.count(max(rollout.sample_id for rollout in rollouts) + 1)
    for i, rollout in enumerate(rollouts):
        for branch in rollout.branches:
            samples.append(
                replace(
                    rollout,
                    prompt=replace(rollout.prompt, tokens=branch.prompt_tokens),
                    completion=branch.completion,
                    turns=branch.turns,
                    turn_rewards=(),
                    branches=(),
                    sample_id=next(new_ids),
                )
            )
            parents.append(i)
    return samples, parents


def _make_segment_columns(segments: "Sequence[_Segment]") -> dict[str, Tensor]:
    """Return the columns of `to_samples` that follow from the segments, all samples in one."""
    num_tokens = sum(len(segment.tokens) for segment in segments)
    columns = {"rollout_logprobs": _concatenate_logprobs(segments, num_tokens=num_tokens)}
    # Without a second turn the column would be all zeros, and nothing would read it.
    if any(segment.turns_after for segment in segments):
        turns_after = [float(segment.turns_after) for segment in segments]
        columns[TURNS_AFTER] = _repeat_per_token(turns_after, segments).float()
    if any(segment.reward for segment in segments):
        columns[TURN_REWARDS] = torch.zeros(num_tokens)
        # The reward is at its completion's last token. A segment without tokens has none.
        lengths = torch.tensor([len(segment.tokens) for segment in segments])
        has_tokens = lengths > 0
        last = (lengths.cumsum(0) - 1)[has_tokens]
        rewards = torch.tensor([segment.reward for segment in segments])
        columns[TURN_REWARDS][last] = rewards[has_tokens]
    return columns


def _repeat_per_token(values: Sequence[float], segments: "Sequence[_Segment]") -> Tensor:
    """Repeat a segment's value for each of its tokens; returns [T]."""
    # torch's repeat_interleave would make an index of 8 bytes per token.
    return torch.from_numpy(np.repeat(values, [len(segment.tokens) for segment in segments]))


def _concatenate_tokens(segments: "Sequence[_Segment]", *, num_tokens: int) -> Tensor:
    """Return the [T] int64 tokens from all segments."""
    tokens = np.empty(num_tokens, dtype=np.int64)
    np.concatenate([np.asarray(pack_tokens(each.tokens)) for each in segments], out=tokens)
    return torch.from_numpy(tokens)


def _concatenate_logprobs(segments: "Sequence[_Segment]", *, num_tokens: int) -> Tensor:
    """Return the [T] float32 log-probs of all segments, 0 at untrained tokens."""
    logprobs = np.zeros(num_tokens, dtype=np.float32)
    start = 0
    for segment in segments:
        count = len(segment.logprobs)
        logprobs[start : start + count] = np.asarray(pack_logprobs(segment.logprobs))
        start += len(segment.tokens)
    return torch.from_numpy(logprobs)


def _concatenate_experts(rollouts: Sequence[Rollout], *, lengths: Sequence[int]) -> Tensor | None:
    """Return the [T, layers, K] experts of all tokens, -1 where the sampler recorded none.

    Each completion records its full context. For each token, use the record of the first completion
    that includes it, because the token's log-prob was computed with these experts.
    """
    recorded = [c.routed_experts for rollout in rollouts for c in rollout.completions]
    example = next((experts for experts in recorded if experts is not None), None)
    if example is None:
        return None
    columns = []
    for rollout, length in zip(rollouts, lengths, strict=True):
        column = example.new_full((length, *example.shape[1:]), -1)
        first = 0
        for completion in rollout.completions:
            if completion.routed_experts is not None:
                end = len(completion.routed_experts)
                column[first:end] = completion.routed_experts[first:]
                first = end
        columns.append(column)
    return torch.cat(columns)


def _check_rollouts(rollouts: Sequence[Rollout], *, temperature: float) -> None:
    if not rollouts:
        raise BatchError(
            "there is no rollout to train on: all rewards of this step failed, or there was no "
            "prompt. Check the reward function and the training data."
        )
    if temperature <= 0:
        raise BatchError(
            f"sampling.temperature is {temperature}, but training divides logits by it: set it "
            "above 0."
        )
    ids = [rollout.sample_id for rollout in rollouts]
    if len(set(ids)) < len(ids):
        raise BatchError(
            f"sample_ids must be unique in a step, but {len(ids)} rollouts have only "
            f"{len(set(ids))} different ones."
        )
    for rollout in rollouts:
        for completion in rollout.completions:
            num_tokens, num_logprobs = len(completion.tokens), len(completion.rollout_logprobs)
            if num_tokens != num_logprobs:
                raise BatchError(
                    f"sample {rollout.sample_id} has {num_tokens} completion tokens but "
                    f"{num_logprobs} rollout_logprobs: the sampler must return one per token."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Consecutive tokens of a sample that are either all trained or all untrained."""

    tokens: Sequence[int]
    is_trained: bool
    turns_after: int
    """Number of turns that follow the segment's turn."""
    logprobs: Sequence[float] = ()
    """One per token, or empty if they are 0."""
    reward: float = 0.0
    """The environment's reward for the completion."""


def _split_segments(rollout: Rollout, *, is_kept: bool) -> list[_Segment]:
    """Return the prompt, the completions and what the environment returned between them.

    Args:
        rollout: A rollout without branches.
        is_kept: False to train none of its tokens.
    """
    num_turns = len(rollout.turns)
    rewards = rollout.turn_rewards or (0.0,) * (num_turns + 1)

    def make_trained(completion: Completion, *, index: int) -> _Segment:
        return _Segment(
            tokens=completion.tokens,
            is_trained=is_kept,
            turns_after=num_turns - index,
            logprobs=completion.rollout_logprobs,
            reward=rewards[index],
        )

    segments = [
        _Segment(tokens=rollout.prompt.tokens, is_trained=False, turns_after=num_turns),
        make_trained(rollout.completion, index=0),
    ]
    for i, turn in enumerate(rollout.turns, start=1):
        segments += [
            _Segment(tokens=turn.observation, is_trained=False, turns_after=num_turns - i),
            make_trained(turn.completion, index=i),
        ]
    return segments


def demonstrations_to_samples(demonstrations: Sequence[Demonstration]) -> SequenceBatch:
    """Make one sample per demonstration, with its index as sample_id.

    The loss mask is True for all completion tokens, including the first, but not for those that a
    demonstration leaves untrained or gives the weight 0. The mask refers to the token that is
    predicted, not to the position that predicts it.

    Returns:
        [B] samples with column ``loss_weights`` [T] float32, 0 at untrained tokens.

    Raises:
        BatchError: If there is no demonstration, or one without completion tokens.
    """
    if not demonstrations:
        raise BatchError("there is no demonstration to train on: check the training data.")
    for i, demonstration in enumerate(demonstrations):
        if not demonstration.tokens:
            raise BatchError(
                f"demonstration {i} (prompt {demonstration.prompt.prompt_id}) has no completion "
                "tokens to train on: remove it or add a completion."
            )
    samples = from_sequences(
        [torch.tensor(each.prompt.tokens + each.tokens) for each in demonstrations],
        loss_masks=[_make_loss_mask(demonstration) for demonstration in demonstrations],
    )
    weights = torch.cat([_make_loss_weights(demonstration) for demonstration in demonstrations])
    # A token with weight 0 is not trained, so the denominators and the metrics must not count it.
    mask = samples.loss_mask & (weights > 0)
    return replace(samples, loss_mask=mask, columns={LOSS_WEIGHTS: torch.where(mask, weights, 0.0)})


def pairs_to_samples(pairs: Sequence[Pair]) -> SequenceBatch:
    """Make two consecutive samples per pair: the chosen and the rejected demonstration.

    Both have the same group and pack group, so that they stay in one micro-batch: a preference loss
    compares them there.

    Returns:
        [2 * len(pairs)] samples with sequence columns ``is_chosen`` [B] bool and ``margin`` [B]
        float32.

    Raises:
        BatchError: See `demonstrations_to_samples`.
    """
    samples = demonstrations_to_samples(
        [each for pair in pairs for each in (pair.chosen, pair.rejected)]
    )
    index = torch.arange(samples.num_sequences)
    return replace(
        samples,
        group_ids=index // 2,
        # The pack group keeps the two sequences on one rank: the loss subtracts one from the other.
        pack_group_ids=index // 2,
        sequence_columns={
            IS_CHOSEN: index % 2 == 0,
            MARGIN: torch.tensor([pair.margin for pair in pairs]).repeat_interleave(2),
        },
    )


def labeled_to_samples(completions: Sequence[LabeledCompletion]) -> SequenceBatch:
    """Make one sample per labeled completion.

    Returns:
        [len(completions)] samples with sequence column ``is_chosen`` [B] bool, True for desirable
        ones.

    Raises:
        BatchError: See `demonstrations_to_samples`.
    """
    samples = demonstrations_to_samples([each.completion for each in completions])
    labels = torch.tensor([each.is_desirable for each in completions])
    return samples.with_columns({}, {IS_CHOSEN: labels})


def mismatch_completions(demonstrations: Sequence[Demonstration]) -> list[Demonstration]:
    """Return each prompt with the completion of the next demonstration, cyclically.

    KTO estimates KL(policy, reference) on them. A completion is cut where it would make the longest
    sequence of the update longer, so that the result fits wherever the demonstrations fit.

    Example:
        >>> from temper_trainer.types import Prompt
        >>> one, two = (
        ...     Demonstration(
        ...         prompt=Prompt(prompt_id=i, text="", tokens=prompt, answer=""), tokens=tokens
        ...     )
        ...     for i, (prompt, tokens) in enumerate([((1,), (2, 0)), ((3, 4), (5, 6, 0))])
        ... )
        >>> [(each.prompt.tokens, each.tokens) for each in mismatch_completions([one, two])]
        [((1,), (5, 6, 0)), ((3, 4), (2, 0))]
    """
    longest = max(len(each.prompt.tokens) + len(each.tokens) for each in demonstrations)
    following = [*demonstrations[1:], demonstrations[0]]
    return [
        replace(each, tokens=other.tokens[: longest - len(each.prompt.tokens)], loss_mask=None)
        for each, other in zip(demonstrations, following, strict=True)
    ]


def _make_loss_mask(demonstration: Demonstration) -> Tensor:
    """Return the [L] bool loss mask of prompt and completion."""
    completion = demonstration.loss_mask or (True,) * len(demonstration.tokens)
    return torch.tensor((False,) * len(demonstration.prompt.tokens) + completion)


def _make_loss_weights(demonstration: Demonstration) -> Tensor:
    """Return the [L] float32 loss weights of prompt and completion."""
    weights = demonstration.loss_weights or (1.0,) * len(demonstration.tokens)
    return torch.tensor((0.0,) * len(demonstration.prompt.tokens) + weights)
