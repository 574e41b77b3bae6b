"""MoE routers whose losses are weighted by the sequences' trained tokens."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from temper_engine_megatron.bridge_compat.bridge_translation import find_sparse_layers
from temper_engine_megatron.model.latent_experts import add_projections
from temper_engine_megatron.model.micro_batch_layout import LocalMicroBatch
from temper_engine_megatron.model.packed_attention import RouterTokens

LOAD_BALANCING_LOSS, Z_LOSS = "load_balancing_loss", "z_loss"
"""Names of the router losses in metrics, after `router/`."""


class PrescribedChoice:
    """Lets Megatron's top-k function choose the experts that a batch prescribes.

    It has the interface of Megatron's `RouterReplay`. That class keeps its instances and their
    state in process globals.
    """

    def __init__(self, experts: Tensor | None) -> None:
        self.experts = experts
        """Prescribed experts [T, K] int64: -1 where the router chooses; None if it chooses all.

        `get_replay_topk` replaces them by the experts that are used."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices [T, K] of the prescribed experts."""
        _, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.experts = (
            chosen if self.experts is None else torch.where(self.experts >= 0, self.experts, chosen)
        )
        return scores.gather(1, self.experts), self.experts


class SequenceLossRouter(TopKRouter):
    """Megatron's router with additional losses and counts of tokens per expert.

    Megatron scales these losses by token counts per rank or micro-batch. Here they do not
    depend on how a mini-batch is divided into micro-batches and ranks: the loss for a sequence s is
    weighted by its fraction w_s of the trained tokens in the mini-batch.

    Load balancing: sum_s w_s E sum_e f_se P_se, where f_se is the fraction of s's choices that are
    expert e, and P_se its mean probability. Source: Fedus et al. 2022, arXiv:2101.03961, equation
    4, for each sequence as in DeepSeek-AI 2024, arXiv:2412.19437, equation 17. Z-loss: sum_s w_s
    times the mean squared logsumexp of s's router logits. Source: Zoph et al. 2022,
    arXiv:2202.08906, equation 5. Each rank computes the terms for its own tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tokens: RouterTokens | None = None
        """Tokens of the current micro-batch; set before every forward pass."""
        self.losses: dict[str, list[Tensor]] = defaultdict(list)
        """This rank's loss terms by name, one per micro-batch since they were last read.

        Not multiplied by the loss coefficient."""
        self.loads: list[Tensor] = []
        """[E] number of local tokens per expert; one tensor per micro-batch."""
        self.choices: list[Tensor] = []
        """[tokens of this rank, K] chosen experts, one per micro-batch that records them."""
        self.router_replay = PrescribedChoice(None)
        """Chooses the experts of the current micro-batch, and knows them afterwards."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts unless they are prescribed; count them in a training pass."""
        choices = self._get_tokens().choices
        index = find_sparse_layers(self.config).index(self.layer_number - 1)
        # Megatron passes `router_replay` on to the function that chooses the experts.
        self.router_replay = PrescribedChoice(
            None if choices is None else self._flatten(choices[:, :, index])
        )
        self._logits: Tensor | None = logits.view(-1, self.config.num_moe_experts)
        probabilities, routing_map = super().routing(logits, padding_mask=padding_mask)
        # Do not keep the graph of this pass.
        self._logits = None
        if self._get_tokens().records_choices:
            self.choices.append(routing_map.int().topk(self.topk, dim=-1).indices)
        # A recomputed layer runs without gradients at first.
        if self.training and torch.is_grad_enabled():
            is_real = self._flatten(self._get_tokens().is_real)
            self.loads.append((routing_map & is_real[:, None]).sum(0))
        return probabilities, routing_map

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """Add the gradient of the load-balancing loss to the gate weights.

        Replaces Megatron's method, which balances a micro-batch's tokens, weights the loss by token
        counts and logs to a process-wide tracker. Collective over the ranks that have the other
        tokens of the micro-batch.
        """
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if not coefficient:
            return probs
        tokens = self._get_tokens()
        index = self._flatten(tokens.sequence_index)
        # Do not use `routing_map`: for this loss, Megatron chooses experts again, and ignores
        # routing replay, groups of experts and the router's biases.
        experts = self.router_replay.experts
        assert experts is not None, "`routing` chooses them, and then calls this method"
        chosen = torch.zeros_like(routing_map, dtype=torch.float32).scatter_(1, experts, 1.0)
        counts = chosen.new_zeros(len(tokens.lengths), chosen.shape[1]).index_add(0, index, chosen)
        # A sequence may be divided over these ranks.
        dist.all_reduce(counts, group=self.tp_cp_group)
        fractions = counts / (tokens.lengths * self.topk)[:, None]
        # The softmax applies to all routers, also to those that weight experts with sigmoids.
        assert self._logits is not None, "`routing` sets them, and calls this method"
        probabilities = self._logits.float().softmax(-1)
        per_token = (fractions[index] * probabilities).sum(-1)
        loss = chosen.shape[1] * (per_token * self._flatten(tokens.weights)).sum()
        return self._attach_loss(probs, loss, coefficient=coefficient, name=LOAD_BALANCING_LOSS)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Add the gradient of the z-loss to the router logits [T, E]."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        weights = self._flatten(self._get_tokens().weights)
        loss = (logits.float().logsumexp(-1).square() * weights).sum()
        return self._attach_loss(logits, loss, coefficient=coefficient, name=Z_LOSS)

    def _get_tokens(self) -> RouterTokens:
        assert self.tokens is not None, "the layer sets the tokens before every forward pass"
        return self.tokens

    def _flatten(self, column: Tensor) -> Tensor:
        """Flatten a column [R, S, ...] to [S * R, ...], the order of the logits.

        With sequence parallelism, keep only the part of S that this rank has.
        """
        if self.config.sequence_parallel:
            tp = self.tp_group
            column = column.chunk(tp.size(), dim=1)[tp.rank()]
        return column.transpose(0, 1).flatten(0, 1)

    def _attach_loss(
        self, activation: Tensor, loss: Tensor, *, coefficient: float, name: str
    ) -> Tensor:
        self.losses[name].append(loss.detach())
        # Returns the activation as it is; in the backward pass the loss gets gradient 1, or the
        # loss scale, without being part of the objective.
        attached: Tensor = MoEAuxLossAutoScaler.apply(activation, loss * coefficient)
        return attached


