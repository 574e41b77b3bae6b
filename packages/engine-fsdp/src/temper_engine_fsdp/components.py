"""The components of an engine, and how they are built from its config."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from temper_engine_api import adapter_checks
from temper_engine_api.determinism import check_deterministic_environment
from temper_engine_api.distributed.process_group import ThreadGroup, choose_device
from temper_engine_api.errors import CapabilityError, ConfigError, format_install
from temper_engine_api.file_names import FileNames
from temper_engine_api.objective import HeadOutput
from temper_engine_api.offload import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Offloader,
    OffloadPolicy,
)
from temper_engine_api.settings_check import warn_about_undeclared_keys
from temper_engine_api.updates import LossScale
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model import packed_attention
from temper_engine_fsdp.model.expert_routers import ExpertRouters, RouterLosses, build_routers
from temper_engine_fsdp.model.float8_layers import convert_to_float8
from temper_engine_fsdp.model.huggingface_model import (
    build_model,
    check_weight_headers,
    read_attention_dropout,
    read_config,
)
from temper_engine_fsdp.model.liger_kernels import apply_liger_kernels
from temper_engine_fsdp.model.packed_model import (
    PREFIX,
    PackedModel,
    build_head,
    find_layers,
    make_constant_getter,
)
from temper_engine_fsdp.model.sequence_parallel import SequenceGroup, check_heads
from temper_engine_fsdp.model.streaming_load import (
    WeightStreamer,
    build_streaming_model,
    use_meta_parameters,
)
from temper_engine_fsdp.model.token_mixers import check_no_sequence_parallel
from temper_engine_fsdp.model.weight_names import (
    find_model_files,
    hf_name,
    read_file_names,
    split_adapter_parameters,
)
from temper_engine_fsdp.runtime import numerics, process_group
from temper_engine_fsdp.runtime.collective_tracer import CollectiveTracer
from temper_engine_fsdp.runtime.numa_affinity import bind_to_near_cores
from temper_engine_fsdp.runtime.numerics import torch_dtype
from temper_engine_fsdp.runtime.performance import (
    ThroughputMeter,
    UpdateProfiler,
    count_training_flops,
)
from temper_engine_fsdp.runtime.process_group import DataGroups, Membership
from temper_engine_fsdp.sharding.expert_parallel import check_divisible_experts
from temper_engine_fsdp.sharding.fsdp2 import group_layers
from temper_engine_fsdp.sharding.sharded_module import ShardedModule, shard_model
from temper_engine_fsdp.sharding.sharded_parameter import Buffers, ShardedParameters
from temper_engine_fsdp.training.micro_batch_runner import MicroBatchRunner
from temper_engine_fsdp.training.sharded_optimizer import (
    ShardedAdamW,
    ShardedOptimizer,
    make_shard_sum,
)
from temper_engine_fsdp.training.torch_optimizer import TorchOptimizer, check_optimizer

if TYPE_CHECKING:
    from temper_engine_fsdp.training.lora_adapter import LoraAdapter

_DUMMY_OUTPUTS = {
    "language_model": HeadOutput.LOGPROB,
    "value_model": HeadOutput.VALUE,
    "reward_model": HeadOutput.SCORE,
}
"""Output to compute in a pass that only takes part in collectives, by model type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComponents:
    """Everything that exists between `init_model` and `close`."""

    membership: Membership
    """This process's rank, world size and device."""
    hf_config: PretrainedConfig
    """The model's Hugging Face config."""
    compute_dtype: torch.dtype
    """Dtype of forward and backward passes, and of exported weights."""
    sharded: ShardedModule
    """The model with its head."""
    parameters: ShardedParameters
    """The model's sharded master weights."""
    trainable: ShardedParameters
    """Parameters the optimizer updates: the weights, or the adapter by PEFT name."""
    adapter: "LoraAdapter | None"
    """The LoRA adapter, or None."""
    buffers: Buffers
    """Persistent buffers by Hugging Face name."""
    file_names: FileNames
    """Names of parameters and buffers in files."""
    optimizer: ShardedOptimizer | None
    """None if the config has no optimizer."""
    runner: MicroBatchRunner
    routers: ExpertRouters | None
    """Routers of experts; None without experts, or if nothing needs them."""
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

    def iterate_model_tensors(self) -> Iterator[Tensor]:
        """Yield the local shards of parameters and existing gradients."""
        yield from _iterate_parameter_tensors({**self.parameters, **self.trainable})
        yield from _iterate_gradient_tensors(self.trainable)

    def iterate_optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the optimizer's offloadable state."""
        return _iterate_optimizer_tensors(self.optimizer)


