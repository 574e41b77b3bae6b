"""What a head answers from hidden states: a language head through the fused log-prob, a scalar head for values and scores.

The answer about token t is read at the hidden state of token t - 1, so the first position of a sequence holds 0.
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
"""The projection of a head as it is now: an adapter may hold a trained copy of it, and be disabled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """What is asked about one micro-batch; made on the host, so that nothing has to be read back from a device."""

    queries: frozenset[Query]
    """The columns wanted."""
    with_gradient: frozenset[Query]
    """Those that a loss differentiates."""
    positions: Tensor
    """[N] int64 positions whose answer this rank gives; never the first of a sequence."""
    score_sequences: Tensor
    """[M] int64 sequences whose score this rank gives."""
    first_position: int
    """Position in the pack of the first hidden state that this rank has."""
    is_unit_temperature: bool
    """Whether every temperature is 1, so that no logit has to be divided."""


def build_head_request(
    batch: SequenceBatch,
    *,
    queries: Collection[Query],
    with_gradient: Collection[Query],
    trained_only: bool,
    device: torch.device,
    bounds: tuple[int, int] | None = None,
) -> HeadRequest:
    """Ask about the trained positions of a micro-batch on the CPU, or about all that have a predecessor.

    Args:
        batch: the micro-batch.
        queries: the columns wanted.
        with_gradient: those that a loss differentiates.
        trained_only: about the trained positions.
        device: of the model.
        bounds: first hidden state of the pack that this rank has, and the first after it; None where it has all.
    """
    is_needed = batch.loss_mask
    if not trained_only:
        is_needed = torch.ones_like(batch.loss_mask)
        is_needed[batch.sequence_starts[:-1].long()] = False
    first, end = (0, batch.num_tokens) if bounds is None else bounds
    positions, last = torch.nonzero(is_needed)[:, 0], batch.sequence_starts[1:].long() - 1
    if bounds is not None:
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
    """Turns hidden states into answers."""

    def __call__(
        self, hidden: Tensor, batch: SequenceBatch, request: HeadRequest
    ) -> Mapping[Query, Tensor]:
        """Answers by query from hidden states [T, D] of the compute dtype."""


class LanguageHead:
    """Answers of a language model's output projection."""

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
    """Answers of a projection to one number, computed in float32."""

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
    """[size, ...] zeros with the column's rows at their positions, with gradient."""
    return column.new_zeros(size, *column.shape[1:]).index_copy(0, at, column)


def _requested_ids(batch: SequenceBatch) -> Tensor:
    if LOGPROB_AT_IDS not in batch.columns:
        raise BatchError(
            f"logprob_at was asked, but the batch has no column {LOGPROB_AT_IDS!r}: add [T, K] "
            "token ids."
        )
    return batch.columns[LOGPROB_AT_IDS]


def _check_queries(queries: frozenset[Query], *, allowed: frozenset[Query], head: str) -> None:
    if others := queries - allowed:
        raise CapabilityError(
            f"a {head} can't answer {', '.join(sorted(others))}; it answers "
            f"{', '.join(sorted(allowed))}."
        )
