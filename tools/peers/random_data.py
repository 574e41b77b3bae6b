"""Random data on which functions of other projects are compared with ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Random input of one seed: rows of different length with holes, one of them empty."""

    logprobs: Tensor
    """[B, L] with gradient."""
    old: Tensor
    rollout: Tensor
    ref: Tensor
    advantages: Tensor
    values: Tensor
    mask: Tensor
    """[B, L] float32."""
    rewards: Tensor
    """[B]"""
    groups: tuple[int, ...]

    @property
    def token_rewards(self) -> Tensor:
        """[B, L] with the rewards at each row's last trained token."""
        column = torch.zeros_like(self.mask)
        for row, mask in enumerate(self.mask):
            if mask.any():
                column[row, int(mask.nonzero().max())] = self.rewards[row]
        return column


def make_data(seed: int, *, num_rows: int = 8, length: int = 12) -> Data:
    """Return random data; ratios are between about e^-1.5 and e^1.5."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0) -> Tensor:
        return torch.randn(num_rows, length, generator=generator) * scale

    old = -draw().abs()
    lengths = torch.randint(1, length + 1, (num_rows,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]) & (draw() > -1.5)
    mask[:, 0] = True
    mask[-1] = False
    return Data(
        logprobs=(old + draw(0.5)).requires_grad_(),
        old=old,
        rollout=old + draw(0.3),
        ref=old + draw(0.3),
        advantages=draw(),
        values=draw(),
        mask=mask.float(),
        rewards=torch.randint(0, 5, (num_rows,), generator=generator).float(),
        groups=tuple(i // 4 for i in range(num_rows)),
    )


def make_kinds(seed: int) -> tuple[Data, Data, Data]:
    """Return random data as it is, rounded to bf16, and with one trained token per row."""
    data = make_data(seed)
    names = ("logprobs", "old", "rollout", "ref", "advantages", "values")
    rounded = {name: getattr(data, name).detach().bfloat16().float() for name in names}
    first_only = torch.zeros_like(data.mask)
    first_only[:-1, 0] = 1  # the last row stays empty
    return (
        data,
        replace(data, **rounded | {"logprobs": rounded["logprobs"].requires_grad_()}),
        replace(data, mask=first_only),
    )


def stretch_ratios(data: Data) -> Data:
    """Return data with log-probs 50 times as large, and so log-ratios between about -81 and 66.

    Gradients are taken with respect to the data's own log-probs, and so are 50 times as large.
    """
    return replace(data, logprobs=50 * data.logprobs, old=50 * data.old)


Pair = tuple[Tensor, Tensor]
"""Our result and that of the other project; it may have a gradient."""

Row = tuple[str, str, str, Callable[[Any, Data], Pair]]
"""Project, module, name and function of a comparison."""
