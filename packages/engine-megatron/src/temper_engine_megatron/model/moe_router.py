"""Routers of mixtures of experts, whose losses are weighted by the micro-batch's trained tokens."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

LOAD_BALANCING_LOSS, Z_LOSS = "load_balancing_loss", "z_loss"
"""Names of the router losses in metrics, after `router/`."""


class WeightedLossRouter(TopKRouter):
    """Megatron's router with other weights of its own losses.

    Megatron scales these losses by numbers of tokens of a rank or a micro-batch. Here the loss of a
    micro-batch is weighted by its fraction of the trained tokens in the mini-batch.

    Load balancing: E sum_e f_e P_e over the T tokens of a micro-batch, where f_e is the fraction of
    choices of expert e and P_e its mean probability; 1 if experts are balanced. Source: Fedus et
    al. 2022, arXiv:2101.03961, equation 4. Z-loss: mean over tokens of the squared logsumexp of the
    router logits. Source: Zoph et al. 2022, arXiv:2202.08906, equation 5. Each rank computes the
    terms of its own tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.token_fraction = 0.0
        """Trained tokens of the current micro-batch divided by those of the mini-batch."""
        self.weighted_losses: dict[str, list[Tensor]] = defaultdict(list)
        """This rank's loss terms by name, one per micro-batch since they were last read.

        Multiplied by the token fraction, but not by the loss coefficient."""

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """Add the gradient of the load-balancing loss to an activation.

        Replaces Megatron's method, which logs to a tracker of the full process and weights the loss
        by token counts.
        """
        return self._attach(
            activation,
            # Megatron passes the loss times its coefficient; metrics are reported without it.
            aux_loss / aux_loss_coeff,
            coefficient=aux_loss_coeff,
            name=LOAD_BALANCING_LOSS,
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Add the gradient of the z-loss to the router logits.

        Collective over the ranks with other tokens of the micro-batch.

        Args:
            logits: [T, E] of this rank's tokens.
            padding_mask: [T] bool; always given if a router loss is on.
        """
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        assert padding_mask is not None, "the model passes a padding mask if a router loss is on"
        is_real = ~padding_mask
        count = is_real.sum()
        # The count is summed over ranks and the squares are not: each rank adds the terms of its
        # own tokens to a mean over all of them.
        dist.all_reduce(count, group=self.tp_cp_group)
        loss = (logits.float().logsumexp(-1).square() * is_real).sum() / count
        return self._attach(logits, loss, coefficient=coefficient, name=Z_LOSS)

    def _attach(self, activation: Tensor, loss: Tensor, *, coefficient: float, name: str) -> Tensor:
        self.weighted_losses[name].append((loss * self.token_fraction).detach())
        # Returns the activation as it is; in the backward pass the loss gets a gradient of 1, or of
        # the loss scale, without being part of the objective.
        attached: Tensor = MoEAuxLossAutoScaler.apply(
            activation, loss * (coefficient * self.token_fraction)
        )
        return attached


class MoETransformerLayer(TransformerLayer):
    """Decoder layer that sets its router's token fraction before every forward pass.

    In the layer and not in the model, because activation recomputation runs layers again in the
    backward pass, when another micro-batch may be current.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; same arguments as Megatron's."""
        self.mlp.router.token_fraction = kwargs["packed_seq_params"].token_fraction
        return super().forward(*args, **kwargs)


def pop_router_losses(layers: list[Any], *, names: tuple[str, ...], num_layers: int) -> Tensor:
    """Return and clear the router losses of these layers, in the order of the names.

    The value is the mean over all `num_layers` layers of the model; the caller sums over ranks.
    """
    losses = []
    for name in names:
        terms = [
            term for layer in layers for term in layer.mlp.router.weighted_losses.pop(name, [])
        ]
        # A rank without terms adds zero, because it must take part in the sum over ranks.
        losses.append(torch.stack(terms).sum() / num_layers if terms else torch.zeros(()))
    return torch.stack([loss.float().cpu() for loss in losses])


def discard_router_losses(modules: Iterable[Any]) -> None:
    """Drop the router losses of a training call that raised."""
    for module in modules:
        if isinstance(module, WeightedLossRouter):
            module.weighted_losses.clear()
