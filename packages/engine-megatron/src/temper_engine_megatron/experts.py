"""The router of a mixture of experts, with a load-balancing loss that counts as much as its micro-batch does in the mini-batch."""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class SharingRouter(TopKRouter):
    """Megatron's, but for the weight of its load-balancing loss: it neither counts the tokens of ranks nor those of micro-batches.

    E sum_e f_e P_e over the T tokens of a micro-batch, f_e the share of choices that fell on expert e, P_e its mean probability; 1 where
    experts are balanced. Each rank has the part of its own tokens. Source: Fedus et al. 2022, arXiv:2101.03961, equation 4.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.share = 0.0
        """Of the micro-batch that is passing in the trained tokens of the mini-batch."""
        self.weighted: list[Tensor] = []
        """This rank's part of the loss of each micro-batch since the last call, without its coefficient, times its share."""

    def attach_and_log_load_balancing_loss(self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Add the loss's gradient to what passes; Megatron would log it for the whole process, and weigh it by counts of tokens."""
        self.weighted.append((aux_loss / aux_loss_coeff * self.share).detach())
        attached: Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss * self.share)
        return attached


class RoutedLayer(TransformerLayer):
    """A decoder layer that tells its router which micro-batch is passing, also where it is passing for the second time."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As Megatron's."""
        self.mlp.router.share = keywords["packed_seq_params"].share
        return super().forward(*arguments, **keywords)


def take_balance(layers: list[Any], *, num_layers: int) -> Tensor:
    """Mean over all layers of the model of what these have seen since the last call; a sum over ranks is still to be made."""
    found = [part for layer in layers for part in layer.mlp.router.weighted]
    for layer in layers:
        layer.mlp.router.weighted = []
    return torch.stack(found).sum() / num_layers if found else torch.zeros(())
