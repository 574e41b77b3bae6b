"""MoE routers: loads of the experts, losses that balance them, and replay.

Routers of transformers return (logits [T, E], gate weights [T, K], chosen experts [T, K]). Their
forward is wrapped in place. The losses are attached to the gate weights: the forward pass is
unchanged, and the backward pass adds the loss gradient. That also works in a layer that is
recomputed, and needs no path from the layer to the objective.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

from temper_engine_api.batch import SequenceBatch, copy_to_device
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.metrics import Metric, compute_load_metrics
from temper_engine_fsdp.model.routing_replay import ReplayedChoice, take_choices
from temper_engine_fsdp.model.sequence_parallel import SequenceGroup

RouterOutput = tuple[Tensor, Tensor, Tensor]
"""Logits [T, E], gate weights [T, K] and chosen experts [T, K] of a router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLosses:
    """Coefficients of the router losses; see FSDPConfig."""

    load_balancing: float = 0.0
    z: float = 0.0

    @property
    def is_on(self) -> bool:
        """True if a coefficient is not 0."""
        return bool(self.load_balancing or self.z)


@dataclass(slots=True, kw_only=True)
class _MicroBatch:
    """Tokens of this rank in the current micro-batch."""

    sequence_index: Tensor
    """[S] int64, sequence index per token; padding is one more sequence."""
    lengths: Tensor
    """[B + 1] float32, tokens per sequence, summed across ranks."""
    token_weights: Tensor
    """[S] float32, weight per token in the losses; see `ExpertRouters`."""
    is_real: Tensor
    """[S] bool, False for dummies and padding."""
    gradient_factor: float | None
    """Gradient factor for all losses; None in a pass that does not train."""
    choices: Tensor | None
    """[layers, S, K] experts of each token, see `routing_replay`; None leaves them to routers."""
    recorded: dict[int, Tensor] | None
    """[S, K] choices of each router that has run; None if they are not recorded."""
    finished: set[int] = field(default_factory=set)
    """Routers that have run; a recomputed layer runs its router again."""


