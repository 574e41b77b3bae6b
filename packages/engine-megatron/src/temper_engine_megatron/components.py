"""The components of an engine, and how they are built from its config."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from temper_engine_api.compile_cache import protect_compile_cache
from temper_engine_api.determinism import check_deterministic_environment
from temper_engine_api.distributed.process_group import ThreadGroup
from temper_engine_api.errors import CapabilityError
from temper_engine_api.file_names import FileNames
from temper_engine_api.offload import GRADIENTS, OPTIMIZER, PARAMETERS, Offloader, OffloadPolicy
from temper_engine_api.settings_check import warn_about_undeclared_keys
from temper_engine_api.updates import LossScale
from temper_engine_megatron.adapter.adapter_placement import plan_adapter, plan_placement
from temper_engine_megatron.bridge_compat import BridgeTranslation
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.huggingface.huggingface_model import (
    check_has_head,
    check_weight_headers,
    has_tied_head,
    load_hf_config,
    open_initial_weights,
    read_file_names,
)
from temper_engine_megatron.huggingface.model_comparison import check_computes_alike
from temper_engine_megatron.model.config_overrides import check_overrides, to_megatron_values
from temper_engine_megatron.model.gpt_chunks import ModelChunks, build_chunks
from temper_engine_megatron.model.transformer_engine_checks import check_installed, check_usable
from temper_engine_megatron.model.transformer_settings import configure_transformer
from temper_engine_megatron.runtime.cpu_device import support_missing_cuda
from temper_engine_megatron.runtime.known_warnings import ignore_known_warnings
from temper_engine_megatron.runtime.process_groups import (
    Membership,
    join_groups,
    leave_groups,
    preserve_rng_state,
)
from temper_engine_megatron.training.megatron_optimizer import MegatronAdamW
from temper_engine_megatron.training.schedule_runner import ScheduleRunner
from temper_engine_megatron.weights.lora_adapter import LoraAdapter, initialize_adapter
from temper_engine_megatron.weights.parameter_map import ParameterMap
from temper_engine_megatron.weights.sharded_state import ShardedState


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComponents:
    """Everything that exists between `init_model` and `close`."""

    membership: Membership
    """This process's rank, device and process groups."""
    hf_config: PretrainedConfig
    """The model's Hugging Face config."""
    file_names: FileNames
    """Names of its tensors in files, where other engines have them joined as in transformers."""
    chunks: ModelChunks
    """This rank's part of the model."""
    runner: ScheduleRunner
    optimizer: MegatronAdamW | None
    """None if the config has no optimizer."""
    base_state: ShardedState
    """Weights of the model, with optimizer states if they are trained."""
    adapter: LoraAdapter | None
    """The LoRA adapter, or None."""
    offloader: Offloader
    """Moves parameters, gradients and optimizer states to and from host memory."""
    offload_policy: OffloadPolicy
    """Decides when these tensors are moved."""
    saving_group: ThreadGroup
    """Process group of the threads that save in the background."""
    generators: Mapping[str, torch.Generator]
    """Random generators of this rank other than torch's, by their names in checkpoints."""

    @property
    def trainable_state(self) -> ShardedState:
        """Parameters that the optimizer updates: the adapter's, or the model's."""
        return self.base_state if self.adapter is None else self.adapter.state

    def iterate_model_tensors(self) -> Iterator[Tensor]:
        """Yield this rank's parameters and gradients."""
        yield from _iterate_parameter_tensors(self.chunks)
        yield from _iterate_gradient_tensors(self.chunks)

    def iterate_optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the optimizer's offloadable state."""
        return _iterate_optimizer_tensors(self.chunks, self.optimizer)


