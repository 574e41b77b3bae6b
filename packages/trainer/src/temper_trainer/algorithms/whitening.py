"""Shift and scale over the trained tokens of a step."""

import torch
from torch import Tensor

EPSILON = 1e-8
"""Added to the deviation, so that equal values become 0."""


def whiten(column: Tensor, *, mask: Tensor) -> Tensor:
    """The column with mean 0 and deviation 1 over the masked entries.

    A'_t = (A_t - mean(A)) / (std(A) + 1e-8); std divides by the number of entries, not by one less.

    Args:
        column: [T]; entries outside the mask are ignored, whatever they hold.
        mask: [T] bool.

    Returns:
        [T] float64, 0 outside the mask.
    """
    kept = column.double()[mask]
    if kept.numel() == 0:
        return torch.zeros_like(column, dtype=torch.float64)
    scaled = (kept - kept.mean()) / (kept.std(correction=0) + EPSILON)
    return torch.zeros_like(column, dtype=torch.float64).masked_scatter(mask, scaled)
