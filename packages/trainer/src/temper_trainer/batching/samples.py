"""Rollouts and demonstrations as one batch of token sequences. The loss mask is made here, once, and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import BatchError
from temper_trainer.types import IS_CHOSEN, Completion, Demonstration, Pair, Rollout

TURNS_AFTER = "turns_after"
"""Name of the [T] float32 column of how many completions of a rollout come after the token's own."""


def to_samples(rollouts: Sequence[Rollout], *, temperature: float) -> SequenceBatch:
    """One sample per rollout, prompt and completions end to end; every token of a completion is trained, none of the prompt and none of
    what an environment said between two completions.

    Args:
        rollouts: at least one, each with a sample_id of its own; those whose reward failed are already left out.
        temperature: the sampler's, above 0; the engine divides logits by the same.

    Returns:
        [B] samples in the rollouts' order, with the columns ``rollout_logprobs`` [T] float32, 0 where nothing is trained, and, where a
        rollout has several turns, ``turns_after`` [T] float32: completions of the rollout after the token's own.

    Raises:
        BatchError: no rollout, a repeated sample_id, a temperature of 0, or as many log-probs as there should not be.
    """
    if not rollouts:
        raise BatchError(
            "there is no rollout to train on: every reward of this step failed, or no prompt was given."
        )
    if temperature <= 0:
        raise BatchError(
            f"temperature is {temperature}, but log-probs for training need it above 0: set sampling.temperature."
        )
    ids = [rollout.sample_id for rollout in rollouts]
    if len(set(ids)) < len(ids):
        raise BatchError(
            f"sample_ids must be unique in a step, but {len(ids)} rollouts share {len(set(ids))}."
        )
    for rollout in rollouts:
        for completion in rollout.completions:
            num_tokens, num_logprobs = len(completion.tokens), len(completion.rollout_logprobs)
            if num_tokens != num_logprobs:
                raise BatchError(
                    f"sample {rollout.sample_id} has {num_tokens} completion tokens but {num_logprobs} rollout_logprobs: the sampler must "
                    "return one per token."
                )
    by_rollout = [_parts(rollout) for rollout in rollouts]
    columns = {
        "rollout_logprobs": [
            torch.tensor([x for part in parts for x in part.logprobs]) for parts in by_rollout
        ]
    }
    if any(rollout.turns for rollout in rollouts):
        columns[TURNS_AFTER] = [
            torch.tensor([float(part.turns_after) for part in parts for _ in part.tokens])
            for parts in by_rollout
        ]
    return from_sequences(
        [torch.tensor([token for part in parts for token in part.tokens]) for parts in by_rollout],
        loss_masks=[
            torch.tensor([part.is_trained for part in parts for _ in part.tokens])
            for parts in by_rollout
        ],
        sample_ids=ids,
        group_ids=[rollout.group_id for rollout in rollouts],
        temperature=temperature,
        columns=columns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A stretch of a sample that one side said."""

    tokens: tuple[int, ...]
    is_trained: bool
    logprobs: tuple[float, ...]
    turns_after: int


def _parts(rollout: Rollout) -> list[_Part]:
    last = len(rollout.turns)
    parts = [
        _said(rollout.prompt.tokens, turns_after=last),
        _written(rollout.completion, turns_after=last),
    ]
    for i, turn in enumerate(rollout.turns, start=1):
        parts += [
            _said(turn.observation, turns_after=last - i),
            _written(turn.completion, turns_after=last - i),
        ]
    return parts


def _said(tokens: tuple[int, ...], *, turns_after: int) -> _Part:
    return _Part(
        tokens=tokens, is_trained=False, logprobs=(0.0,) * len(tokens), turns_after=turns_after
    )


def _written(completion: Completion, *, turns_after: int) -> _Part:
    return _Part(
        tokens=completion.tokens,
        is_trained=True,
        logprobs=completion.rollout_logprobs,
        turns_after=turns_after,
    )


def demonstrations_to_samples(demonstrations: Sequence[Demonstration]) -> SequenceBatch:
    """One sample per demonstration, numbered by its place; every token of the completion is trained, the first included.

    The mask is aligned with what is predicted: the first completion token, predicted at the last prompt token, is True.

    Raises:
        BatchError: no demonstration, or one without completion tokens.
    """
    if not demonstrations:
        raise BatchError("there is no demonstration to train on.")
    for i, demonstration in enumerate(demonstrations):
        if not demonstration.tokens:
            raise BatchError(
                f"demonstration {i} (prompt {demonstration.prompt.prompt_id}) has no completion tokens to imitate."
            )
    pairs = [(d.prompt.tokens, d.tokens) for d in demonstrations]
    return from_sequences(
        [torch.tensor(prompt + completion) for prompt, completion in pairs],
        loss_masks=[_demonstrated(demonstration) for demonstration in demonstrations],
    )


def pairs_to_samples(pairs: Sequence[Pair]) -> SequenceBatch:
    """Two samples per pair, chosen and rejected, which share atom and group, so that they stay in one micro-batch.

    Returns:
        [2 * pairs] samples with the sequence column ``is_chosen`` [B] bool.

    Raises:
        BatchError: as demonstrations_to_samples.
    """
    flat = demonstrations_to_samples(
        [each for pair in pairs for each in (pair.chosen, pair.rejected)]
    )
    place = torch.arange(flat.num_sequences)
    return replace(
        flat,
        group_ids=place // 2,
        atom_ids=place // 2,
        sequence_columns={IS_CHOSEN: place % 2 == 0},
    )


def _demonstrated(demonstration: Demonstration) -> Tensor:
    """[L] bool: every token of the completion, or those of it that are said to be trained."""
    trained = demonstration.loss_mask or (True,) * len(demonstration.tokens)
    return torch.tensor((False,) * len(demonstration.prompt.tokens) + trained)
