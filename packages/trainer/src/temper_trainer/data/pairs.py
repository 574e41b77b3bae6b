"""Pairs of completions of one prompt, one preferred: from records to token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from temper_trainer.config.data import DataConfig, SourceConfig
from temper_trainer.data.prompts import encode_demonstrations
from temper_trainer.data.rows import DataError, Row, row_from_record
from temper_trainer.data.sources import load_records
from temper_trainer.types import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """One preference before tokenisation."""

    chosen: Row
    """Prompt with the preferred completion as its solution."""
    rejected: Row
    """The same prompt with the other one."""


def load_pairs(source: SourceConfig) -> list[PairRow]:
    """Every pair of a source.

    Raises:
        DataError: a record lacks a field or a completion is empty.
    """
    fields = (source.prompt_key, source.chosen_key, source.rejected_key)
    records = load_records(source, fields=fields)
    return [_pair(record, source=source, row_id=i, where=where) for i, (where, record) in enumerate(records)]


def encode_pairs(rows: Sequence[PairRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> tuple[list[Pair], int]:
    """Pairs whose prompt fits, and how many were dropped.

    Raises:
        DataError: as encode_demonstrations.
    """
    chosen, num_dropped = encode_demonstrations([row.chosen for row in rows], tokenizer, config)
    rejected, _ = encode_demonstrations([row.rejected for row in rows], tokenizer, config)
    return [Pair(chosen=good, rejected=bad) for good, bad in zip(chosen, rejected, strict=True)], num_dropped


def _pair(record: object, *, source: SourceConfig, row_id: int, where: str) -> PairRow:
    found = {}
    for key in (source.chosen_key, source.rejected_key):
        row = row_from_record(record, config=replace(source, answer_key=key), row_id=row_id, source=where)
        if not row.answer.strip():
            raise DataError(f"{where}: field {key!r} is empty: a pair needs two completions. Remove the row.")
        found[key] = row
    if found[source.chosen_key].answer == found[source.rejected_key].answer:
        raise DataError(f"{where}: fields {source.chosen_key!r} and {source.rejected_key!r} are equal, which says nothing: remove the row.")
    return PairRow(chosen=found[source.chosen_key], rejected=found[source.rejected_key])
