"""The components of an engine, and how they are built from its config."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from temper_engine_api.determinism import check_deterministic_environment
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.loss_scale import LossScale
from temper_engine_api.objective import HeadOutput
from temper_engine_api.offload import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Offloader,
    OffloadPolicy,
)
from temper_engine_api.process_group import ThreadGroup, choose_device
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model import packed_attention
from temper_engine_fsdp.model.huggingface_model import build_model
from temper_engine_fsdp.model.liger_kernels import apply_liger_kernels
from temper_engine_fsdp.model.packed_model import (
    PREFIX,
    PackedModel,
    build_head,
    make_constant_getter,
)
from temper_engine_fsdp.model.sequence_parallel import SequenceGroup, check_heads
from temper_engine_fsdp.model.streaming_load import WeightStreamer, build_streaming_model
from temper_engine_fsdp.model.weight_names import hf_name, split_adapter_parameters
from temper_engine_fsdp.runtime import numerics, process_group
from temper_engine_fsdp.runtime.collective_tracer import CollectiveTracer
from temper_engine_fsdp.runtime.host_device import bind_to_near_cores
from temper_engine_fsdp.runtime.numerics import torch_dtype
from temper_engine_fsdp.runtime.performance import (
    ThroughputMeter,
    UpdateProfiler,
    count_training_flops,
)
from temper_engine_fsdp.runtime.process_group import DataGroups, Membership
from temper_engine_fsdp.sharding.sharded_module import shard_model
from temper_engine_fsdp.sharding.sharded_parameter import Buffers, ShardedParameters
from temper_engine_fsdp.training.micro_batch_runner import MicroBatchRunner
from temper_engine_fsdp.training.sharded_optimizer import ShardedAdamW, ShardedOptimizer
from temper_engine_fsdp.training.torch_optimizer import TorchOptimizer

if TYPE_CHECKING:
    from temper_engine_fsdp.training.lora_adapter import LoraAdapter

_DUMMY_QUERIES = {
    "language_model": HeadOutput.LOGPROB,
    "value_model": HeadOutput.VALUE,
    "reward_model": HeadOutput.SCORE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComponents:
    """Everything that exists between `init_model` and `close`."""

    membership: Membership
    """Rank, world size and device of this process."""
    hf_config: PretrainedConfig
    """Hugging Face config of the model."""
    parameters: ShardedParameters
    """Sharded master weights of the model."""
    trainable: ShardedParameters
    """Parameters the optimizer updates: the weights, or the adapter by PEFT name."""
    adapter: "LoraAdapter | None"
    """The LoRA adapter, or None."""
    buffers: Buffers
    """Persistent buffers by Hugging Face name."""
    optimizer: ShardedOptimizer | None
    """None if the config has no optimizer."""
    runner: MicroBatchRunner
    data_groups: DataGroups
    """Ranks that see different samples, and ranks that share them."""
    saving_group: ThreadGroup
    """Process group of the threads that save in the background."""
    offloader: Offloader
    """Moves parameters, gradients and optimizer states to and from host memory."""
    offload_policy: OffloadPolicy
    """Decides when these tensors are moved."""
    uses_fast_matmul: bool
    """True if float32 matmuls use the fast CPU kernels inside the engine."""
    throughput: ThroughputMeter
    """Measures training passes."""
    tracer: CollectiveTracer
    """Publishes what this rank is doing."""
    profiler: UpdateProfiler
    """Profiles the configured updates."""

    def model_tensors(self) -> Iterator[Tensor]:
        """Yield the local shards of parameters and of existing gradients."""
        yield from _parameter_tensors({**self.parameters, **self.trainable})
        yield from _gradient_tensors(self.trainable)

    @property
    def checkpoint_parameters(self) -> ShardedParameters:
        """Parameters to save: the adapter alone, unless its base weights were replaced."""
        return (
            self.trainable
            if self.adapter is not None and not self.adapter.has_replaced_base
            else {**self.parameters, **self.trainable}
        )

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the offloadable state of the optimizer."""
        return _optimizer_tensors(self.optimizer)