def build_components(config: FSDPConfig, *, loss_scale: LossScale) -> EngineComponents:
    """Build all components. Collective. Tensors are offloaded on return if so configured."""
    device = choose_device(config.device)
    # Bind before anything is allocated, so that memory comes from the GPU's NUMA node.
    if config.numa_affinity:
        bind_to_near_cores(device)
    if config.deterministic:
        check_deterministic_environment(device)
    kernel = packed_attention.choose_kernel(
        config.attention,
        device=device,
        compute=config.precision.compute,
        dropout=read_attention_dropout(read_config(config.model)),
    )
    # The model looks the kernel up by name when it is built.
    packed_attention.register_kernels()
    membership = process_group.join(device=device, timeout_s=config.collective_timeout_s)
    if device.type == "cpu" and membership.rank == 0:
        numerics.warn_if_slow_on_cpu(config.precision.compute)
    try:
        return _build(config, kernel=kernel, membership=membership, loss_scale=loss_scale)
    except BaseException:
        # Closing an engine leaves the group. The caller gets no engine, so leave it here.
        process_group.leave(membership)
        raise


def _build(
    config: FSDPConfig, *, kernel: str, membership: Membership, loss_scale: LossScale
) -> EngineComponents:
    config.check_num_ranks(membership.world_size)
    device = membership.device
    mesh = process_group.build_mesh(membership, fsdp_size=config.fsdp_size)
    data_groups = process_group.build_data_groups(
        membership, sequence_parallel=config.sequence_parallel
    )
    hf, streamer = _build_hf(config, kernel=kernel, membership=membership)
    # FSDPConfig cannot check this, because only the loaded model knows its number of heads.
    check_heads(
        hf.config.get_text_config(decoder=True).num_attention_heads, size=config.sequence_parallel
    )
    check_no_sequence_parallel(hf, size=config.sequence_parallel)
    # Do this before an adapter is attached, which changes the weight names below it.
    file_names = _read_file_names(config, hf)
    adapter = _attach_adapter(config, hf)
    sequence_group = (
        SequenceGroup(data_groups.sequence_parallel) if config.sequence_parallel > 1 else None
    )
    routers = _build_routers(config, hf, sequence_group=sequence_group)
    root = _build_packed_model(hf, config=config, adapter=adapter, device=device)
    # Count FLOPs before sharding changes the shapes that they are counted from.
    flops = count_training_flops(hf, is_language_model=config.model.model_type == "language_model")
    buffers = _set_dtypes(root, config=config)
    sharded = _shard(root, config=config, mesh=mesh, membership=membership, streamer=streamer)
    # From here on parameters are known by their names in files, without those of wrappers.
    parameters, adapter_parameters = split_adapter_parameters(sharded.parameters)
    trainable = (
        {name: p for name, p in parameters.items() if p.tensor.requires_grad}
        if adapter is None
        else adapter_parameters
    )
    optimizer = _build_optimizer(config, parameters=trainable, mesh=mesh)
    offloader = _build_offloader(sharded, trainable, optimizer, device=device)
    tracer = CollectiveTracer(membership, timeout_s=config.collective_timeout_s)
    runner = MicroBatchRunner(
        sharded,
        device=device,
        dummy_output=_DUMMY_OUTPUTS[config.model.model_type],
        loss_scale=loss_scale,
        tracer=tracer,
        sequence_group=sequence_group,
        routers=routers,
    )
    return EngineComponents(
        membership=membership,
        tracer=tracer,
        profiler=UpdateProfiler(config, membership=membership),
        hf_config=hf.config,
        compute_dtype=torch_dtype(config.precision.compute),
        sharded=sharded,
        parameters=parameters,
        trainable=trainable,
        adapter=adapter,
        buffers=buffers,
        file_names=file_names,
        optimizer=optimizer,
        runner=runner,
        routers=routers,
        offloader=offloader,
        offload_policy=OffloadPolicy(
            offloader, spec=config.offload, eval_needs_gradients=sharded.eval_needs_gradients
        ),
        data_groups=data_groups,
        saving_group=ThreadGroup(timeout_s=config.collective_timeout_s),
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
            "lora is on, but peft is not installed: run "
            f"{format_install('temper-engine-fsdp[lora]')}."
        ) from error


