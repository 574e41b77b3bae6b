"""Outputs of the last pipeline stage: log-probs, or values and scores from a scalar head.

The output of token t is computed from the hidden state of token t - 1, which may be on another
context-parallel rank. Each rank computes the outputs for its own hidden states; their sum over
ranks gives full sequences to the objective.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.distributed.process_group import sum_over_ranks
from temper_engine_api.errors import CapabilityError
from temper_engine_api.objective import HeadOutput, HeadOutputs, get_logprob_at_ids
from temper_engine_megatron.adapter.adapter_placement import TrainedHead
from temper_engine_megatron.model.micro_batch_layout import LocalMicroBatch
from temper_engine_megatron.model.vocab_parallel_logprobs import VocabShard, vocab_parallel_logprobs

LANGUAGE_OUTPUTS = frozenset(
    {HeadOutput.LOGPROB, HeadOutput.ENTROPY, HeadOutput.LOGPROB_AT, HeadOutput.LOGSUMEXP}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """Computes the outputs of the last pipeline stage."""

    weight: nn.Parameter
    """[V / ranks, D] output embedding rows, or [1, D] for a scalar head."""
    bias: nn.Parameter | None
    """Bias [1] of a scalar head; None for a language model."""
    scalar_output: HeadOutput | None
    """VALUE or SCORE; None for a language model."""
    vocab_size: int
    """Vocabulary size V, without padding."""
    chunk_size: int
    """Number of positions whose logits are in memory at once."""
    uses_compile: bool
    """Same as in `VocabShard`."""
    pads_chunks: bool
    """Same as in `VocabShard`."""
    tp: dist.ProcessGroup = field(repr=False)
    """Ranks with the other shards of the vocabulary."""
    cp: dist.ProcessGroup = field(repr=False)
    """Ranks with the other tokens."""
    trained_head: TrainedHead | None = None
    """Weight and bias that an adapter trains in place of these; None if it trains no head."""

    @property
    def _weight_in_use(self) -> nn.Parameter:
        head = self.trained_head
        return self.weight if head is None or head.switch.is_off else head.weight

    @property
    def _bias_in_use(self) -> nn.Parameter | None:
        head = self.trained_head
        return self.bias if head is None or head.switch.is_off else head.bias

    def check_outputs(self, requested_outputs: frozenset[HeadOutput]) -> None:
        """Check that this head can compute the requested outputs.

        Raises:
            CapabilityError: If it cannot compute some.
        """
        scalar = self.scalar_output
        supported = LANGUAGE_OUTPUTS if scalar is None else frozenset({scalar})
        if unsupported := requested_outputs - supported:
            kind = "language_model" if scalar is None else f"{scalar.value}_model"
            raise CapabilityError(
                f"a {kind} cannot compute {', '.join(sorted(unsupported))}: request only "
                f"{', '.join(sorted(supported))}."
            )

    def compute_outputs(
        self,
        hidden: Tensor,
        local: LocalMicroBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        trained_only: bool,
    ) -> HeadOutputs:
        """Compute outputs for the full micro-batch, the same on every rank of the last stage.

        Collective over these ranks.

        Args:
            hidden: [S R, D] hidden states of this rank.
            local: The micro-batch.
            requested_outputs: Outputs to compute.
            trained_only: Compute trained positions only; otherwise all that have a predecessor.
        """
        batch = local.micro_batch
        if self.scalar_output is HeadOutput.SCORE:
            columns = {HeadOutput.SCORE: self._compute_scores(hidden, local)}
        else:
            is_requested = batch.loss_mask if trained_only else _has_predecessor(batch)
            positions = torch.nonzero(is_requested)[:, 0]
            # A token's output is computed from the previous token's hidden state, on the rank that
            # has that state.
            predecessor_index = local.local_index[positions - 1]
            positions = positions[predecessor_index >= 0]
            rows = hidden.index_select(0, predecessor_index[predecessor_index >= 0])
            local_columns = (
                self._compute_logprobs(rows, batch, positions, requested_outputs)
                if self.scalar_output is None
                else {HeadOutput.VALUE: self._compute_scalars(rows)}
            )
            columns = {
                output: _scatter_rows(
                    local_columns[output], positions=positions, size=batch.num_tokens
                )
                for output in requested_outputs
            }
        # Sort the columns, because the order of a set differs between processes, and all ranks must
        # sum the same column at the same time.
        return HeadOutputs(
            columns={name: sum_over_ranks(columns[name], group=self.cp) for name in sorted(columns)}
        )

    def _compute_logprobs(
        self,
        rows: Tensor,
        batch: SequenceBatch,
        positions: Tensor,
        requested_outputs: frozenset[HeadOutput],
    ) -> Mapping[HeadOutput, Tensor]:
        weight = self._weight_in_use
        num_rows = weight.shape[0]
        first_id = self.tp.rank() * num_rows
        logprobs = vocab_parallel_logprobs(
            rows.to(weight.dtype),
            weight,
            batch.tokens[positions],
            temperature=batch.temperature.float()[batch.sequence_index[positions]],
            extra_ids=get_logprob_at_ids(batch)[positions]
            if HeadOutput.LOGPROB_AT in requested_outputs
            else None,
            shard=VocabShard(
                group=self.tp,
                first_id=first_id,
                # The last ranks hold the padding of the vocabulary, which must not count in the
                # softmax.
                num_tokens=max(0, min(num_rows, self.vocab_size - first_id)),
                chunk_size=self.chunk_size,
                needs_entropy=HeadOutput.ENTROPY in requested_outputs,
                uses_compile=self.uses_compile,
                pads_chunks=self.pads_chunks,
            ),
        )
        return {
            HeadOutput.LOGPROB: logprobs.logprob,
            HeadOutput.ENTROPY: logprobs.entropy,
            HeadOutput.LOGSUMEXP: logprobs.logsumexp,
            HeadOutput.LOGPROB_AT: logprobs.extra_logprobs,
        }

    def _compute_scores(self, hidden: Tensor, local: LocalMicroBatch) -> Tensor:
        """Compute [B] scores from the last token of each sequence; zero on other ranks."""
        last = local.micro_batch.sequence_starts[1:].long() - 1
        last_index = local.local_index[last]
        local_sequences = torch.nonzero(last_index >= 0)[:, 0]
        scores = self._compute_scalars(hidden.index_select(0, last_index[local_sequences]))
        return _scatter_rows(scores, positions=local_sequences, size=last.shape[0])

    def _compute_scalars(self, rows: Tensor) -> Tensor:
        # Float32 costs little here: the weight is a single row.
        bias = None if self._bias_in_use is None else self._bias_in_use.float()
        return nn.functional.linear(rows.float(), self._weight_in_use.float(), bias)[:, 0]


def _has_predecessor(batch: SequenceBatch) -> Tensor:
    # There is no hidden state before the first token of a sequence.
    mask = torch.ones_like(batch.loss_mask)
    mask[batch.sequence_starts[:-1].long()] = False
    return mask


def _scatter_rows(rows: Tensor, *, positions: Tensor, size: int) -> Tensor:
    """Return [size, ...] zeros with rows at these positions; differentiable."""
    return rows.new_zeros(size, *rows.shape[1:]).index_copy(0, positions, rows)
