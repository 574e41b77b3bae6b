"""Output heads: log-probs from a language model, values and scores from a scalar head.

The output for token t is computed from the hidden state of token t - 1, so the first position of
each sequence is 0.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch, copy_to_device
from temper_engine_api.errors import CapabilityError
from temper_engine_api.objective import HeadOutput, get_logprob_at_ids
from temper_engine_fsdp.model.token_logprobs import chunked_logprobs, full_logprobs

LANGUAGE_OUTPUTS = frozenset(
    {HeadOutput.LOGPROB, HeadOutput.ENTROPY, HeadOutput.LOGPROB_AT, HeadOutput.LOGSUMEXP}
)

LinearGetter = Callable[[], nn.Linear]
"""Returns the projection to use in this call.

An adapter may have a trained copy of it, and may be disabled.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """Requested outputs for one micro-batch, built on the host to avoid a device sync."""

    requested_outputs: frozenset[HeadOutput]
    """Columns to compute for this micro-batch."""
    with_gradient: frozenset[HeadOutput]
    """Columns that the loss differentiates."""
    positions: Tensor
    """[N] int64, tokens whose output this rank computes; never the first of a sequence."""
    score_sequences: Tensor
    """[M] int64, sequences whose score this rank computes."""
    first_position: int
    """Pack position of this rank's first hidden state."""
    is_unit_temperature: bool
    """True if all temperatures are 1, so that logits need no division."""


def build_head_request(
    batch: SequenceBatch,
    *,
    requested_outputs: Collection[HeadOutput],
    with_gradient: Collection[HeadOutput],
    trained_only: bool,
    device: torch.device,
    bounds: tuple[int, int] | None = None,
) -> HeadRequest:
    """Request outputs at trained tokens, or at all tokens that have a predecessor.

    Args:
        batch: Micro-batch on the CPU.
        requested_outputs: Columns to compute.
        with_gradient: Columns that the loss differentiates.
        trained_only: Request trained tokens only.
        device: Device of the model.
        bounds: Half-open range of pack positions whose hidden states this rank has; None means all.
    """
    is_needed = batch.loss_mask
    if not trained_only:
        is_needed = torch.ones_like(batch.loss_mask)
        # The first token of a sequence has no hidden state before it.
        is_needed[batch.sequence_starts[:-1].long()] = False
    first, end = (0, batch.num_tokens) if bounds is None else bounds
    positions, last = torch.nonzero(is_needed)[:, 0], batch.sequence_starts[1:].long() - 1
    if bounds is not None:
        # The output of a token belongs to the rank with the hidden state before it.
        positions = positions[(positions > first) & (positions <= end)]
    return HeadRequest(
        requested_outputs=frozenset(requested_outputs),
        with_gradient=frozenset(with_gradient),
        positions=copy_to_device(positions, device),
        score_sequences=copy_to_device(torch.nonzero((last >= first) & (last < end))[:, 0], device),
        first_position=first,
        is_unit_temperature=bool((batch.temperature == 1.0).all()),
    )


class Head(Protocol):
    """Computes outputs from hidden states."""

    def __call__(
        self, hidden: Tensor, batch: SequenceBatch, request: HeadRequest
    ) -> Mapping[HeadOutput, Tensor]:
        """Compute the requested columns from hidden states [T, D] in the compute dtype."""


class LanguageHead:
    """Head of a language model."""

    def __init__(
        self,
        linear: LinearGetter,
        *,
        chunk_tokens: int | None,
        keeps_logits: bool = False,
        uses_compile: bool = False,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self._scale = scale
        self._softcap = softcap
        self._linear = linear
        self._chunk_tokens = chunk_tokens
        self._keeps_logits = keeps_logits
        self._uses_compile = uses_compile

    def __call__(
        self, hidden: Tensor, batch: SequenceBatch, request: HeadRequest
    ) -> Mapping[HeadOutput, Tensor]:
        """Compute log-probs and, if requested, entropies and the log-probs of extra token ids."""
        _check_requested(request.requested_outputs, allowed=LANGUAGE_OUTPUTS, head="language_model")
        positions = request.positions
        extra_ids = (
            get_logprob_at_ids(batch)[positions]
            if HeadOutput.LOGPROB_AT in request.requested_outputs
            else None
        )
        compute_logprobs = (
            partial(full_logprobs, uses_compile=self._uses_compile)
            if self._keeps_logits
            else partial(chunked_logprobs, chunk_tokens=self._chunk_tokens, softcap=self._softcap)
        )
        selected = hidden.index_select(0, positions - 1 - request.first_position)
        logprobs = compute_logprobs(
            # The projection is linear: a factor for the logits is also one for the hidden states.
            selected if self._scale == 1.0 else selected * self._scale,
            self._linear().weight,
            batch.tokens[positions],
            temperature=None
            if request.is_unit_temperature
            else batch.temperature[batch.sequence_index[positions]],
            extra_ids=extra_ids,
            needs_entropy=HeadOutput.ENTROPY in request.requested_outputs,
            entropy_has_gradient=HeadOutput.ENTROPY in request.with_gradient,
        )
        columns = {
            HeadOutput.LOGPROB: logprobs.logprob,
            HeadOutput.ENTROPY: logprobs.entropy,
            HeadOutput.LOGSUMEXP: logprobs.logsumexp,
            HeadOutput.LOGPROB_AT: logprobs.extra_logprobs,
        }
        return {
            head_output: _scatter(columns[head_output], positions=positions, size=batch.num_tokens)
            for head_output in sorted(request.requested_outputs)
        }


class ScalarHead:
    """Head with a single output, computed in float32."""

    def __init__(self, linear: LinearGetter, *, head_output: HeadOutput) -> None:
        self._linear = linear
        self._head_output = head_output

    def __call__(
        self, hidden: Tensor, batch: SequenceBatch, request: HeadRequest
    ) -> Mapping[HeadOutput, Tensor]:
        """Compute a value at each requested position, or a score for each sequence."""
        _check_requested(
            request.requested_outputs,
            allowed=frozenset({self._head_output}),
            head=f"{self._head_output.value}_model",
        )
        if self._head_output == HeadOutput.SCORE:
            last = batch.sequence_starts[1:].long().index_select(0, request.score_sequences) - 1
            scores = self._project(hidden.index_select(0, last - request.first_position))
            return {
                HeadOutput.SCORE: _scatter(
                    scores, positions=request.score_sequences, size=batch.num_sequences
                )
            }
        values = self._project(
            hidden.index_select(0, request.positions - 1 - request.first_position)
        )
        return {
            self._head_output: _scatter(values, positions=request.positions, size=batch.num_tokens)
        }

    def _project(self, hidden: Tensor) -> Tensor:
        linear = self._linear()
        bias: Tensor | None = linear.bias
        return nn.functional.linear(
            hidden.float(), linear.weight.float(), None if bias is None else bias.float()
        ).sum(1)


def _scatter(column: Tensor, *, positions: Tensor, size: int) -> Tensor:
    """Return [size, ...] zeros with the rows of `column` at `positions`; differentiable."""
    return column.new_zeros(size, *column.shape[1:]).index_copy(0, positions, column)


def _check_requested(
    requested_outputs: frozenset[HeadOutput], *, allowed: frozenset[HeadOutput], head: str
) -> None:
    if unsupported := requested_outputs - allowed:
        raise CapabilityError(
            f"a {head} cannot compute {', '.join(sorted(unsupported))}: request only "
            f"{', '.join(sorted(allowed))}."
        )
