"""Routers of the oracle's MoE models: their logits and choices, which losses are computed from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.specs import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleConfig(EngineConfig):
    """Settings of the oracle: those that engines with router losses share."""

    router_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss per sequence."""
    router_z_loss: float = 0.0
    """Coefficient of the z-loss per sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPass:
    """One router's output for a sequence with L tokens."""

    logits: Tensor
    """[L, E]"""
    experts: Tensor
    """[L, K] int64, the chosen experts."""

    @property
    def hits(self) -> Tensor:
        """[L, E], 1 where an expert was chosen."""
        return torch.zeros_like(self.logits).scatter(1, self.experts, 1.0)

    @property
    def balance(self) -> Tensor:
        """E sum_e f_e P_e, equation 4 of Fedus et al. 2022, arXiv:2101.03961."""
        fractions = self.hits.mean(0) / self.experts.shape[1]
        return self.logits.shape[1] * (fractions * self.logits.softmax(-1).mean(0)).sum()

    @property
    def z(self) -> Tensor:
        """Mean squared logsumexp, equation 5 of Zoph et al. 2022, arXiv:2202.08906."""
        return self.logits.logsumexp(-1).square().mean()


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a transformers model, in layer order."""
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


@contextmanager
def record_routers(model: nn.Module) -> Iterator[list[list[RouterPass]]]:
    """Record passes through all routers.

    Yields:
        A list for each router; entry b is from the model's b-th call.
    """
    routers = find_routers(model)
    passes: list[list[RouterPass]] = [[] for _ in routers]

    def make_hook(index: int) -> object:
        def record(_: nn.Module, __: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
            passes[index].append(RouterPass(logits=output[0].float(), experts=output[2]))

        return record

    handles = [
        router.register_forward_hook(make_hook(index))  # type: ignore[arg-type]
        for index, router in enumerate(routers)
    ]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replay_experts(model: nn.Module, choices: Tensor | None) -> Iterator[None]:
    """Send the tokens of one sequence to given experts.

    Args:
        model: Model of transformers.
        choices: [L, layers, K] experts, -1 where the router chooses; None changes nothing.
    """

    def make_hook(index: int) -> object:
        def replay(
            router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor]:
            assert choices is not None
            logits, gates, own = output
            given = choices[:, index].long()
            experts = torch.where(given >= 0, given, own)
            return logits, compute_gates(router, logits, experts).to(gates.dtype), experts

        return replay

    routers = [] if choices is None else find_routers(model)
    handles = [
        # Before the hooks that record, which must see the given experts.
        router.register_forward_hook(make_hook(index), prepend=True)  # type: ignore[arg-type]
        for index, router in enumerate(routers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def compute_gates(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Return the gate weights [L, K] for given experts, by the formula of the router's family."""
    if hasattr(router, "e_score_correction_bias"):
        # DeepSeek-V3 and its relatives; arXiv:2412.19437, equations 12 to 16.
        scores = logits.sigmoid().gather(1, experts)
        if router.norm_topk_prob:
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return scores * cast(float, router.routed_scaling_factor)
    if hasattr(router, "bias"):
        # gpt-oss normalizes over the chosen experts only.
        return logits.gather(1, experts).softmax(-1)
    probabilities = logits.softmax(-1).gather(1, experts)
    if getattr(router, "norm_topk_prob", True):
        return probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def weigh_sequences(micro: SequenceBatch, *, num_trained: int) -> list[float]:
    """Return each sequence's fraction of the trained tokens in the mini-batch."""
    trained = torch.zeros(micro.num_sequences).index_add(
        0, micro.sequence_index, micro.loss_mask.float()
    )
    return [count / max(num_trained, 1) for count in trained.tolist()]


def join_experts(passes: Sequence[Sequence[RouterPass]]) -> Tensor:
    """Return the [T, layers, K] float32 experts for a micro-batch's tokens."""
    layers = [torch.cat([each.experts for each in layer]) for layer in passes]
    return torch.stack(layers, dim=1).float()


def count_loads(passes: Sequence[Sequence[RouterPass]], micro: SequenceBatch) -> Tensor:
    """Return [layers, E] token counts per layer and expert, without dummies."""
    is_real = (~micro.is_dummy).float().tolist()
    loads = []
    for layer in passes:
        counts = [real * each.hits.sum(0) for real, each in zip(is_real, layer, strict=True)]
        loads.append(torch.stack(counts).sum(0))
    return torch.stack(loads).detach()
