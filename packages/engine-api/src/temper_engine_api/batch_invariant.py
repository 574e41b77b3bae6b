"""Batch-invariant linear layer for model heads."""

import torch.nn.functional as functional
from torch import Tensor

MIN_ROWS = 16
"""Pad to this many rows: kernels for few rows sum in another order (seen on CPUs below 4 rows)."""


def batch_invariant_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute `hidden @ weight.T` so that a row has the same bits for any number of rows.

    Evaluation computes more positions of a micro-batch than training does. If a rank has only a
    few, the plain product can give a position two different log-probs, and then the on-policy
    ratio is not exactly 1.

    Args:
        hidden: [N, D].
        weight: [V, D] in the same dtype.

    Returns:
        [N, V] in the same dtype.
    """
    size = hidden.shape[0]
    if size >= MIN_ROWS:
        return hidden @ weight.t()
    return (functional.pad(hidden, (0, 0, 0, MIN_ROWS - size)) @ weight.t())[:size]