def build_components(config: FSDPConfig, *, loss_scale: LossScale) -> EngineComponents:
    """Build all components. Collective. Tensors are offloaded on return if so configured."""
    device = choose_device(config.device)
    # First, so that the memory allocated below is on the node of the GPU.
    if config.numa_affinity:
        bind_to_near_cores(device)
    if config.deterministic:
        check_deterministic_environment(device)
    kernel = packed_attention.choose_kernel(
        config.attention, device=device, compute=config.precision.compute
    )
    # The model looks the kernel up by name when it is built.
    packed_attention.register_kernels()
    membership = process_group.join(device=device, timeout_s=config.collective_timeout_s)
    if device.type == "cpu" and membership.rank == 0:
        numerics.warn_if_slow_on_cpu(config.precision.compute)
    mesh = process_group.build_mesh(membership, fsdp_size=config.fsdp_size)
    data_groups = process_group.build_data_groups(
        membership, sequence_parallel=config.sequence_parallel
    )
    hf, streamer = _build_hf(config, kernel=kernel, membership=membership)
    # Not in FSDPConfig: only the loaded model knows its number of heads.
    check_heads(hf.config.num_attention_heads, size=config.sequence_parallel)
    adapter: LoraAdapter | None = (
        _import_lora_adapter().attach_adapter(hf, spec=config.lora, model=config.model)
        if config.lora.is_enabled
        else None
    )
    if adapter is not None and adapter.targets_experts and config.strategy == "fsdp1":
        raise ConfigError(
            "lora.target_parameters names expert tensors, which PEFT replaces during the forward "
            "pass, but parameters of FSDP1 are views that cannot be replaced: use strategy fsdp2."
        )
    if config.liger_layers:
        apply_liger_kernels(hf, device=device, compute=torch_dtype(config.precision.compute))
    head = build_head(
        hf,
        config=config,
        make_getter=make_constant_getter if adapter is None else adapter.make_module_getter,
    )
    root = PackedModel(
        hf,
        head=head,
        offloads_activations=config.offload_activations,
        is_compiled=config.compile_layers,
    )
    # Before sharding, which changes the shapes that FLOPs are counted from.
    flops = count_training_flops(hf, is_language_model=config.model.model_type == "language_model")
    buffers = _set_dtypes(root, config=config)
    # Offloaded shards are gathered with gloo, over a mesh of their own.
    host_mesh = (
        process_group.build_mesh(membership, fsdp_size=config.fsdp_size, kind="cpu")
        if device.type != "cpu"
        else mesh
    )
    sharded = shard_model(
        root,
        config=config,
        mesh=mesh,
        host_mesh=host_mesh,
        materialize=_already_materialized if streamer is None else streamer.materialize,
    )
    # Frees the full modules that were loaded for sharding.
    if streamer is not None:
        streamer.release()
    parameters, adapter_parameters = split_adapter_parameters(sharded.parameters)
    trainable = adapter_parameters if adapter is not None else parameters
    optimizer = _build_optimizer(config, parameters=trainable, mesh=mesh)
    offloader = Offloader(
        {
            PARAMETERS: lambda: _parameter_tensors(sharded.parameters),
            GRADIENTS: lambda: _gradient_tensors(trainable),
            OPTIMIZER: lambda: _optimizer_tensors(optimizer),
        },
        device=device,
    )
    tracer = CollectiveTracer(membership, timeout_s=config.collective_timeout_s)
    return EngineComponents(
        membership=membership,
        tracer=tracer,
        profiler=UpdateProfiler(config, membership=membership),
        hf_config=hf.config,
        parameters=parameters,
        trainable=trainable,
        adapter=adapter,
        buffers=buffers,
        optimizer=optimizer,
        runner=MicroBatchRunner(
            sharded,
            device=device,
            needs_buckets=kernel == packed_attention.SDPA_VARLEN,
            dummy_output=_DUMMY_QUERIES[config.model.model_type],
            loss_scale=loss_scale,
            tracer=tracer,
            sequence_group=SequenceGroup(data_groups.sequence_parallel)
            if config.sequence_parallel > 1
            else None,
        ),
        offloader=offloader,
        offload_policy=OffloadPolicy(
            offloader, spec=config.residency, eval_needs_gradients=sharded.eval_needs_gradients
        ),
        data_groups=data_groups,
        saving_group=ThreadGroup(
            world_size=membership.world_size, timeout_s=config.collective_timeout_s
        ),
        uses_fast_matmul=_use_fast_matmul(config, device=device),
        throughput=ThroughputMeter(
            flops,
            device=device,
            compute=torch_dtype(config.precision.compute),
            ranks_per_pack=config.sequence_parallel,
        ),
    )