def check_model(config: FSDPConfig) -> None:
    """Check that model, adapter and optimizer can be built, with parameters on the meta device.

    Of weight files, only the headers are read.

    Raises:
        ConfigError: If the architecture is invalid, the attention kernel has no dropout but the
            model has, the adapter names no module of the model, or the optimizer does not accept
            the configured arguments.
        CapabilityError: If the model or the optimizer is not supported, or the names of the
            model's tensors in files are not known.
        WeightError: If weight files have other names or shapes than the model.
    """
    packed_attention.register_kernels()
    with use_meta_parameters():
        hf = build_model(config.model, attention=packed_attention.SDPA_VARLEN, load_weights=False)
    packed_attention.check_dropout(config.attention, dropout=read_attention_dropout(hf.config))
    check_weight_headers(hf, spec=config.model)
    _read_file_names(config, hf)
    warn_about_undeclared_keys(hf.config, architecture=config.model.architecture)
    check_heads(
        hf.config.get_text_config(decoder=True).num_attention_heads, size=config.sequence_parallel
    )
    check_no_sequence_parallel(hf, size=config.sequence_parallel)
    _build_routers(config, hf, sequence_group=None)
    group_layers(find_layers(hf, names=config.wrap_modules), size=config.wrap_together, encoder=())
    if config.expert_parallel:
        # The rank count is only known when they start.
        check_divisible_experts(hf, num_shards=1)
    if config.optimizer is not None and not config.optimizer.is_adamw:
        check_optimizer(
            config.optimizer,
            parameters=[p for p in hf.parameters() if p.requires_grad],
            is_flat=config.strategy == "fsdp1",
        )
    if config.float8 != "none":
        convert_to_float8(hf, scaling=config.float8, device=torch.device("cpu"))
    if not config.lora.is_enabled:
        return
    lora_adapter = _import_lora_adapter()
    lora = config.lora
    if lora.path is not None and lora_adapter.requires_loaded_weights(lora, model=config.model):
        # PEFT would compute with the base weights here, too, so only the names are checked.
        names = [name for name, _ in hf.named_modules()]
        adapter_checks.check_target_names(lora, module_names=names)
    else:
        # The weights have no values on the meta device.
        lora_adapter.attach_adapter(hf, spec=lora, model=config.model, computes_magnitudes=False)


def _read_file_names(config: FSDPConfig, hf: PreTrainedModel) -> FileNames:
    """Find the names of the model's tensors in files.

    Raises:
        CapabilityError: If the model could be trained, but neither exported nor saved.
    """
    names = read_file_names(hf, files=find_model_files(config.model) or ())
    names.check_known()
    return names


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
        model_and_streamer = build_streaming_model(
            config.model, attention=kernel, membership=membership
        )
        if model_and_streamer is not None:
            return model_and_streamer
    return build_model(config.model, attention=kernel), None


def _attach_adapter(config: FSDPConfig, hf: PreTrainedModel) -> "LoraAdapter | None":
    if not config.lora.is_enabled:
        return None
    adapter: LoraAdapter = _import_lora_adapter().attach_adapter(
        hf, spec=config.lora, model=config.model
    )
    if adapter.targets_experts and config.expert_parallel:
        raise CapabilityError(
            "lora.target_parameters names expert tensors, which PEFT replaces as a whole, but "
            "expert_parallel divides them over the ranks: set it to false."
        )
    if adapter.targets_experts and config.strategy == "fsdp1":
        raise ConfigError(
            "lora.target_parameters names expert tensors, which PEFT replaces during the forward "
            "pass, but parameters of FSDP1 are views that cannot be replaced: use strategy fsdp2."
        )
    return adapter


