"""Pairs of completions of one prompt, one preferred: from rows to token ids."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from temper_trainer.config.data import DataConfig
from temper_trainer.data.prompts import encode_demonstrations
from temper_trainer.data.rows import PairRow
from temper_trainer.types import Pair


def encode_pairs(
    rows: Sequence[PairRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> tuple[list[Pair], int]:
    """Pairs whose prompt fits, and how many were dropped.

    Raises:
        DataError: as encode_demonstrations.
    """
    chosen, num_dropped = encode_demonstrations([row.chosen for row in rows], tokenizer, config)
    rejected, _ = encode_demonstrations([row.rejected for row in rows], tokenizer, config)
    return [
        Pair(chosen=good, rejected=bad) for good, bad in zip(chosen, rejected, strict=True)
    ], num_dropped