def check_model(config: MegatronConfig) -> None:
    """Check what a build would refuse before it has weights or process groups.

    Raises:
        ConfigError: If the architecture is invalid, a setting does not fit it, the adapter names no
            module of the model, or an override has no effect.
        CapabilityError: If the model is not supported, or optimizer states cannot be kept where the
            config says.
        WeightError: If weight files have other names or shapes than the model.
    """
    check_overrides(config)
    _check_offload(config)
    check_installed(config)
    hf_config = load_hf_config(config.model)
    check_has_head(config.model, hf_config)
    warn_about_undeclared_keys(hf_config, architecture=config.model.architecture)
    translation = BridgeTranslation(hf_config)
    _check_output_layer(config, hf_config=hf_config, translation=translation)
    check_weight_headers(config.model, hf_config)
    check_computes_alike(hf_config, collective_timeout_s=config.collective_timeout_s)
    if config.device == "auto":
        # The host that runs the check may lack the run's GPUs.
        config = replace(config, device="cuda")
    with ignore_known_warnings(), support_missing_cuda():
        configure_transformer(
            translation.transformer_config,
            config,
            hf_config=hf_config,
            is_language_model=config.model.model_type == "language_model",
        )
    if config.lora.is_enabled:
        plan_adapter(
            config,
            hf_config=hf_config,
            translation=translation,
            file_names=read_file_names(config.model, hf_config),
        )


def build_components(config: MegatronConfig, *, loss_scale: LossScale) -> EngineComponents:
    """Build all components. Collective. Tensors are offloaded on return if so configured."""
    # First what needs no process group, so that a mistake in the config leaves none behind.
    check_overrides(config)
    _check_offload(config)
    check_installed(config)
    check_usable(config)
    hf_config = load_hf_config(config.model)
    check_has_head(config.model, hf_config)
    translation = BridgeTranslation(hf_config)
    _check_output_layer(config, hf_config=hf_config, translation=translation)
    check_computes_alike(hf_config, collective_timeout_s=config.collective_timeout_s)
    membership = join_groups(config)
    try:
        if config.deterministic:
            check_deterministic_environment(membership.device)
        components = _build(
            config, hf_config=hf_config, translation=translation, membership=membership
        )
    except BaseException:
        # The caller gets no engine that it could close.
        leave_groups(membership)
        raise
    if loss_scale.is_enabled:
        # Let Megatron scale the loss. Its schedules also scale the router losses, which do not pass
        # through the objective.
        translation.transformer_config.grad_scale_func = lambda loss: loss * loss_scale.value
    return components


def _build(
    config: MegatronConfig,
    *,
    hf_config: PretrainedConfig,
    translation: BridgeTranslation,
    membership: Membership,
) -> EngineComponents:
    file_names = read_file_names(config.model, hf_config)
    placement = None
    if config.lora.is_enabled:
        placement = plan_placement(
            config,
            hf_config=hf_config,
            translation=translation,
            file_names=file_names,
            membership=membership,
        )
    # On a GPU, Megatron compiles its own small functions at their first call.
    if config.compile_head or membership.device.type == "cuda":
        protect_compile_cache()
    # Building modules draws random numbers that no weight keeps.
    with support_missing_cuda(), preserve_rng_state():
        chunks = build_chunks(
            config,
            hf_config=hf_config,
            translation=translation,
            membership=membership,
            adapter=placement,
        )
    # Build the optimizer before the weights are loaded. It makes float32 copies of 16-bit
    # parameters, and `ShardedState.fill` below sets each parameter together with its copy.
    optimizer = _build_optimizer(config, chunks=chunks, membership=membership)
    base_map, adapter_map = (
        ParameterMap(
            chunks,
            translation=translation,
            file_names=file_names,
            membership=membership,
            vocab_size=hf_config.vocab_size,
            has_scalar_head=config.model.model_type != "language_model",
            maps_adapter=maps_adapter,
        )
        for maps_adapter in (False, True)
    )
    # With an adapter the optimizer has no states of the base weights.
    base_state = ShardedState(base_map, optimizer if placement is None else None)
    adapter = None
    names = [entry.name for entry in base_state.list_weight_entries()]
    with open_initial_weights(config.model, hf_config, names=names, file_names=file_names) as read:
        base_state.fill(read)
        if placement is not None:
            adapter = initialize_adapter(placement, ShardedState(adapter_map, optimizer), read)
    offloader = _build_offloader(chunks, optimizer, device=membership.device)
    return EngineComponents(
        membership=membership,
        hf_config=hf_config,
        file_names=file_names,
        chunks=chunks,
        runner=ScheduleRunner(chunks, membership=membership, is_packed=config.remove_padding),
        optimizer=optimizer,
        base_state=base_state,
        adapter=adapter,
        offloader=offloader,
        offload_policy=OffloadPolicy(offloader, spec=config.offload),
        saving_group=ThreadGroup(timeout_s=config.collective_timeout_s),
        generators={} if placement is None else placement.generators,
    )


