"""Seeded ragged mini-batches with every column that the probe objectives read.

Prompts and responses differ in length, masks have holes, one sequence trains nothing, sequences
form pairs, and each has its own temperature.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.conformance.inputs.tiny_models import VOCABULARY
from temper_engine_api.objective import LOGPROB_AT_IDS

NUM_REQUESTED_IDS = 3
# Unequal and unsorted: ranks with equally many sequences have different numbers of tokens.
_RESPONSE_LENGTHS = (14, 1, 7, 3, 11, 2, 5, 9)
_TEMPERATURES = (1.0, 0.7, 1.3, 2.0)
UNTRAINED_SEQUENCE = 5
"""Index of the sequence without trained tokens, in batches that are large enough."""
_RATIO_CLIPS = (-math.log(0.8), -math.log(1.3))
"""Old minus new log-prob at which ClippedPpoProbe starts to clip."""
_VALUE_CLIPS = (-0.2, 0.2)
"""Old minus new value at which ClippedValueProbe starts to clip."""
_CLEARANCE = 0.15
"""Minimum distance of every token from a clip boundary.

bf16 log-probs of the tiny models are up to 0.12 off, so a closer token could cross it by rounding.
"""


def make_ragged_batch(*, num_sequences: int = 8, seed: int = 0) -> SequenceBatch:
    """Build tokens, masks, ids and temperatures; sequences 2 i and 2 i + 1 are a pair."""
    generator = torch.Generator().manual_seed(seed)
    tokens, masks = [], []
    for b in range(num_sequences):
        prompt, response = (
            2 + (3 * b + seed) % 4,
            _RESPONSE_LENGTHS[(b + seed) % len(_RESPONSE_LENGTHS)],
        )
        tokens.append(torch.randint(VOCABULARY, (prompt + response,), generator=generator))
        mask = torch.rand(prompt + response, generator=generator) > 0.15
        mask[:prompt] = False
        # At least one trained token in every sequence but UNTRAINED_SEQUENCE, whatever the draw.
        mask[prompt] = True
        masks.append(mask & (b != UNTRAINED_SEQUENCE))
    return from_sequences(
        tokens,
        loss_masks=masks,
        # The ids are not 0 to B - 1, so that an engine which uses ids as indices fails.
        sample_ids=[100 + b for b in range(num_sequences)],
        group_ids=[b // 2 for b in range(num_sequences)],
        pack_group_ids=[b // 2 for b in range(num_sequences)],
        temperature=[_TEMPERATURES[b % len(_TEMPERATURES)] for b in range(num_sequences)],
    )


def make_batch(
    lengths: Sequence[int], *, prompt_length: int, are_pairs: bool = True, seed: int = 0
) -> SequenceBatch:
    """Build sequences of given lengths; tokens after the prompt are trained.

    With `are_pairs`, sequences 2 i and 2 i + 1 form a group that stays on one rank and in one
    micro-batch. Otherwise each sequence is a group.
    """
    generator = torch.Generator().manual_seed(seed)
    group_size = 2 if are_pairs else 1
    groups = [b // group_size for b in range(len(lengths))]
    return from_sequences(
        [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths],
        loss_masks=[torch.arange(length) >= prompt_length for length in lengths],
        sample_ids=[100 + b for b in range(len(lengths))],
        group_ids=groups,
        pack_group_ids=groups,
        temperature=[_TEMPERATURES[b % len(_TEMPERATURES)] for b in range(len(lengths))],
    )


def add_training_columns(
    batch: SequenceBatch, *, logprobs: Tensor, values: Tensor | None = None, seed: int = 0
) -> SequenceBatch:
    """Add the columns that the objectives of the tests read.

    Old log-probs and values are close enough to the model's that only some tokens are clipped.

    Args:
        batch: A batch without columns.
        logprobs: [T] of the model that will be trained.
        values: [T] of the value model that will be trained; None means zeros.
        seed: Seed of the noise.
    """
    generator = torch.Generator().manual_seed(1000 + seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens, sequences = batch.num_tokens, batch.num_sequences
    base_values = torch.zeros(tokens) if values is None else values
    columns = {
        "old_logprobs": logprobs + _move_off_boundaries(0.3 * noise(tokens), _RATIO_CLIPS),
        "ref_logprobs": logprobs + 0.3 * noise(tokens),
        "advantages": noise(tokens),
        # Never 0, so that every trained token has a gradient.
        "weights": torch.rand(tokens, generator=generator) + 0.5,
        "old_values": base_values + _move_off_boundaries(0.3 * noise(tokens), _VALUE_CLIPS),
        "returns": base_values + noise(tokens),
        LOGPROB_AT_IDS: torch.randint(VOCABULARY, (tokens, NUM_REQUESTED_IDS), generator=generator),
        # One id is dropped, so that the probabilities of the others do not add up to 1.
        "teacher_logprobs": torch.log_softmax(noise(tokens, NUM_REQUESTED_IDS + 1), dim=-1)[
            :, :NUM_REQUESTED_IDS
        ],
    }
    first_of_pair = torch.arange(sequences) % 2 == 0
    return batch.with_columns(
        columns,
        {"is_chosen": first_of_pair, "sequence_advantages": noise(sequences) + 0.5 * first_of_pair},
    )


def _move_off_boundaries(noise: Tensor, boundaries: Sequence[float]) -> Tensor:
    """Move noise away from clip boundaries.

    At a boundary the loss has two slopes, and rounding would choose between them.
    """
    for boundary in boundaries:
        distance = noise - boundary
        noise = torch.where(
            distance.abs() < _CLEARANCE,
            boundary + torch.where(distance < 0, -_CLEARANCE, _CLEARANCE),
            noise,
        )
    return noise


def mask_everything(batch: SequenceBatch) -> SequenceBatch:
    """Return the batch with an all-False loss mask."""
    return replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
