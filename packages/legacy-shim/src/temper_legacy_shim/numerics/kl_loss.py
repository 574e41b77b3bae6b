"""The old estimators of the KL to the reference, by their old names."""

import torch
from torch import Tensor

from temper_engine_api.errors import ConfigError


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, *, kind: str) -> Tensor:
    """[B, W] estimate of KL(policy, reference) at each token.

    With d = log ref - log policy: kl (k1) is -d, abs is |d|, mse (k2) is d^2 / 2, low_var_kl (k3) is exp(d) - 1 - d with d held to
    [-20, 20] and the result to [-10, 10], where its gradient ends.

    Raises:
        NotImplementedError: a name that ends in +, as the old release did.
        ConfigError: another name.
    """
    if kind.endswith("+"):
        raise NotImplementedError(f"kl_loss_type {kind!r} never worked in the release that these numerics follow: use {kind[:-1]!r}.")
    if kind in ("kl", "k1"):
        return logprobs - ref_logprobs
    if kind == "abs":
        return (logprobs - ref_logprobs).abs()
    if kind in ("mse", "k2"):
        return 0.5 * (logprobs - ref_logprobs).square()
    if kind in ("low_var_kl", "k3"):
        difference = torch.clamp(ref_logprobs - logprobs, min=-20, max=20)
        return torch.clamp(difference.exp() - difference - 1, min=-10, max=10)
    raise ConfigError(f"kl_loss_type is {kind!r}, but must be kl, abs, mse or low_var_kl (k1, k2 and k3 mean the first, third and last).")
