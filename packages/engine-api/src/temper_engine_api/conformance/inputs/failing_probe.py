"""A probe objective that raises on purpose, at a given micro-batch and on given ranks."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.distributed.rank_connections import close_connections, list_own_connections
from temper_engine_api.objective import HeadOutput, HeadOutputs, LossTerms

Kind = Literal[
    "loss",
    "interrupt",
    "memory_in_backward",
    "memory_in_layer",
    "waits_in_collective",
    "lost_network",
]
"""Kind of the failure: an InjectedError or a KeyboardInterrupt in the loss, or running out of
memory in the backward pass, at its start or halfway through the layers. In `waits_in_collective`
the ranks that do not raise wait for the others in a collective inside the loss. In `lost_network`
all ranks wait there, and the connections of those that fail are closed from outside."""

NOTICE_S = 0.1
"""Time for gloo's thread to notice that its connections are closed."""


class InjectedError(Exception):
    """Raised on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingProbe(SftProbe):
    """The loss of SftProbe, with an exception in one micro-batch. Each instance fails once."""

    fails_at: int
    """Micro-batch index on this rank."""
    kind: Kind = "loss"
    fails_on: tuple[int, ...] | None = None
    """Global ranks; None selects all."""
    seen: list[int] = field(default_factory=list, compare=False)
    """Indices of the micro-batches so far."""
    injected_s: list[float] = field(default_factory=list, compare=False)
    """Time of the failure on this rank, in seconds since 1970; empty before it."""

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        self.seen.append(len(self.seen))
        terms = SftProbe(aggregation=self.aggregation)(head_outputs, batch)
        if self.seen[-1] != self.fails_at:
            return terms
        fails = self.fails_on is None or (
            dist.is_initialized() and dist.get_rank() in self.fails_on
        )
        if fails:
            self.injected_s.append(time.time())
        if self.kind == "lost_network" and fails:
            cut_connections()
        if self.kind == "waits_in_collective" and fails:
            raise InjectedError(describe(self.fails_at))
        if self.kind == "lost_network":
            # On the CPU also with GPUs: NCCL may use other ways than the closed connections.
            dist.all_reduce(torch.zeros(1))
        elif self.kind == "waits_in_collective":
            dist.all_reduce(torch.zeros(1, device=terms.loss.device))
        elif fails and self.kind == "loss":
            raise InjectedError(describe(self.fails_at))
        elif fails and self.kind == "interrupt":
            raise KeyboardInterrupt
        elif fails and self.kind == "memory_in_layer":
            raise_halfway_through_backward(head_outputs[HeadOutput.LOGPROB])
        elif fails:
            logprob: Tensor = _RaisesInBackward.apply(  # type: ignore[no-untyped-call]
                head_outputs[HeadOutput.LOGPROB]
            )
            return LossTerms(loss=-logprob)
        return terms


def raise_halfway_through_backward(column: Tensor) -> None:
    """Make a column's backward pass raise when about half of the parameters have gradients.

    Ranks that share a sequence have the same parameters, although their graphs differ otherwise. So
    counting parameters makes all ranks raise after the same collectives.
    """
    assert column.grad_fn is not None, "the column has a gradient in a training call"
    # Breadth first: nodes near the loss, which run first, come first.
    nodes = [column.grad_fn]
    seen = set(nodes)
    for node in nodes:
        following = [following for following, _ in node.next_functions if following is not None]
        nodes += [each for each in dict.fromkeys(following) if each not in seen]
        seen.update(following)
    parameters = [node for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]
    # Layers that are computed again in the backward pass are not in the graph.
    candidates = parameters if len(parameters) > 1 else nodes
    chosen = candidates[len(candidates) // 2]

    def raise_out_of_memory(_gradients: tuple[Tensor, ...]) -> None:
        # Some engines keep this node, so a later pass would meet the hook again.
        hook.remove()
        raise torch.OutOfMemoryError("injected in a layer")

    hook = chosen.register_prehook(raise_out_of_memory)


def describe(micro_batch: int) -> str:
    """Return the message of the exception that a probe raises."""
    return f"injected at micro-batch {micro_batch + 1}"


def cut_connections() -> None:
    """Close all connections of this process to other ranks, as a lost network does."""
    own = list_own_connections()
    # Connections are given as their other ends see them. Those of NCCL to its own process stay.
    close_connections({" ".join(reversed(each.split())) for each in own} - own)
    # gloo waits for its timeout if its own process closes a connection while it starts to send (3
    # of 600 times). A network is not lost by this process, so gloo notices the loss first here.
    time.sleep(NOTICE_S)


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, column: Tensor) -> Tensor:
        return column.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("injected in the backward pass")