def _build_routers(
    config: FSDPConfig, hf: PreTrainedModel, *, sequence_group: SequenceGroup | None
) -> ExpertRouters | None:
    return build_routers(
        hf,
        losses=RouterLosses(load_balancing=config.router_aux_loss, z=config.router_z_loss),
        sequence_group=sequence_group,
        is_compiled=config.compile_layers,
    )


def _build_packed_model(
    hf: PreTrainedModel,
    *,
    config: FSDPConfig,
    adapter: "LoraAdapter | None",
    device: torch.device,
) -> PackedModel:
    if config.liger_layers:
        apply_liger_kernels(hf, device=device, compute=torch_dtype(config.precision.compute))
    if config.float8 != "none":
        convert_to_float8(hf, scaling=config.float8, device=device)
    head = build_head(
        hf,
        config=config,
        make_getter=make_constant_getter if adapter is None else adapter.make_module_getter,
    )
    return PackedModel(
        hf,
        head=head,
        offloads_activations=config.offload_activations,
        is_compiled=config.compile_layers,
    )


def _shard(
    root: PackedModel,
    *,
    config: FSDPConfig,
    mesh: DeviceMesh,
    membership: Membership,
    streamer: WeightStreamer | None,
) -> ShardedModule:
    """Shard the model; weights that are not loaded yet are loaded module by module."""
    # Offloaded shards are gathered with gloo, over a separate mesh.
    host_mesh = (
        process_group.build_mesh(membership, fsdp_size=config.fsdp_size, kind="cpu")
        if membership.device.type != "cpu"
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
    return sharded


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
    spec, sum_over_shards = config.optimizer, make_shard_sum(mesh)
    if spec is None:
        return None
    if spec.is_adamw:
        return ShardedAdamW(
            parameters,
            spec=spec,
            sum_over_shards=sum_over_shards,
            on_cpu=config.offload.optimizer_on_cpu,
        )
    if config.offload.optimizer_on_cpu:
        raise CapabilityError(
            f"offload.optimizer_on_cpu needs adamw, but optimizer.name is {spec.name}: use "
            "offload.optimizer instead."
        )
    return TorchOptimizer(parameters, spec=spec, sum_over_shards=sum_over_shards)


def _build_offloader(
    sharded: ShardedModule,
    trainable: ShardedParameters,
    optimizer: ShardedOptimizer | None,
    *,
    device: torch.device,
) -> Offloader:
    # Functions, because gradients and optimizer states are allocated later.
    return Offloader(
        {
            PARAMETERS: lambda: _iterate_parameter_tensors(sharded.parameters),
            GRADIENTS: lambda: _iterate_gradient_tensors(trainable),
            OPTIMIZER: lambda: _iterate_optimizer_tensors(optimizer),
        },
        device=device,
    )


def _iterate_parameter_tensors(parameters: ShardedParameters) -> Iterator[Tensor]:
    return (parameter.local_shard() for parameter in parameters.values())


def _iterate_gradient_tensors(parameters: ShardedParameters) -> Iterator[Tensor]:
    gradients = (parameter.local_gradient() for parameter in parameters.values())
    return (gradient for gradient in gradients if gradient is not None)


def _iterate_optimizer_tensors(optimizer: ShardedOptimizer | None) -> Iterator[Tensor]:
    return iter(()) if optimizer is None else optimizer.offloadable_tensors()


def _use_fast_matmul(config: FSDPConfig, *, device: torch.device) -> bool:
    # The setting only affects float32 matmuls, and only on a CPU.
    has_effect = device.type == "cpu" and config.precision.compute == "fp32"
    return has_effect and config.fast_float32_matmul and numerics.is_fast_matmul_exact()