def _import_lora_adapter() -> ModuleType:
    """Import the module that needs peft.

    Raises:
        ConfigError: If peft is not installed.
    """
    try:
        # peft is an optional dependency and takes seconds to import.
        return import_module("temper_engine_fsdp.training.lora_adapter")
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ConfigError(
            "lora is on, but peft is not installed: run pip install 'temper-engine-fsdp[lora]'."
        ) from error


def _build_hf(
    config: FSDPConfig, *, kernel: str, membership: Membership
) -> tuple[PreTrainedModel, WeightStreamer | None]:
    """Build the model, and a weight streamer if its weights can be loaded while sharding.

    FSDP1, DoRA and fully trained modules need a model with loaded weights.
    """
    if config.strategy == "fsdp2" and not (
        config.lora.is_enabled
        and _import_lora_adapter().requires_loaded_weights(config.lora, model=config.model)
    ):
        streaming = build_streaming_model(config.model, attention=kernel, membership=membership)
        if streaming is not None:
            return streaming
    return build_model(config.model, attention=kernel), None


def _already_materialized(module: nn.Module) -> None:
    """Do nothing: the module has its weights."""


def _set_dtypes(root: PackedModel, *, config: FSDPConfig) -> dict[str, Tensor]:
    """Cast parameters and buffers to the configured dtypes; return the persistent buffers."""
    # Checkpoints contain persistent buffers only; rotary tables, for example, are recomputed.
    persistent = root.state_dict().keys()
    for tensors, dtype_name in (
        (root.parameters(), config.precision.parameters),
        (root.buffers(), config.precision.buffers),
    ):
        for tensor in tensors:
            if tensor.is_floating_point():
                # Assign to `data`, so that tied parameters stay one object.
                tensor.data = tensor.data.to(torch_dtype(dtype_name))
    return {
        hf_name(name.removeprefix(PREFIX)): buffer
        for name, buffer in root.named_buffers()
        if name in persistent
    }


def _build_optimizer(
    config: FSDPConfig, *, parameters: ShardedParameters, mesh: DeviceMesh
) -> ShardedOptimizer | None:
    spec, sum_over_shards = config.optimizer, _sum_over_shards(mesh)
    if spec is None:
        return None
    if spec.is_adamw:
        return ShardedAdamW(
            parameters,
            spec=spec,
            sum_over_shards=sum_over_shards,
            on_cpu=config.residency.optimizer_on_cpu,
        )
    if config.residency.optimizer_on_cpu:
        raise CapabilityError(
            f"residency.optimizer_on_cpu needs adamw, but optimizer.name is {spec.name}: use "
            "residency.offload_optimizer instead."
        )
    return TorchOptimizer(parameters, spec=spec, sum_over_shards=sum_over_shards)


def _parameter_tensors(parameters: ShardedParameters) -> Iterator[Tensor]:
    return (parameter.local_shard() for parameter in parameters.values())


def _gradient_tensors(parameters: ShardedParameters) -> Iterator[Tensor]:
    streaming = (parameter.local_gradient() for parameter in parameters.values())
    return (gradient for gradient in streaming if gradient is not None)


def _optimizer_tensors(optimizer: ShardedOptimizer | None) -> Iterator[Tensor]:
    return iter(()) if optimizer is None else optimizer.offloadable_tensors()


def _sum_over_shards(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    group = mesh.get_group(process_group.SHARD_AXIS)

    def total(value: Tensor) -> Tensor:
        if group.size() > 1:
            # Over the shards of one copy only: replicas have the same gradients.
            dist.all_reduce(value, group=group)
        return value

    return total


def _use_fast_matmul(config: FSDPConfig, *, device: torch.device) -> bool:
    # The setting only affects float32 matmuls, and only on a CPU.
    is_plain = device.type == "cpu" and config.precision.compute == "fp32"
    return is_plain and config.fast_float32_matmul and numerics.is_fast_matmul_exact()
