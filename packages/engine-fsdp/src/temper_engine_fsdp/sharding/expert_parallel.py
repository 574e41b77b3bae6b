"""Expert parallelism: every rank computes its own experts, and tokens are sent to their experts.

Otherwise FSDP gathers all experts of a layer on every rank. A shard by rows of a tensor [E, ...]
over n ranks consists of E / n complete experts, so shards, checkpoints and the optimizer are the
same in both cases.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_fsdp.config import EXPERT_COUNT_NAMES, check_divisible_expert_count
from temper_engine_fsdp.runtime.process_group import REPLICATE_AXIS, SHARD_AXIS
from temper_engine_fsdp.sharding.sharded_parameter import distribute_rows, local_tensor

NAME = "temper_expert_parallel"
"""Name under which `compute_experts` is registered in transformers."""
_DIVISION = "_temper_division"
"""Attribute on an expert module with its `Division`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Ranks that divide a model's experts, and the function that computes each rank's experts."""

    group: ProcessGroup
    """Ranks that share one copy of the parameters, and have different experts."""
    compute: torch.dtype
    """Compute dtype for the experts."""
    local_function: str
    """Name of transformers' function that computes one rank's experts."""


class ExpertDivider:
    """Divides a model's experts across the ranks that share one copy of the parameters.

    With hybrid sharding every copy has all experts, and their gradients are summed over the copies.

    Raises:
        CapabilityError: If the model computes its experts in its own way.
        ConfigError: If the model has no experts, or their number is not divisible.
    """

    def __init__(self, hf: PreTrainedModel, *, mesh: DeviceMesh, compute: torch.dtype) -> None:
        self._mesh = mesh
        group = mesh.get_group(SHARD_AXIS)
        self._copies = mesh.get_group(REPLICATE_AXIS) if mesh.ndim > 1 else None
        """Ranks that have copies of the same experts; None if there is one copy."""
        check_divisible_experts(hf, num_shards=group.size())
        ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)
        division = Division(
            group=group, compute=compute, local_function=str(hf.config._experts_implementation)
        )
        for experts in find_experts(hf):
            setattr(experts, _DIVISION, division)
        hf.set_experts_implementation(NAME)
        self.parameters: list[nn.Parameter] = []
        """Divided parameters so far, which FSDP must ignore; in the same order on all ranks."""

    def divide(self, module: nn.Module) -> None:
        """Keep only this rank's experts of a module; call it after loading the weights."""
        placements = [*([Replicate()] * (self._mesh.ndim - 1)), Shard(0)]
        for experts in find_experts(module):
            for name, parameter in list(experts.named_parameters(recurse=False)):
                rows = distribute_rows(parameter.data, mesh=self._mesh, placements=placements)
                # Clone, so that the memory of all experts is freed.
                local = DTensor.from_local(
                    rows.to_local().clone(),
                    self._mesh,
                    placements,
                    run_check=False,
                    shape=rows.shape,
                    stride=rows.stride(),
                )
                divided = nn.Parameter(local, requires_grad=parameter.requires_grad)
                setattr(experts, name, divided)
                self.parameters.append(divided)

    def sum_gradients_over_copies(self) -> None:
        """Sum the gradients of experts over the copies of the parameters. Collective.

        FSDP does this for all other parameters. Called once per update, after its last pass.
        """
        if self._copies is None:
            return
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.all_reduce(local_tensor(parameter.grad), group=self._copies)


