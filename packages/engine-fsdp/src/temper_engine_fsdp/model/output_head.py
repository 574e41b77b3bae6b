"""Output heads: log-probs of a language model, values and scores of a scalar head.

The output for token t is computed from the hidden state of token t - 1, so the first position of
each sequence is 0.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import BatchError, CapabilityError
from temper_engine_api.objective import LOGPROB_AT_IDS, Query
from temper_engine_fsdp.model.token_logprobs import chunked_logprobs, full_logprobs
from temper_engine_fsdp.runtime.host_device import to_device

LANGUAGE_QUERIES = frozenset(
    {Query.LOGPROB, Query.ENTROPY, Query.LOGPROB_AT, Query.LOGSUMEXP_TERMS}
)

LinearGetter = Callable[[], nn.Linear]
"""Returns the projection to use in this call.

An adapter may have a trained copy of it, and may be disabled.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """Requested outputs for one micro-batch, built on the host to avoid a device sync."""

    queries: frozenset[Query]
    """Columns to compute for this micro-batch."""
    with_gradient: frozenset[Query]
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
    queries: Collection[Query],
    with_gradient: Collection[Query],
    trained_only: bool,
    device: torch.device,
    bounds: tuple[int, int] | None = None,
) -> HeadRequest:
    """Request outputs at trained tokens, or at all tokens that have a predecessor.

    Args:
        batch: Micro-batch on the CPU.
        queries: Requested columns.
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
        queries=frozenset(queries),
        with_gradient=frozenset(with_gradient),
        positions=to_device(positions, device),
        score_sequences=to_device(torch.nonzero((last >= first) & (last < end))[:, 0], device),
        first_position=first,
        is_unit_temperature=bool((batch.temperature == 1.0).all()),
    )


class Head(Protocol):
    """Computes outputs from hidden states."""

    def __call__(
        self, hidden: Tensor, batch: SequenceBatch, request: HeadRequest
    ) -> Mapping[Query, Tensor]:
        """Compute columns by query from hidden states [T, D] in the compute dtype."""


class LanguageHead:
    """Head of a language model."""

    def __init__(
        self,
        linear: LinearGetter,
        *,
        chunk_tokens: int | None,
        keeps_logits: bool = False,
        is_compiled: bool = False,
    ) -> None:
        self._linear = linear
        self._chunk_tokens = chunk_tokens
        self._keeps_logits = keeps_logits
        self._is_compiled = is_compiled

    def __call__(
        self, hidden: Tensor, batch: SequenceBatch, request: HeadRequest
    ) -> Mapping[Query, Tensor]:
        """See Head."""
        _check_queries(request.queries, allowed=LANGUAGE_QUERIES, head="language_model")
        at = request.positions
        ids = _requested_ids(batch)[at] if Query.LOGPROB_AT in request.queries else None
        compute_logprobs = (
            partial(full_logprobs, is_compiled=self._is_compiled)
            if self._keeps_logits
            else partial(chunked_logprobs, chunk_tokens=self._chunk_tokens)
        )
        columns = compute_logprobs(
            hidden.index_select(0, at - 1 - request.first_position),
            self._linear().weight,
            batch.tokens[at],
            temperature=None
            if request.is_unit_temperature
            else batch.temperature[batch.sequence_index[at]],
            ids=ids,
            needs_entropy=Query.ENTROPY in request.queries,
            entropy_has_gradient=Query.ENTROPY in request.with_gradient,
        )
        by_query = {
            Query.LOGPROB: columns.logprob,
            Query.ENTROPY: columns.entropy,
            Query.LOGSUMEXP_TERMS: columns.logsumexp,
            Query.LOGPROB_AT: columns.logprob_at,
        }
        return {
            query: _scatter(by_query[query], at=at, size=batch.num_tokens)
            for query in sorted(request.queries)
        }


class ScalarHead:
    """Head with a single output, computed in float32."""

    def __init__(self, linear: LinearGetter, *, query: Query) -> None:
        self._linear = linear
        self._query = query

    def __call__(
        self, hidden: Tensor, batch: SequenceBatch, request: HeadRequest
    ) -> Mapping[Query, Tensor]:
        """See Head."""
        _check_queries(
            request.queries, allowed=frozenset({self._query}), head=f"{self._query.value}_model"
        )
        if self._query == Query.SCORE:
            last = batch.sequence_starts[1:].long().index_select(0, request.score_sequences) - 1
            scores = self._project(hidden.index_select(0, last - request.first_position))
            return {
                Query.SCORE: _scatter(scores, at=request.score_sequences, size=batch.num_sequences)
            }
        numbers = self._project(
            hidden.index_select(0, request.positions - 1 - request.first_position)
        )
        return {self._query: _scatter(numbers, at=request.positions, size=batch.num_tokens)}

    def _project(self, hidden: Tensor) -> Tensor:
        linear = self._linear()
        bias: Tensor | None = linear.bias
        return nn.functional.linear(
            hidden.float(), linear.weight.float(), None if bias is None else bias.float()
        ).sum(1)


def _scatter(column: Tensor, *, at: Tensor, size: int) -> Tensor:
    """Return [size, ...] zeros with the rows of `column` at positions `at`; differentiable."""
    return column.new_zeros(size, *column.shape[1:]).index_copy(0, at, column)


def _requested_ids(batch: SequenceBatch) -> Tensor:
    if LOGPROB_AT_IDS not in batch.columns:
        raise BatchError(
            f"logprob_at was requested, but the batch has no column {LOGPROB_AT_IDS!r}: add [T, K] "
            "token ids."
        )
    return batch.columns[LOGPROB_AT_IDS]


def _check_queries(queries: frozenset[Query], *, allowed: frozenset[Query], head: str) -> None:
    if others := queries - allowed:
        raise CapabilityError(
            f"a {head} cannot compute {', '.join(sorted(others))}: request only "
            f"{', '.join(sorted(allowed))}."
        )
