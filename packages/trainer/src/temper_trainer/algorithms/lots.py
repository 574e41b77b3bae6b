"""Random choices that depend on (seed, sample id, position) only, whatever the order or the split of the samples."""

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch

_FACTORS = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)
_BITS = 52


def lots(batch: SequenceBatch, *, seed: int) -> Tensor:
    """[T] float64 in [0, 1), one for each token: a multiply-and-shift hash in wrapping 64-bit integers."""
    starts = batch.sequence_starts.long()[:-1]
    position = torch.arange(batch.num_tokens) - starts[batch.sequence_index]
    key = batch.sample_ids[batch.sequence_index] * 1_000_003 + position * 8_191 + seed
    for factor in _FACTORS:
        key = key * factor
        key = key ^ (key >> 29)
    return (key & ((1 << _BITS) - 1)).double() / (1 << _BITS)