def find_experts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the expert modules whose function transformers looks up by name."""
    for part in module.modules():
        # transformers' decorator `use_experts_implementation` sets these attributes.
        if hasattr(part, "is_transposed") and hasattr(part, "has_gate"):
            yield part


def check_divisible_experts(hf: PreTrainedModel, *, num_shards: int) -> None:
    """Check that every rank gets the same number of experts.

    Raises:
        CapabilityError: If the model computes its experts in its own way.
        ConfigError: If the model has no experts, or their number is not divisible.
    """
    fields = hf.config.get_text_config(decoder=True).to_dict()
    if not any(fields.get(name) for name in EXPERT_COUNT_NAMES):
        raise ConfigError(
            f"expert_parallel is on, but this {hf.config.model_type} model has no experts: set it "
            "to false."
        )
    divided = list(find_experts(hf))
    if not divided:
        raise CapabilityError(
            f"expert_parallel is on, but {type(hf).__name__} does not look its experts up in "
            "transformers' ExpertsInterface: set it to false."
        )
    for experts in divided:
        counts = {parameter.shape[0] for parameter in experts.parameters(recurse=False)}
        if counts != {experts.num_experts}:
            raise CapabilityError(
                f"expert_parallel is on, but {type(experts).__name__} has parameters that are not "
                "one row per expert: set it to false."
            )
        check_divisible_expert_count(min(counts), num_shards=num_shards)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # exchanges need sizes on the host
def compute_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute sum_k w_k expert_k(x) for every token, each expert on the rank that has it.

    Collective over the ranks of the division. A function of transformers' ExpertsInterface.

    Args:
        module: Module of experts, with this rank's shards as parameters.
        hidden_states: [T, H] tokens on this rank.
        top_k_index: [T, K] int64, expert numbers per token.
        top_k_weights: [T, K] weights of these experts.

    Returns:
        [T, H] in the tokens' dtype.
    """
    division: Division = getattr(module, _DIVISION)
    num_tokens, top_k = top_k_index.shape
    order = torch.argsort(top_k_index.flatten(), stable=True)
    num_experts = next(module.parameters()).shape[0]
    plan = _plan_exchange(top_k_index.flatten(), num_experts, division.group)
    sent = hidden_states[order // top_k]
    arrived = _exchange(sent, plan.num_sent, plan.num_received, division.group)
    outputs = _compute_local(module, arrived, plan.experts, division)
    returned = _exchange(outputs, plan.num_received, plan.num_sent, division.group)
    restored = torch.empty_like(returned).index_copy(0, order, returned)
    weighted = restored.view(num_tokens, top_k, -1) * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExchangePlan:
    """Numbers of rows that this rank exchanges with each rank."""

    num_sent: list[int]
    num_received: list[int]
    experts: Tensor
    """[N] int64, index among this rank's experts per received row."""


def _plan_exchange(experts: Tensor, num_experts: int, group: ProcessGroup) -> _ExchangePlan:
    """Exchange row counts per expert, given the experts [T K] for this rank's rows."""
    num_local = num_experts // group.size()
    counts = torch.bincount(experts, minlength=num_experts)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    local_ids = torch.arange(num_experts, device=experts.device) % num_local
    totals = torch.stack([counts, received]).view(2, group.size(), num_local).sum(-1).tolist()
    return _ExchangePlan(
        num_sent=totals[0],
        num_received=totals[1],
        experts=local_ids.repeat_interleave(received, output_size=sum(totals[1])),
    )


def _compute_local(module: nn.Module, rows: Tensor, experts: Tensor, division: Division) -> Tensor:
    """Compute each row's expert; [N, H] to [N, H]."""
    shards = {
        name: _to_local(parameter).to(division.compute)
        for name, parameter in module.named_parameters(recurse=False)
    }
    if not len(rows):
        # Depend on all parameters to give them a gradient of zero.
        return rows + sum(shard.flatten()[0] for shard in shards.values())
    function: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS.get_interface(
        division.local_function, _get_eager_forward(module)
    )
    # Use weights of 1 here: the rank that has the token applies the token's weights.
    ones = rows.new_ones(len(rows), 1)
    return function(_LocalExperts(module, shards), rows, experts[:, None], ones)


def _to_local(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    local: Tensor = parameter.to_local()
    return local


def _get_eager_forward(module: nn.Module) -> Callable[..., Tensor]:
    """Return the forward method that transformers' decorator has wrapped."""
    forward: Callable[..., Tensor] = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    return forward


class _LocalExperts:
    """View of an expert module for transformers' functions, with only this rank's experts."""

    def __init__(self, module: nn.Module, shards: dict[str, Tensor]) -> None:
        self.__dict__.update(shards)
        self.num_experts = len(next(iter(shards.values())))
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Exchange(torch.autograd.Function):
    """All-to-all for rows; the backward pass sends the gradients back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: Tensor,
        num_sent: Sequence[int],
        num_received: Sequence[int],
        group: ProcessGroup,
    ) -> Tensor:
        ctx.arguments = (num_received, num_sent, group)  # type: ignore[attr-defined]
        return _send_rows(rows, num_sent, num_received, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _send_rows(grad, *ctx.arguments), None, None, None  # type: ignore[attr-defined]


def _send_rows(
    rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(num_received), *rows.shape[1:])
    dist.all_to_all_single(
        received, rows.contiguous(), list(num_received), list(num_sent), group=group
    )
    return received


def _exchange(
    rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: ProcessGroup
) -> Tensor:
    """Exchange rows that are sorted by receiving rank; return rows sorted by sending rank."""
    exchanged: Tensor = _Exchange.apply(rows, num_sent, num_received, group)  # type: ignore[no-untyped-call]
    return exchanged