class MoETransformerLayer(TransformerLayer):
    """Decoder layer that sets its router's tokens before every forward pass.

    In the layer and not in the model, because activation recomputation runs layers again in the
    backward pass, when another micro-batch may be current.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.expert_width is not None:
            add_projections(self.mlp, config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; same arguments as Megatron's."""
        self.mlp.router.tokens = kwargs["packed_seq_params"].router_tokens
        return super().forward(*args, **kwargs)


def pop_router_losses(layers: list[Any], *, names: tuple[str, ...], num_layers: int) -> Tensor:
    """Return and clear the router losses of layers with experts, in the order of the names.

    The value is the mean over all `num_layers` such layers of the model; the caller sums over
    ranks.
    """
    losses = []
    for name in names:
        terms = [term for layer in layers for term in layer.mlp.router.losses.pop(name, [])]
        # A rank without terms adds zero, because it must take part in the sum over ranks.
        losses.append(torch.stack(terms).sum() / num_layers if terms else torch.zeros(()))
    return torch.stack([loss.float().cpu() for loss in losses])


def pop_loads(layers: list[Any], *, sparse_layers: tuple[int, ...], num_experts: int) -> Tensor:
    """Return and clear the loads [layers with experts, E]; 0 in layers of other ranks."""
    loads = torch.zeros(len(sparse_layers), num_experts)
    for layer in layers:
        router = layer.mlp.router
        if router.loads:
            loads[sparse_layers.index(layer.layer_number - 1)] = (
                torch.stack(router.loads).sum(0).float().cpu()
            )
        router.loads.clear()
    return loads


def pop_choices(
    layers: list[Any],
    local_batches: list[LocalMicroBatch],
    *,
    sparse_layers: tuple[int, ...],
    topk: int,
) -> list[Tensor]:
    """Return and clear the choices [T, layers with experts, K] of each micro-batch.

    They are -1 in layers and for tokens that other ranks have.
    """
    columns = []
    for index, local in enumerate(local_batches):
        shape = (len(local.local_index), len(sparse_layers), topk)
        column = torch.full(shape, -1, dtype=torch.int32, device=local.local_index.device)
        for layer in layers:
            router = layer.mlp.router
            rows = router.choices[index]
            # With sequence parallelism, a router sees one of several equal parts of this rank's
            # tokens.
            is_divided = router.config.sequence_parallel
            position = local.local_index - (router.tp_group.rank() * len(rows) if is_divided else 0)
            has_token = (local.local_index >= 0) & (position >= 0) & (position < len(rows))
            sparse_index = sparse_layers.index(layer.layer_number - 1)
            column[has_token, sparse_index] = rows[position[has_token]].int()
        columns.append(column)
    for layer in layers:
        layer.mlp.router.choices.clear()
    return columns


def keep_float32_biases(chunks: Iterable[Any]) -> None:
    """Convert the biases with which routers choose experts to float32, after a cast of the model.

    Rounded to bf16, a bias could change the order of experts with close scores.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, SequenceLossRouter) and module.expert_bias is not None:
                module.expert_bias.data = module.expert_bias.float()


def discard_router_records(modules: Iterable[Any]) -> None:
    """Drop the router losses and loads of a training call that raised."""
    for module in modules:
        if isinstance(module, SequenceLossRouter):
            module.losses.clear()
            module.loads.clear()
