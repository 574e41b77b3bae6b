"""What the oracle's head answers for one sequence, straight from the definitions, and how the answers of several are joined.

L tokens of one sequence, V vocabulary, K given ids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import LOGPROB_AT_IDS, Answers, Query

HEAD_QUERIES = frozenset({Query.VALUE, Query.SCORE})
"""Answered by a value or reward head; all others by the language-model head."""


def answers_of_sequence(
    model: nn.Module, sequence: SequenceBatch, *, queries: frozenset[Query]
) -> dict[Query, Tensor]:
    """Answers for a batch of exactly one sequence; entry 0 of a per-token answer is 0, because nothing predicts the first token."""
    answers: dict[Query, Tensor] = {}
    if queries & HEAD_QUERIES:
        scores = _scores(model, sequence)
        answers[Query.VALUE] = _shifted(scores[:-1])
        answers[Query.SCORE] = scores[-1:]
    if queries - HEAD_QUERIES:
        logits = _logits(model, sequence) / sequence.temperature.float()
        answers |= _language_answers(logits, sequence, with_ids=Query.LOGPROB_AT in queries)
    return {query: answers[query] for query in queries}


def join_answers(parts: Sequence[dict[Query, Tensor]], *, mask: Tensor | None) -> Answers:
    """Answers of sequences laid end to end; per-token entries outside the mask [T], if there is one, become 0 without gradient."""
    columns = {query: torch.cat([part[query] for part in parts]) for query in parts[0]}
    if mask is not None:
        for query in columns.keys() - {Query.SCORE}:
            column = columns[query]
            columns[query] = torch.where(mask if column.ndim == 1 else mask[:, None], column, 0.0)
    return Answers(columns=columns)


def _language_answers(
    logits: Tensor, sequence: SequenceBatch, *, with_ids: bool
) -> dict[Query, Tensor]:
    """From tempered logits [L, V]: row t - 1 speaks of token t."""
    log_distribution = torch.log_softmax(logits, dim=-1)[:-1]
    entropy = -(log_distribution.exp() * log_distribution).sum(-1)
    answers = {
        Query.LOGPROB: _shifted(log_distribution.gather(1, sequence.tokens[1:, None])[:, 0]),
        Query.ENTROPY: _shifted(entropy),
        Query.LOGSUMEXP_TERMS: _shifted(torch.logsumexp(logits, dim=-1)[:-1]),
    }
    if with_ids:
        ids = sequence.columns[LOGPROB_AT_IDS]
        answers[Query.LOGPROB_AT] = _shifted(log_distribution.gather(1, ids[1:]))
    return answers


def _shifted(column: Tensor) -> Tensor:
    """[L - 1, ...] about tokens 1 to L - 1 as [L, ...] with a 0 in front."""
    return torch.cat([column.new_zeros(1, *column.shape[1:]), column])


def _logits(model: nn.Module, sequence: SequenceBatch) -> Tensor:
    """[L, V] float32."""
    logits: Tensor = model(**_inputs(sequence)).logits[0].float()
    return logits


def _scores(model: nn.Module, sequence: SequenceBatch) -> Tensor:
    """[L] float32: the head's number after each token; its dropout is not ours and is passed by."""
    backbone: nn.Module = model.get_submodule("model")
    hidden = backbone(**_inputs(sequence)).last_hidden_state
    scores: Tensor = model.get_submodule("score")(hidden)[0, :, 0].float()
    return scores


def _inputs(sequence: SequenceBatch) -> dict[str, Tensor | bool]:
    """The mask is given because transformers, left without one, takes position ids that jump for a pack of several sequences."""
    return {
        "input_ids": sequence.tokens[None],
        "position_ids": sequence.positions()[None],
        "attention_mask": torch.ones_like(sequence.tokens)[None],
        "use_cache": False,
    }
