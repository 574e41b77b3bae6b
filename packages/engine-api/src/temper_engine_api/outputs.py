"""Results of forward passes by sample, which can be gathered from ranks and reordered."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.distributed.gatherable import gatherable
from temper_engine_api.errors import BatchError
from temper_engine_api.metrics import LazyMetrics, Metric, materialize_metrics, merge_metrics
from temper_engine_api.objective import HeadOutput, HeadOutputs


@gatherable
@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutputs:
    """Detached head outputs of one or more ranks on the CPU, without dummy sequences.

    Example:
        >>> outputs = ForwardOutputs(
        ...     sample_ids=torch.tensor([7, 3]),
        ...     sequence_starts=torch.tensor([0, 2, 3]),
        ...     columns={HeadOutput.LOGPROB: torch.tensor([0.0, -1.5, 0.0])},
        ... )
        >>> outputs.reorder(torch.tensor([3, 7])).columns[HeadOutput.LOGPROB].tolist()
        [0.0, 0.0, -1.5]
    """

    sample_ids: Tensor
    """[B] int64 sequence ids, in the order used by the columns."""
    sequence_starts: Tensor
    """[B + 1] int64."""
    columns: Mapping[HeadOutput, Tensor]
    """[T], [T, K] or [T, layers, K] float32; [B] for HeadOutput.SCORE."""

    def reorder(self, sample_ids: Tensor) -> "ForwardOutputs":
        """Return the outputs with sequences in the order of these ids [B].

        Raises:
            BatchError: If an id is unknown, missing or repeated.
        """
        position = {sample: i for i, sample in enumerate(self.sample_ids.tolist())}
        requested: list[int] = sample_ids.tolist()
        if len(position) != len(self.sample_ids) or sorted(requested) != sorted(position):
            raise BatchError(
                f"outputs have {len(self.sample_ids)} sequences with {len(position)} distinct ids, "
                f"but {len(requested)} ids were requested, {len(set(requested) - position.keys())} "
                "of them unknown: request each sequence once."
            )
        index = torch.tensor([position[i] for i in requested], dtype=torch.long)
        lengths = self.sequence_starts.diff()[index]
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        # Index of each token within its sequence, without a loop over sequences.
        token_offset = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1], lengths)
        source = token_offset + torch.repeat_interleave(self.sequence_starts[:-1][index], lengths)
        columns = {
            q: c[index] if q == HeadOutput.SCORE else c[source] for q, c in self.columns.items()
        }
        return ForwardOutputs(
            sample_ids=sample_ids.clone(), sequence_starts=starts, columns=columns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of `forward_backward_batch` on one rank.

    Example:
        >>> result = StepResult(outputs=None, metrics={"loss": Metric(value=0.7, reduction="sum")})
        >>> result.metrics["loss"].result
        0.7
    """

    outputs: ForwardOutputs | None
    """Requested outputs in input order; None if none were requested, or on ranks where
    `topology.returns_outputs` is False."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """This data-parallel rank's metrics, to be merged across the ranks that return outputs.
    Includes `loss`, which merges by sum."""


def collect_outputs(batch: SequenceBatch, columns: Mapping[HeadOutput, Tensor]) -> ForwardOutputs:
    """Copy columns of a batch to the CPU and drop dummies."""
    keep = ~batch.is_dummy.cpu()
    lengths = batch.lengths.cpu()
    keep_tokens = torch.repeat_interleave(keep, lengths)
    kept_lengths = lengths[keep]
    chosen = {
        q: c.detach().float().cpu()[keep if q == HeadOutput.SCORE else keep_tokens]
        for q, c in columns.items()
    }
    starts = torch.cat([kept_lengths.new_zeros(1), kept_lengths.cumsum(0)])
    return ForwardOutputs(
        sample_ids=batch.sample_ids.cpu()[keep], sequence_starts=starts, columns=chosen
    )


def build_step_result(
    batch: SequenceBatch,
    *,
    head_outputs: Sequence[HeadOutputs] | None,
    requested: Collection[HeadOutput],
    metrics: Sequence[Mapping[str, Metric]],
) -> StepResult:
    """Join the outputs and metrics of a batch's micro-batches.

    Args:
        batch: The batch with all micro-batches.
        head_outputs: Outputs by micro-batch; None on a rank that returns none.
        requested: Outputs to return.
        metrics: Metrics, merged only when they are read, because that waits for the device.
    """
    merged = LazyMetrics(lambda: materialize_metrics(merge_metrics(metrics)))
    if head_outputs is None or not requested:
        return StepResult(outputs=None, metrics=merged)
    columns = {
        head_output: torch.cat([part[head_output] for part in head_outputs])
        for head_output in requested
    }
    return StepResult(outputs=collect_outputs(batch, columns), metrics=merged)


def gather_outputs(parts: Sequence[ForwardOutputs | None], *, sample_ids: Tensor) -> ForwardOutputs:
    """Join the outputs from all ranks, ordered by these ids [B]; None entries are skipped.

    Raises:
        BatchError: If no rank returned outputs, or an id is unknown, missing or repeated.
    """
    present = [part for part in parts if part is not None]
    if not present:
        raise BatchError(
            "no rank returned outputs: pass `outputs` to the forward call, such as "
            "[HeadOutput.LOGPROB]."
        )
    lengths = torch.cat([part.sequence_starts.diff() for part in present])
    together = ForwardOutputs(
        sample_ids=torch.cat([part.sample_ids for part in present]),
        sequence_starts=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        columns={q: torch.cat([part.columns[q] for part in present]) for q in present[0].columns},
    )
    return together.reorder(sample_ids)
