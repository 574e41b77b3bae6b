"""A head's product, row by row the same bits."""

import torch.nn.functional as functional
from torch import Tensor

MIN_ROWS = 16
"""Below this, kernels for a few rows add up in another order (seen on CPUs below 4 rows)."""


def batch_invariant_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden @ weight.T`` in which a row does not depend on how many others are asked beside it.

    Evaluation answers more positions of a micro-batch than training does; where a rank has only a few of them, the plain product would give
    the same position two log-probs, and an on-policy ratio that is not exactly 1.

    Args:
        hidden: [N, D].
        weight: [V, D] in the same dtype.

    Returns:
        [N, V] in that dtype.
    """
    size = hidden.shape[0]
    if size >= MIN_ROWS:
        return hidden @ weight.t()
    return (functional.pad(hidden, (0, 0, 0, MIN_ROWS - size)) @ weight.t())[:size]
