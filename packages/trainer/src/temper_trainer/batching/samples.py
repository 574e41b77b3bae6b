"""Rollouts and demonstrations as one batch of token sequences. The loss mask is made here, once, and nowhere else."""

from collections.abc import Sequence

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import BatchError
from temper_trainer.types import Demonstration, Rollout


def to_samples(rollouts: Sequence[Rollout], *, temperature: float) -> SequenceBatch:
    """One sample per rollout, prompt and completion end to end; every token of the completion is trained, none of the prompt.

    Args:
        rollouts: at least one, each with a sample_id of its own; those whose reward failed are already left out.
        temperature: the sampler's, above 0; the engine divides logits by the same.

    Returns:
        [B] samples in the rollouts' order, with the column ``rollout_logprobs`` [T] float32, 0 at the prompt.

    Raises:
        BatchError: no rollout, a repeated sample_id, a temperature of 0, or as many log-probs as there should not be.
    """
    if not rollouts:
        raise BatchError("there is no rollout to train on: every reward of this step failed, or no prompt was given.")
    if temperature <= 0:
        raise BatchError(f"temperature is {temperature}, but log-probs for training need it above 0: set sampling.temperature.")
    ids = [rollout.sample_id for rollout in rollouts]
    if len(set(ids)) < len(ids):
        raise BatchError(f"sample_ids must be unique in a step, but {len(ids)} rollouts share {len(set(ids))}.")
    for rollout in rollouts:
        num_tokens, num_logprobs = len(rollout.completion.tokens), len(rollout.completion.rollout_logprobs)
        if num_tokens != num_logprobs:
            raise BatchError(
                f"sample {rollout.sample_id} has {num_tokens} completion tokens but {num_logprobs} rollout_logprobs: the sampler must "
                "return one per token."
            )
    pairs = [(r.prompt.tokens, r.completion.tokens) for r in rollouts]
    logprobs = [torch.tensor([0.0] * len(r.prompt.tokens) + list(r.completion.rollout_logprobs)) for r in rollouts]
    return from_sequences(
        [torch.tensor(prompt + completion) for prompt, completion in pairs],
        loss_masks=[_completion_mask(prompt, completion) for prompt, completion in pairs],
        sample_ids=ids,
        group_ids=[rollout.group_id for rollout in rollouts],
        temperature=temperature,
        columns={"rollout_logprobs": logprobs},
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
            raise BatchError(f"demonstration {i} (prompt {demonstration.prompt.prompt_id}) has no completion tokens to imitate.")
    pairs = [(d.prompt.tokens, d.tokens) for d in demonstrations]
    return from_sequences(
        [torch.tensor(prompt + completion) for prompt, completion in pairs],
        loss_masks=[_completion_mask(prompt, completion) for prompt, completion in pairs],
    )


def _completion_mask(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Tensor:
    return torch.arange(len(prompt) + len(completion)) >= len(prompt)
