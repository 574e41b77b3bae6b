"""Masked sums, and the old KL, value and aggregation formulas."""

import torch
from torch import Tensor

from temper_engine_api.errors import ConfigError

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
OLD_KL_CLAMP = 10.0
"""Bound on the k3 of a token, in every release."""
EPSILON = 1e-8
"""Added to the count of a masked mean, but not to the count that divides a loss."""


def masked_sum(values: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Sum the entries where the mask is not 0; masked NaN has no effect."""
    # Multiplying alone would keep NaN, because NaN * 0 is NaN.
    kept = torch.where(mask.bool(), values, 0.0) * mask
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Compute the mean of entries with a nonzero mask; 0 if all are masked."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim=dim) / (count + EPSILON)


def aggregate(loss: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Return one number from a loss per token.

    Args:
        loss: [B, W].
        mask: [B, W] of 0 and 1.
        mode: token-mean divides by the tokens, the others by the rows that have any;
            seq-mean-token-mean takes each row's mean before, and seq-mean-token-sum-norm divides
            the mean over rows by the padded width W.

    Returns:
        []; NaN with zero gradient if all entries are masked.
    """
    if mode == "token-mean":
        # The old release has no epsilon here, so that a batch without trained tokens gives NaN.
        return masked_sum(loss, mask) / mask.sum()
    if mode not in AGGREGATIONS:
        raise ConfigError(
            f"loss_agg_mode is {mode!r}, but must be one of {', '.join(AGGREGATIONS)}."
        )
    rows = (torch.where(mask.bool(), loss, 0.0) * mask).sum(-1)
    if mode == "seq-mean-token-mean":
        rows = rows / (mask.sum(-1) + EPSILON)
    is_trained = (mask.sum(-1) > 0).float()
    total = masked_sum(rows, is_trained) / is_trained.sum()
    return total / mask.shape[-1] if mode == "seq-mean-token-sum-norm" else total


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, *, kind: str) -> Tensor:
    """Return [B, W] estimate of KL(policy, reference) at each token.

    With d = log ref - log policy: kl (k1) is -d, abs is |d|, mse (k2) is d^2 / 2, low_var_kl (k3)
    is exp(d) - 1 - d with d held to [-20, 20] and the result to [-10, 10], where its gradient ends.

    Raises:
        NotImplementedError: a name that ends in +, as the old release did.
        ConfigError: another name.
    """
    if kind.endswith("+"):
        raise NotImplementedError(
            f"kl_loss_type {kind!r} never worked in the release that these numerics follow: use "
            f"{kind[:-1]!r}."
        )
    if kind in ("kl", "k1"):
        return logprobs - ref_logprobs
    if kind == "abs":
        return (logprobs - ref_logprobs).abs()
    if kind in ("mse", "k2"):
        return 0.5 * (logprobs - ref_logprobs).square()
    if kind in ("low_var_kl", "k3"):
        difference = torch.clamp(ref_logprobs - logprobs, min=-20, max=20)
        return torch.clamp(difference.exp() - difference - 1, min=-OLD_KL_CLAMP, max=OLD_KL_CLAMP)
    raise ConfigError(
        f"kl_loss_type is {kind!r}, but must be kl, abs, mse or low_var_kl (k1, k2 and k3 mean the "
        "first, third and last)."
    )


def value_loss(
    values: Tensor,
    *,
    returns: Tensor,
    old_values: Tensor,
    mask: Tensor,
    cliprange: float,
    agg_mode: str,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the clipped value loss and its metrics from values [B, W].

    The loss is half the larger squared error of the value and of the value clipped to the old one.
    """
    near = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    plain, bounded = (values - returns).square(), (near - returns).square()
    loss = 0.5 * aggregate(torch.maximum(plain, bounded), mask, agg_mode)
    return loss, {
        "critic/vf_clipfrac": float(masked_mean((bounded > plain).float(), mask)),
        "critic/vpred_mean": float(masked_mean(values.detach(), mask)),
    }
