"""What an engine is made of, and how it is built from a configuration: process group, mesh, sharded model, optimiser, residency."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from temper_engine_api.objective import Query
from temper_engine_fsdp import attention, numerics, process_group
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.models import build_model
from temper_engine_fsdp.module import PackedModel, build_head, shard
from temper_engine_fsdp.optimizer import ShardedAdamW, local
from temper_engine_fsdp.process_group import Membership
from temper_engine_fsdp.residency import Residency
from temper_engine_fsdp.runner import MicroBatchRunner
from temper_engine_fsdp.weights import named_parameters

MODEL, OPTIMIZER = "model", "optimizer"
"""Groups of the residency."""

_DUMMY_QUERIES = {"language_model": Query.LOGPROB, "value_model": Query.VALUE, "reward_model": Query.SCORE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that exists between ``init_model`` and ``close``."""

    membership: Membership
    """This rank and its device."""
    root: PackedModel
    """The sharded module."""
    hf_config: PretrainedConfig
    """The model's own configuration."""
    parameters: Mapping[str, nn.Parameter]
    """Sharded float32 master weights by Hugging Face name."""
    optimizer: ShardedAdamW | None
    """None where the configuration has none."""
    runner: MicroBatchRunner
    """Passes over micro-batches."""
    residency: Residency
    """Where parameters, gradients and optimiser states are."""
    has_fast_matmul: bool
    """Whether float32 matmuls take the fast kernels while the engine computes."""

    def model_tensors(self) -> Iterator[Tensor]:
        """Local shards of parameters and of the gradients there are."""
        return _model_tensors(self.parameters)

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Local shards of both moments."""
        return _optimizer_tensors(self.optimizer)


def build_parts(config: FSDPConfig) -> Parts:
    """Build everything; collective. What is configured to be offloaded is parked on return."""
    device = process_group.choose_device(config.device)
    if config.deterministic:
        numerics.check_deterministic_environment(device)
    kernel = attention.choose_kernel(config.attention, device=device, compute=config.precision.compute)
    attention.register()
    membership = process_group.join(device=device, timeout_s=config.collective_timeout_s)
    mesh = process_group.build_mesh(membership, fsdp_size=config.fsdp_size)
    hf = build_model(config.model, attention=kernel)
    root = PackedModel(hf, head=build_head(hf, config=config))
    shard(root, config=config, mesh=mesh)
    parameters = named_parameters(root)
    optimizer = None
    if config.optimizer is not None:
        optimizer = ShardedAdamW(parameters, spec=config.optimizer, sum_over_shards=_sum_over_shards(mesh))
    parts = Parts(
        membership=membership,
        root=root,
        hf_config=hf.config,
        parameters=parameters,
        optimizer=optimizer,
        runner=MicroBatchRunner(
            root,
            device=device,
            needs_buckets=kernel == attention.SDPA_VARLEN,
            reshards=config.reshard_after_forward,
            dummy_query=_DUMMY_QUERIES[config.model.model_type],
        ),
        residency=Residency({MODEL: lambda: _model_tensors(parameters), OPTIMIZER: lambda: _optimizer_tensors(optimizer)}),
        has_fast_matmul=_takes_fast_matmul(config, device=device),
    )
    if config.residency.offload_parameters:
        parts.residency.park(MODEL)
    if config.residency.offload_optimizer:
        parts.residency.park(OPTIMIZER)
    return parts


def _model_tensors(parameters: Mapping[str, nn.Parameter]) -> Iterator[Tensor]:
    for parameter in parameters.values():
        yield local(parameter)
        if parameter.grad is not None:
            yield local(parameter.grad)


def _optimizer_tensors(optimizer: ShardedAdamW | None) -> Iterator[Tensor]:
    if optimizer is not None:
        for moments in optimizer.moments.values():
            yield from (moments.first, moments.second)


def _sum_over_shards(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    group = mesh.get_group(process_group.SHARD_AXIS)

    def total(value: Tensor) -> Tensor:
        if group.size() > 1:
            dist.all_reduce(value, group=group)
        return value

    return total


def _takes_fast_matmul(config: FSDPConfig, *, device: torch.device) -> bool:
    is_plain = device.type == "cpu" and config.precision.compute == "fp32"
    return is_plain and config.fast_float32_matmul and numerics.fast_matmul_is_exact()
