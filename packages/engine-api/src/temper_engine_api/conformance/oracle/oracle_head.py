"""Head outputs of the oracle for one sequence, computed directly from their definitions.

In shapes, L is the sequence length in tokens, V the vocabulary size, and K the additional token ids
per position.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import LOGPROB_AT_IDS, HeadOutput, HeadOutputs

SCALAR_OUTPUTS = frozenset({HeadOutput.VALUE, HeadOutput.SCORE})
"""Outputs of a value or reward head; all others come from the language-model head."""


def compute_sequence_outputs(
    model: nn.Module, sequence: SequenceBatch, *, requested_outputs: frozenset[HeadOutput]
) -> dict[HeadOutput, Tensor]:
    """Compute the head outputs of a batch with exactly one sequence.

    Entry 0 of a per-token output is 0, because no position predicts the first token.
    """
    head_outputs: dict[HeadOutput, Tensor] = {}
    if requested_outputs & SCALAR_OUTPUTS:
        scores = _compute_scores(model, sequence)
        # A token's value is computed at the previous position, like the logits that predict it.
        head_outputs[HeadOutput.VALUE] = _shift_to_labels(scores[:-1])
        head_outputs[HeadOutput.SCORE] = scores[-1:]
    if requested_outputs - SCALAR_OUTPUTS:
        logits = _compute_logits(model, sequence) / sequence.temperature.float()
        head_outputs |= _language_outputs(
            logits, sequence, with_ids=HeadOutput.LOGPROB_AT in requested_outputs
        )
    return {head_output: head_outputs[head_output] for head_output in requested_outputs}


def join_outputs(parts: Sequence[dict[HeadOutput, Tensor]], *, mask: Tensor | None) -> HeadOutputs:
    """Concatenate the outputs of sequences; per-token entries outside `mask` [T] become 0."""
    columns = {
        head_output: torch.cat([part[head_output] for part in parts]) for head_output in parts[0]
    }
    if mask is not None:
        for head_output in columns.keys() - {HeadOutput.SCORE}:
            column = columns[head_output]
            # A product would keep a NaN at an untrained position, so use `where`.
            columns[head_output] = torch.where(
                mask if column.ndim == 1 else mask[:, None], column, 0.0
            )
    return HeadOutputs(columns=columns)


def _language_outputs(
    logits: Tensor, sequence: SequenceBatch, *, with_ids: bool
) -> dict[HeadOutput, Tensor]:
    """Compute outputs from logits [L, V] divided by the temperature; row t - 1 predicts token t."""
    # The last position predicts a token after the sequence, which has no label.
    log_distribution = torch.log_softmax(logits, dim=-1)[:-1]
    entropy = -(log_distribution.exp() * log_distribution).sum(-1)
    head_outputs = {
        HeadOutput.LOGPROB: _shift_to_labels(
            log_distribution.gather(1, sequence.tokens[1:, None])[:, 0]
        ),
        HeadOutput.ENTROPY: _shift_to_labels(entropy),
        HeadOutput.LOGSUMEXP: _shift_to_labels(torch.logsumexp(logits, dim=-1)[:-1]),
    }
    if with_ids:
        ids = sequence.columns[LOGPROB_AT_IDS]
        head_outputs[HeadOutput.LOGPROB_AT] = _shift_to_labels(log_distribution.gather(1, ids[1:]))
    return head_outputs


def _shift_to_labels(column: Tensor) -> Tensor:
    """Turn [L - 1, ...] for tokens 1 to L - 1 into [L, ...] with a 0 in front."""
    return torch.cat([column.new_zeros(1, *column.shape[1:]), column])


def _compute_logits(model: nn.Module, sequence: SequenceBatch) -> Tensor:
    """Return [L, V] in float32."""
    logits: Tensor = model(**_build_inputs(sequence)).logits[0].float()
    return logits


def _compute_scores(model: nn.Module, sequence: SequenceBatch) -> Tensor:
    """Return the output of the score head at each token, [L] in float32.

    The head is called directly to skip the dropout of transformers' classification model.
    """
    backbone: nn.Module = model.get_submodule("model")
    hidden = backbone(**_build_inputs(sequence)).last_hidden_state
    scores: Tensor = model.get_submodule("score")(hidden)[0, :, 0].float()
    return scores


def _build_inputs(sequence: SequenceBatch) -> dict[str, Tensor | bool]:
    """Build the model's arguments.

    Without a mask, transformers guesses packed sequences from jumps in the position ids.
    """
    return {
        "input_ids": sequence.tokens[None],
        "position_ids": sequence.get_position_ids()[None],
        "attention_mask": torch.ones_like(sequence.tokens)[None],
        "use_cache": False,
    }
