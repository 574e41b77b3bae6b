"""The router of a mixture of experts, whose own losses count as much as their micro-batch does in the mini-batch."""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

LOAD_BALANCING_LOSS, Z_LOSS = "load_balancing_loss", "z_loss"
"""What a router's losses are called in metrics, after ``router/``."""


class WeightedLossRouter(TopKRouter):
    """Megatron's, but for the weights of its own losses: they neither count the tokens of ranks nor those of micro-batches.

    Balance: E sum_e f_e P_e over the T tokens of a micro-batch, f_e the share of choices that fell on expert e, P_e its mean probability; 1
    where experts are balanced. Source: Fedus et al. 2022, arXiv:2101.03961, equation 4. Z-loss: the mean over tokens of the squared
    logsumexp of their logits. Source: Zoph et al. 2022, arXiv:2202.08906, equation 5. Each rank has the parts of its own tokens.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.share = 0.0
        """Of the micro-batch that is passing in the trained tokens of the mini-batch."""
        self.weighted: dict[str, list[Tensor]] = defaultdict(list)
        """This rank's part of each loss for each micro-batch since the last call, without its coefficient, times its share."""

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """Add the loss's gradient to what passes; Megatron would log it for the whole process, and weigh it by counts of tokens."""
        return self._attach(
            activation,
            aux_loss / aux_loss_coeff,
            coefficient=aux_loss_coeff,
            name=LOAD_BALANCING_LOSS,
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Add the z-loss's gradient to what passes; collective over ranks that have other tokens of the micro-batch.

        Args:
            logits: [T, E] of this rank's tokens.
            padding_mask: [T] bool, there whenever a router has a loss.
        """
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        assert padding_mask is not None, (
            "the model tells its layers where there is a loss of routers"
        )
        is_real = ~padding_mask
        count = is_real.sum()
        dist.all_reduce(count, group=self.tp_cp_group)
        loss = (logits.float().logsumexp(-1).square() * is_real).sum() / count
        return self._attach(logits, loss, coefficient=coefficient, name=Z_LOSS)

    def _attach(self, activation: Tensor, loss: Tensor, *, coefficient: float, name: str) -> Tensor:
        self.weighted[name].append((loss * self.share).detach())
        attached: Tensor = MoEAuxLossAutoScaler.apply(activation, loss * (coefficient * self.share))
        return attached


class MoETransformerLayer(TransformerLayer):
    """A decoder layer that tells its router which micro-batch is passing, also where it is passing for the second time."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As Megatron's."""
        self.mlp.router.share = keywords["packed_seq_params"].share
        return super().forward(*arguments, **keywords)


def pop_router_losses(layers: list[Any], *, names: tuple[str, ...], num_layers: int) -> Tensor:
    """By name, the mean over all layers of the model of what these have seen since the last call; a sum over ranks is still to be made."""
    found = []
    for name in names:
        parts = [part for layer in layers for part in layer.mlp.router.weighted.pop(name, [])]
        found.append(torch.stack(parts).sum() / num_layers if parts else torch.zeros(()))
    return torch.stack([each.float().cpu() for each in found])