class ExpertRouters:
    """A model's routers.

    The losses do not depend on how a mini-batch is divided into micro-batches and ranks. Those of a
    sequence s are weighted by its fraction w_s of the trained tokens in the mini-batch:

    Load balancing: sum_s w_s E sum_e f_se P_se, where f_se is the fraction of s's choices that are
    expert e, and P_se the mean softmax of the router logits over its tokens. Source: Fedus et al.
    2022, arXiv:2101.03961, equation 4, for each sequence as in DeepSeek-AI 2024, arXiv:2412.19437,
    equation 17. Z-loss: sum_s w_s times the mean squared logsumexp of s's router logits. Source:
    Zoph et al. 2022, arXiv:2202.08906, equation 5. Losses of all layers are added.
    """

    def __init__(
        self,
        routers: list[nn.Module],
        *,
        losses: RouterLosses,
        sequence_group: SequenceGroup | None,
    ) -> None:
        self.num_routers = len(routers)
        """Number of layers with experts."""
        self.num_experts = min((len(cast(Tensor, router.weight)) for router in routers), default=0)
        self._losses = losses
        self._sequence_group = sequence_group
        self._micro_batch: _MicroBatch | None = None
        self._loads: dict[int, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        for index, router in enumerate(routers):
            # Assign forward instead of wrapping the module, which would add a prefix to every name.
            router.forward = self._observe(router, index=index)

    def start_micro_batch(
        self,
        batch: SequenceBatch,
        *,
        num_trained: int,
        gradient_factor: float | None,
        device: torch.device,
        records_choices: bool = False,
    ) -> None:
        """Prepare for a pass over a micro-batch.

        Args:
            batch: Micro-batch on the CPU.
            num_trained: Trained tokens in the mini-batch.
            gradient_factor: Factor that also multiplies the objective; None in a pass that
                does not train, in which nothing is recorded.
            device: Device of the model.
            records_choices: Keep the choices for `pop_choices`.
        """
        index = batch.sequence_index
        trained = torch.zeros(batch.num_sequences).index_add(0, index, batch.loss_mask.float())
        weights = trained / max(num_trained, 1) / batch.lengths
        token_weights, is_real = weights[index], ~batch.is_dummy[index]
        num_padding = 0
        if self._sequence_group is not None:
            num_padding = self._sequence_group.num_padding(batch.num_tokens)
            # A slice is padded with zeros: count sequences from 1, so that padding is the first.
            index, token_weights, is_real = (
                self._sequence_group.take_slice(column)
                for column in (index + 1, token_weights, is_real)
            )
            index = (index - 1) % (batch.num_sequences + 1)
        lengths = torch.tensor([*batch.lengths.tolist(), max(num_padding, 1)], dtype=torch.float32)
        self._micro_batch = _MicroBatch(
            sequence_index=copy_to_device(index, device),
            lengths=copy_to_device(lengths, device),
            token_weights=copy_to_device(token_weights, device),
            is_real=copy_to_device(is_real, device),
            gradient_factor=gradient_factor,
            choices=take_choices(batch, sequence_group=self._sequence_group, device=device),
            recorded={} if records_choices else None,
        )

    def pop_choices(self, batch: SequenceBatch) -> Tensor:
        """Return the [T, layers, K] float32 choices of the micro-batch that has just run.

        Collective over the ranks that share its tokens.

        Raises:
            CapabilityError: If a router does not return expert indices.
        """
        micro_batch, self._micro_batch = self._micro_batch, None
        assert micro_batch is not None, "start_micro_batch() starts a pass"
        recorded = micro_batch.recorded or {}
        if len(recorded) < self.num_routers:
            raise CapabilityError(
                f"{self.num_routers - len(recorded)} of {self.num_routers} routers of this model "
                "do not return expert indices, so output 'routed_experts' cannot be computed: do "
                "not request it."
            )
        choices = torch.stack([recorded[i] for i in range(self.num_routers)], dim=1).float()
        if self._sequence_group is None:
            return choices
        num_tokens = batch.num_tokens
        num_rows = num_tokens + self._sequence_group.num_padding(num_tokens)
        first, end = self._sequence_group.slice_bounds(num_tokens)
        column = choices.new_zeros(num_rows, *choices.shape[1:])
        column[first:end] = choices
        return self._sequence_group.sum_outputs(column)[:num_tokens]

    def stop(self) -> None:
        """Ignore further passes until the next micro-batch starts."""
        self._micro_batch = None

    def discard(self) -> None:
        """Drop what a call that raised has left."""
        self.stop()
        self._loads, self._sums = {}, {}

    def pop_metrics(self) -> dict[str, Metric]:
        """Return the metrics since the last call. Collective.

        Expert loads are counted across all ranks. `router/load_balancing_loss` and
        `router/z_loss` are means over layers, not multiplied by their coefficients.
        """
        loads, sums = self._loads, self._sums
        self._loads, self._sums = {}, {}
        if not loads:
            return {}
        counts = torch.stack([loads[index] for index in sorted(loads)])
        dist.all_reduce(counts)
        metrics = compute_load_metrics(counts)
        for name in sums:
            total = sums[name]
            if self._sequence_group is not None:
                # Each rank in the group has the terms for its own tokens.
                total = self._sequence_group.sum_outputs(total)
            metrics[name] = Metric(value=total / self.num_routers, reduction="sum")
        return metrics

    def _observe(self, router: nn.Module, *, index: int) -> Callable[..., RouterOutput]:
        """Return the forward of a router that also observes and replays."""
        forward: Callable[..., RouterOutput] = router.forward

        def run(*args: Tensor, **options: Tensor) -> RouterOutput:
            micro_batch = self._micro_batch
            if micro_batch is None or micro_batch.choices is None:
                output = forward(*args, **options)
            else:
                # FSDP1 replaces the parameter by a view.
                num_experts = len(cast(Tensor, router.weight))
                with ReplayedChoice(micro_batch.choices[index], num_experts=num_experts) as choice:
                    output = forward(*args, **options)
                choice.check(router)
            if micro_batch is None or not self._can_observe(output):
                return output
            logits, gates, experts = output
            if micro_batch.recorded is not None:
                micro_batch.recorded[index] = experts
            if micro_batch.gradient_factor is None:
                return output
            is_first = index not in micro_batch.finished
            micro_batch.finished.add(index)
            if is_first:
                self._count(micro_batch, experts, num_experts=logits.shape[-1], index=index)
            if self._losses.is_on and torch.is_grad_enabled():
                loss = self._compute_loss(micro_batch, logits, experts, is_reported=is_first)
                gates = _attach(gates, loss * micro_batch.gradient_factor)
            return logits, gates, experts

        # Loads and losses are kept outside a compiled layer's graph.
        uncompiled: Callable[..., RouterOutput] = torch.compiler.disable(run)
        return uncompiled

    def _can_observe(self, output: tuple[Tensor, ...] | Tensor) -> bool:
        """Return True if a router returned logits, gate weights and expert indices.

        Raises:
            CapabilityError: If it did not and a loss is on.
        """
        is_known = (
            isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point()
        )
        if self._losses.is_on and not is_known:
            raise CapabilityError(
                "router_aux_loss or router_z_loss is on, but the routers of this model do not "
                "return logits, gate weights and expert indices: set both to 0."
            )
        return is_known

    def _count(
        self, micro_batch: _MicroBatch, experts: Tensor, *, num_experts: int, index: int
    ) -> None:
        weights = micro_batch.is_real.float()[:, None].expand_as(experts)
        counts = weights.new_zeros(num_experts)
        counts.index_add_(0, experts.flatten(), weights.flatten())
        self._loads[index] = self._loads[index] + counts if index in self._loads else counts

    def _compute_loss(
        self, micro_batch: _MicroBatch, logits: Tensor, experts: Tensor, *, is_reported: bool
    ) -> Tensor:
        """Return the sum of this rank's token losses, times their coefficients."""
        logits = logits.float()
        total = logits.new_zeros(())
        if self._losses.load_balancing:
            balance = self._compute_balance(micro_batch, logits, experts)
            self._report("router/load_balancing_loss", balance, is_reported=is_reported)
            total = total + self._losses.load_balancing * balance
        if self._losses.z:
            z = (logits.logsumexp(-1).square() * micro_batch.token_weights).sum()
            self._report("router/z_loss", z, is_reported=is_reported)
            total = total + self._losses.z * z
        return total

    def _compute_balance(self, micro_batch: _MicroBatch, logits: Tensor, experts: Tensor) -> Tensor:
        index = micro_batch.sequence_index
        hits = torch.zeros_like(logits).scatter_(1, experts, 1.0)
        zeros = hits.new_zeros(len(micro_batch.lengths), logits.shape[-1])
        counts = zeros.index_add(0, index, hits)
        if self._sequence_group is not None:
            # A sequence may be divided across the ranks in the group.
            counts = self._sequence_group.sum_outputs(counts)
        fractions = counts / (micro_batch.lengths * experts.shape[-1])[:, None]
        per_token = (fractions[index] * logits.softmax(-1)).sum(-1)
        return logits.shape[-1] * (per_token * micro_batch.token_weights).sum()

    def _report(self, name: str, loss: Tensor, *, is_reported: bool) -> None:
        if is_reported:
            self._sums[name] = self._sums.get(name, 0.0) + loss.detach()


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gates: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad, torch.ones_like(loss)


def _attach(gates: Tensor, loss: Tensor) -> Tensor:
    """Return the gate weights; the backward pass through them adds the loss gradient."""
    attached: Tensor = _AttachLoss.apply(gates, loss)  # type: ignore[no-untyped-call]
    return attached


def find_routers(model: PreTrainedModel) -> list[nn.Module]:
    """Return a model's routers in layer order.

    A router is a module `gate` or `router` with its own weight next to a module `experts`, of
    a class that transformers names a router; other mixtures of experts have none.
    """
    return [
        router
        for module in model.modules()
        if isinstance(getattr(module, "experts", None), nn.Module)
        for name in ("gate", "router")
        if isinstance(router := getattr(module, name, None), nn.Module)
        and type(router).__name__.lower().endswith("router")
        and isinstance(getattr(router, "weight", None), nn.Parameter)
    ]


def build_routers(
    model: PreTrainedModel,
    *,
    losses: RouterLosses,
    sequence_group: SequenceGroup | None,
    is_compiled: bool,
) -> ExpertRouters | None:
    """Observe the routers of a model, if it has any.

    Compiled layers are only observed if there is a loss, because each router divides their graph.

    Raises:
        ConfigError: If a loss is on and the model has no router whose output it can be added to.
    """
    routers = find_routers(model)
    if losses.is_on and not routers:
        raise ConfigError(
            f"router_aux_loss is {losses.load_balancing} and router_z_loss is {losses.z}, but "
            f"{type(model).__name__} has no routers that can be observed: set them to 0."
        )
    if not routers or (is_compiled and not losses.is_on):
        return None
    return ExpertRouters(routers, losses=losses, sequence_group=sequence_group)
