"""What a forward pass returns: columns per sample, in a form that can be gathered from many ranks and put in any order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import BatchError
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import HeadOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutputs:
    """Answers of one rank or of many, on the CPU, without dummies."""

    sample_ids: Tensor
    """[B] int64."""
    sequence_starts: Tensor
    """[B + 1] int64."""
    columns: Mapping[HeadOutput, Tensor]
    """[T], [T, K] or (for HeadOutput.SCORE) [B] float32."""

    def reorder(self, sample_ids: Tensor) -> "ForwardOutputs":
        """The same outputs, sequences in the order of these ids [B].

        Raises:
            BatchError: an id is missing or comes twice.
        """
        place = {sample: i for i, sample in enumerate(self.sample_ids.tolist())}
        wanted: list[int] = sample_ids.tolist()
        if len(place) != len(self.sample_ids) or sorted(wanted) != sorted(place):
            raise BatchError(
                f"outputs hold {len(self.sample_ids)} sequences with {len(place)} distinct ids, but {len(wanted)} were asked for with "
                f"{len(set(wanted) - place.keys())} unknown ids: ask for each sequence once."
            )
        index = torch.tensor([place[i] for i in wanted], dtype=torch.long)
        lengths = self.sequence_starts.diff()[index]
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        within = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1], lengths)
        source = within + torch.repeat_interleave(self.sequence_starts[:-1][index], lengths)
        columns = {
            q: c[index] if q == HeadOutput.SCORE else c[source] for q, c in self.columns.items()
        }
        return ForwardOutputs(
            sample_ids=sample_ids.clone(), sequence_starts=starts, columns=columns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What ``forward_backward_batch`` returns on each rank."""

    outputs: ForwardOutputs | None
    """In input order; None where nothing was asked, or where ``topology.returns_outputs`` is False."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """This data-parallel rank's part: merge over the ranks that return outputs. ``loss`` is among them, reduced by sum."""


def collect_outputs(batch: SequenceBatch, columns: Mapping[HeadOutput, Tensor]) -> ForwardOutputs:
    """Columns in the layout of a batch as outputs on the CPU, dummies dropped."""
    keep = ~batch.is_dummy.cpu()
    lengths = batch.lengths.cpu()
    keep_tokens = torch.repeat_interleave(keep, lengths)
    kept = lengths[keep]
    chosen = {
        q: c.detach().float().cpu()[keep if q == HeadOutput.SCORE else keep_tokens]
        for q, c in columns.items()
    }
    starts = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
    return ForwardOutputs(
        sample_ids=batch.sample_ids.cpu()[keep], sequence_starts=starts, columns=chosen
    )


def gather_outputs(parts: Sequence[ForwardOutputs | None], *, sample_ids: Tensor) -> ForwardOutputs:
    """The outputs of all ranks as one, in the order of these ids [B]; ranks that return none are passed over.

    Raises:
        BatchError: no rank returned outputs, or an id is missing or comes twice.
    """
    present = [part for part in parts if part is not None]
    if not present:
        raise BatchError("no rank returned outputs: ask for at least one query.")
    lengths = torch.cat([part.sequence_starts.diff() for part in present])
    together = ForwardOutputs(
        sample_ids=torch.cat([part.sample_ids for part in present]),
        sequence_starts=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        columns={q: torch.cat([part.columns[q] for part in present]) for q in present[0].columns},
    )
    return together.reorder(sample_ids)
