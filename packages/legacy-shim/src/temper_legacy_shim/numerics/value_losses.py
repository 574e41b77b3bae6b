"""The old value loss."""

import torch
from torch import Tensor

from temper_legacy_shim.numerics.masked import aggregate, masked_mean


def value_loss(
    values: Tensor, *, returns: Tensor, old_values: Tensor, mask: Tensor, cliprange: float, agg_mode: str
) -> tuple[Tensor, dict[str, float]]:
    """Half the larger of the squared errors of the value and of the value held near the old one, and its metrics; all [B, W]."""
    near = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    plain, held = (values - returns).square(), (near - returns).square()
    loss = 0.5 * aggregate(torch.maximum(plain, held), mask, agg_mode)
    return loss, {
        "critic/vf_clipfrac": float(masked_mean((held > plain).float(), mask)),
        "critic/vpred_mean": float(masked_mean(values.detach(), mask)),
    }