def _build_optimizer(
    config: MegatronConfig, *, chunks: ModelChunks, membership: Membership
) -> MegatronAdamW | None:
    if config.optimizer is None:
        return None
    return MegatronAdamW(
        chunks.wrapped,
        spec=config.optimizer,
        dtype=chunks.transformer_config.params_dtype,
        is_distributed=config.distributed_optimizer,
        overrides=to_megatron_values(config.override_optimizer_config),
        membership=membership,
    )


def _build_offloader(
    chunks: ModelChunks, optimizer: MegatronAdamW | None, *, device: torch.device
) -> Offloader:
    # Functions, because gradients and optimizer states are allocated later.
    return Offloader(
        {
            PARAMETERS: lambda: _iterate_parameter_tensors(chunks),
            GRADIENTS: lambda: _iterate_gradient_tensors(chunks),
            OPTIMIZER: lambda: _iterate_optimizer_tensors(chunks, optimizer),
        },
        device=device,
    )


def _check_output_layer(
    config: MegatronConfig, *, hf_config: PretrainedConfig, translation: BridgeTranslation
) -> None:
    is_language_model = config.model.model_type == "language_model"
    if not is_language_model or has_tied_head(hf_config):
        return
    try:
        translation.find_mapping("output_layer.weight")
    except CapabilityError as error:
        raise CapabilityError(
            f"the Megatron engine supports {hf_config.model_type} only with a head that is tied to "
            "the embedding, because Megatron-Bridge has no other for it: use the FSDP engine, or a "
            "model with tie_word_embeddings."
        ) from error


def _check_offload(config: MegatronConfig) -> None:
    if config.offload.optimizer_on_cpu:
        raise CapabilityError(
            "the Megatron engine does not support offload.optimizer_on_cpu: use "
            "offload.optimizer, which keeps optimizer states in host memory between "
            "updates."
        )


def _iterate_parameter_tensors(chunks: ModelChunks) -> Iterator[Tensor]:
    return (parameter.data for chunk in chunks.unwrapped for parameter in chunk.parameters())


def _iterate_gradient_tensors(chunks: ModelChunks) -> Iterator[Tensor]:
    # Megatron's DistributedDataParallel keeps gradients in `main_grad` instead of `grad`. They are
    # views of a few flat buffers, whose storages the offloader moves.
    for chunk in chunks.unwrapped:
        for parameter in chunk.parameters():
            if "main_grad" in vars(parameter):
                yield vars(parameter)["main_grad"]


def _iterate_optimizer_tensors(
    chunks: ModelChunks, optimizer: MegatronAdamW | None
) -> Iterator[Tensor]:
    # Float32 parameters are their own master weights; they move with the parameters.
    parameter_storages = {
        tensor.untyped_storage().data_ptr() for tensor in _iterate_parameter_tensors(chunks)
    }
    for tensor in () if optimizer is None else optimizer.offloadable_tensors():
        if tensor.untyped_storage().data_ptr() not in parameter_storages:
            yield tensor
