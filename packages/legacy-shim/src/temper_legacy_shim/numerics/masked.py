"""Sums and means under a mask, and the four old ways to make one loss of them.

Every denominator is counted in the tensor at hand, which is one micro-batch: that is why the old loss depends on the split.
"""

import torch
from torch import Tensor

from temper_engine_api.errors import ConfigError

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
EPSILON = 1e-8
"""Added to the count of a masked mean, but not to the count that divides a loss."""


def masked_sum(values: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Sum of the entries where the mask is not 0; what the others hold, NaN included, never leaks."""
    kept = torch.where(mask.bool(), values, 0.0) * mask
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Mean of the entries where the mask is not 0; 0 where there is none."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim=dim) / (count + EPSILON)


def aggregate(loss: Tensor, mask: Tensor, mode: str) -> Tensor:
    """One number from a loss per token.

    Args:
        loss: [B, W].
        mask: [B, W] of 0 and 1.
        mode: token-mean divides by the tokens, the others by the rows that have any; seq-mean-token-mean takes each row's mean before,
            and seq-mean-token-sum-norm divides the mean over rows by the padded width W.

    Returns:
        []; NaN with a gradient of zero where nothing is counted.
    """
    if mode == "token-mean":
        return masked_sum(loss, mask) / mask.sum()
    if mode not in AGGREGATIONS:
        raise ConfigError(f"loss_agg_mode is {mode!r}, but must be one of {', '.join(AGGREGATIONS)}.")
    rows = (torch.where(mask.bool(), loss, 0.0) * mask).sum(-1)
    if mode == "seq-mean-token-mean":
        rows = rows / (mask.sum(-1) + EPSILON)
    is_trained = (mask.sum(-1) > 0).float()
    total = masked_sum(rows, is_trained) / is_trained.sum()
    return total / mask.shape[-1] if mode == "seq-mean-token-sum-norm" else total
