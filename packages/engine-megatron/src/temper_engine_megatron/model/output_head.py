"""What the last stage answers from hidden states: a language head through the split vocabulary, a scalar head for values and scores.

The answer about token t is read at the hidden state of token t - 1, which may lie on another context-parallel rank; each rank answers for
the hidden states that it has, and the columns of all ranks are added up, so that an objective sees whole sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import BatchError, CapabilityError
from temper_engine_api.objective import LOGPROB_AT_IDS, HeadOutput, HeadOutputs
from temper_engine_megatron.adapter.adapter_placement import TrainedHead
from temper_engine_megatron.model.collectives import sum_over_ranks
from temper_engine_megatron.model.micro_batch_layout import LocalMicroBatch
from temper_engine_megatron.model.vocab_parallel_logprobs import VocabShard, vocab_parallel_logprobs

LANGUAGE_OUTPUTS = frozenset(
    {HeadOutput.LOGPROB, HeadOutput.ENTROPY, HeadOutput.LOGPROB_AT, HeadOutput.LOGSUMEXP_TERMS}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """Answers of the last stage."""

    projection: nn.Parameter
    """[V / ranks, D] rows of the output embedding, or [1, D] of a scalar head."""
    bias: nn.Parameter | None
    """[1] of a scalar head."""
    scalar: HeadOutput | None
    """VALUE or SCORE; None for a language model."""
    vocabulary: int
    """V, without padding."""
    chunk: int
    """Positions whose logits are held at once."""
    is_compiled: bool
    """Whether passes over logits are compiled."""
    fills_chunks: bool
    """See VocabShard."""
    tp: dist.ProcessGroup = field(repr=False)
    """Ranks that the vocabulary is split over."""
    cp: dist.ProcessGroup = field(repr=False)
    """Ranks that the tokens are split over."""
    trained: TrainedHead | None = None
    """What an adapter trains in the place of weight and bias."""

    @property
    def _weight(self) -> nn.Parameter:
        return (
            self.projection
            if self.trained is None or self.trained.switch.is_off
            else self.trained.weight
        )

    @property
    def _offset(self) -> nn.Parameter | None:
        return (
            self.bias if self.trained is None or self.trained.switch.is_off else self.trained.bias
        )

    def check(self, requested_outputs: frozenset[HeadOutput]) -> None:
        """Refuse what this head can't answer.

        Raises:
            CapabilityError: naming the queries.
        """
        allowed = LANGUAGE_OUTPUTS if self.scalar is None else frozenset({self.scalar})
        if others := requested_outputs - allowed:
            kind = "language_model" if self.scalar is None else f"{self.scalar.value}_model"
            raise CapabilityError(
                f"a {kind} can't answer {', '.join(sorted(others))}; it answers {', '.join(sorted(allowed))}."
            )

    def compute_outputs(
        self,
        hidden: Tensor,
        local: LocalMicroBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        trained_only: bool,
    ) -> HeadOutputs:
        """Answers about the whole micro-batch, the same on every rank of the last stage. Collective over them.

        Args:
            hidden: [S R, D] of this rank's places.
            local: the micro-batch.
            queries: what is asked.
            trained_only: only trained positions need an answer; else all that have a predecessor.
        """
        whole = local.whole
        if self.scalar is HeadOutput.SCORE:
            columns = {HeadOutput.SCORE: self._scores(hidden, local)}
        else:
            wanted = whole.loss_mask if trained_only else _has_predecessor(whole)
            at = torch.nonzero(wanted)[:, 0]
            place = local.place[at - 1]
            at = at[place >= 0]
            rows = hidden.index_select(0, place[place >= 0])
            found = (
                self._language(rows, whole, at, requested_outputs)
                if self.scalar is None
                else {HeadOutput.VALUE: self._scalars(rows)}
            )
            columns = {
                head_output: _place(found[head_output], at=at, size=whole.num_tokens)
                for head_output in requested_outputs
            }
        # Sorted: sets differ in order between processes, and every rank must add up the same column.
        return HeadOutputs(
            columns={
                head_output: sum_over_ranks(columns[head_output], self.cp)
                for head_output in sorted(columns)
            }
        )

    def _language(
        self,
        rows: Tensor,
        whole: SequenceBatch,
        at: Tensor,
        requested_outputs: frozenset[HeadOutput],
    ) -> Mapping[HeadOutput, Tensor]:
        weight = self._weight
        held = weight.shape[0]
        first = self.tp.rank() * held
        columns = vocab_parallel_logprobs(
            rows.to(weight.dtype),
            weight,
            whole.tokens[at],
            temperature=whole.temperature.float()[whole.sequence_index[at]],
            ids=_ids_of(whole)[at] if HeadOutput.LOGPROB_AT in requested_outputs else None,
            share=VocabShard(
                group=self.tp,
                first=first,
                size=max(0, min(held, self.vocabulary - first)),
                chunk=self.chunk,
                wants_entropy=HeadOutput.ENTROPY in requested_outputs,
                is_compiled=self.is_compiled,
                fills_chunks=self.fills_chunks,
            ),
        )
        return {
            HeadOutput.LOGPROB: columns.logprob,
            HeadOutput.ENTROPY: columns.entropy,
            HeadOutput.LOGSUMEXP_TERMS: columns.logsumexp,
            HeadOutput.LOGPROB_AT: columns.logprob_at,
        }

    def _scores(self, hidden: Tensor, local: LocalMicroBatch) -> Tensor:
        last = local.whole.sequence_starts[1:].long() - 1
        place = local.place[last]
        mine = torch.nonzero(place >= 0)[:, 0]
        scores = self._scalars(hidden.index_select(0, place[mine]))
        return _place(scores, at=mine, size=last.shape[0])

    def _scalars(self, rows: Tensor) -> Tensor:
        bias = None if self._offset is None else self._offset.float()
        return nn.functional.linear(rows.float(), self._weight.float(), bias)[:, 0]


def _has_predecessor(batch: SequenceBatch) -> Tensor:
    wanted = torch.ones_like(batch.loss_mask)
    wanted[batch.sequence_starts[:-1].long()] = False
    return wanted


def _place(column: Tensor, *, at: Tensor, size: int) -> Tensor:
    """[size, ...] zeros with the column's rows at their positions, with gradient."""
    return column.new_zeros(size, *column.shape[1:]).index_copy(0, at, column)


def _ids_of(batch: SequenceBatch) -> Tensor:
    if LOGPROB_AT_IDS not in batch.columns:
        raise BatchError(
            f"logprob_at was asked, but the batch has no column {LOGPROB_AT_IDS!r}: add [T, K] token ids."
        )
    return batch.columns[LOGPROB_AT_IDS]
