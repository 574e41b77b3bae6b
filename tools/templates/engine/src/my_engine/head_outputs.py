"""Compute the outputs of a language-model head for one sequence of L tokens.

Entry t of an output belongs to token t. The first entry is 0, because no token precedes the first
one and so nothing predicts it.
"""

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import LOGPROB_AT_IDS, HeadOutput


def compute_outputs(
    logits: Tensor, sequence: SequenceBatch, *, requested_outputs: frozenset[HeadOutput]
) -> dict[HeadOutput, Tensor]:
    """Compute the requested outputs from logits, in float32.

    Args:
        logits: [L, V], before temperature.
        sequence: A batch of exactly one sequence.
        requested_outputs: Outputs to compute.

    Returns:
        A tensor of shape [L], or [L, K] for `LOGPROB_AT`, for each requested output.
    """
    # The last row predicts a token that the sequence does not have.
    scaled = (logits.float() / sequence.temperature.float())[:-1]
    log_probs = scaled.log_softmax(dim=-1)
    columns: dict[HeadOutput, Tensor] = {}
    for head_output in requested_outputs:
        match head_output:
            case HeadOutput.LOGPROB:
                column = log_probs.gather(1, sequence.tokens[1:, None]).squeeze(1)
            case HeadOutput.ENTROPY:
                column = -(log_probs.exp() * log_probs).sum(dim=-1)
            case HeadOutput.LOGSUMEXP:
                column = scaled.logsumexp(dim=-1)
            case HeadOutput.LOGPROB_AT:
                column = log_probs.gather(1, sequence.columns[LOGPROB_AT_IDS][1:])
            case _:
                raise AssertionError(
                    f"{head_output} is not supported by this engine, and its base class refuses it"
                )
        columns[head_output] = torch.cat([column.new_zeros(1, *column.shape[1:]), column])
    return columns
