"""What the head answers about one sequence of L tokens, from its logits; entry t speaks of token t, and nothing predicts the first one."""

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import LOGPROB_AT_IDS, HeadOutput


def compute_outputs(
    logits: Tensor, sequence: SequenceBatch, *, requested_outputs: frozenset[HeadOutput]
) -> dict[HeadOutput, Tensor]:
    """Every answer that was asked for, float32.

    Args:
        logits: [L, V], as the model gives them.
        sequence: a batch of exactly one sequence.
        queries: what is asked.
    """
    scaled = (logits.float() / sequence.temperature.float())[
        :-1
    ]  # the last row speaks of a token that is not there
    log_probs = scaled.log_softmax(dim=-1)
    found: dict[HeadOutput, Tensor] = {}
    for head_output in requested_outputs:
        match head_output:
            case HeadOutput.LOGPROB:
                column = log_probs.gather(1, sequence.tokens[1:, None]).squeeze(1)
            case HeadOutput.ENTROPY:
                column = -(log_probs.exp() * log_probs).sum(dim=-1)
            case HeadOutput.LOGSUMEXP_TERMS:
                column = scaled.logsumexp(dim=-1)
            case HeadOutput.LOGPROB_AT:
                column = log_probs.gather(1, sequence.columns[LOGPROB_AT_IDS][1:])
            case _:
                raise AssertionError(
                    f"{head_output} needs a head that this engine does not claim; the base class refuses it"
                )
        found[head_output] = torch.cat([column.new_zeros(1, *column.shape[1:]), column])
    return found
