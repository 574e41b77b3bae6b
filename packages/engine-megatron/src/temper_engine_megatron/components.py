"""What an engine is made of, and how it is built from a configuration: groups, chunks, optimizer, the map of parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from temper_engine_api.errors import CapabilityError
from temper_engine_api.loss_scale import LossScale
from temper_engine_api.offload import GRADIENTS, OPTIMIZER, PARAMETERS, Offloader, OffloadPolicy
from temper_engine_megatron.adapter.adapter_placement import plan_placement
from temper_engine_megatron.bridge_compat import BridgeTranslation
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.huggingface.huggingface_model import (
    load_hf_config,
    open_initial_weights,
)
from temper_engine_megatron.model.config_overrides import check_overrides, plain
from temper_engine_megatron.model.gpt_chunks import ModelChunks, build_chunks
from temper_engine_megatron.runtime.cpu_device import megatron_on_cpu
from temper_engine_megatron.runtime.numerics import check_deterministic_environment
from temper_engine_megatron.runtime.process_groups import (
    Membership,
    join,
    leave,
    preserve_rng_state,
)
from temper_engine_megatron.runtime.saving_group import SavingGroup
from temper_engine_megatron.training.megatron_optimizer import MegatronAdamW
from temper_engine_megatron.training.schedule_runner import ScheduleRunner
from temper_engine_megatron.weights.lora_adapter import LoraAdapter, initialize_adapter
from temper_engine_megatron.weights.parameter_map import ParameterMap
from temper_engine_megatron.weights.sharded_state import ShardedState


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComponents:
    """Everything that exists between ``init_model`` and ``close``."""

    membership: Membership
    """This rank, its groups and its device."""
    hf_config: PretrainedConfig
    """The model's own configuration."""
    chunks: ModelChunks
    """This rank's part of the model."""
    runner: ScheduleRunner
    """Passes over micro-batches."""
    optimizer: MegatronAdamW | None
    """None where the configuration has none."""
    state: ShardedState
    """Weights by Hugging Face name, with the training state where they are what is trained."""
    offloader: Offloader
    """Moves parameters, gradients and optimizer states to and from host memory."""
    offload_policy: OffloadPolicy
    """Decides when these tensors are moved."""
    adapter: LoraAdapter | None
    """What is trained in their place, where there is one."""
    saving_group: SavingGroup
    """Where threads that save in the background meet."""
    generators: Mapping[str, torch.Generator]
    """Random numbers of this rank beside torch's own, by the name they have in a checkpoint."""

    def model_tensors(self) -> Iterator[Tensor]:
        """Yield this rank's parameters and gradients."""
        yield from _parameter_tensors(self.chunks)
        yield from _gradient_tensors(self.chunks)

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the offloadable state of the optimizer."""
        return _optimizer_tensors(self.chunks, self.optimizer)

    @property
    def trained(self) -> ShardedState:
        """What is trained."""
        return self.state if self.adapter is None else self.adapter.state


def build_components(config: MegatronConfig, *, loss_scale: LossScale) -> EngineComponents:
    """Build everything; collective."""
    check_overrides(config)
    hf_config = load_hf_config(config.model)
    translation = BridgeTranslation(hf_config)
    membership = join(config)
    try:
        if config.deterministic:
            check_deterministic_environment(membership.device)
        components = _build(
            config, hf_config=hf_config, translation=translation, membership=membership
        )
    except BaseException:
        leave(membership)
        raise
    if loss_scale.is_enabled:
        # Also of what experts add to the loss.
        translation.settings.grad_scale_func = lambda loss: loss * loss_scale.value
    return components


def _build(
    config: MegatronConfig,
    *,
    hf_config: PretrainedConfig,
    translation: BridgeTranslation,
    membership: Membership,
) -> EngineComponents:
    site = None
    if config.lora.is_enabled:
        site = plan_placement(
            config, hf_config=hf_config, translation=translation, membership=membership
        )
    with megatron_on_cpu(), preserve_rng_state():
        chunks = build_chunks(
            config,
            hf_config=hf_config,
            translation=translation,
            membership=membership,
            adapter=site,
        )
    optimizer = None
    if config.optimizer is not None:
        optimizer = MegatronAdamW(
            chunks.wrapped,
            spec=config.optimizer,
            dtype=chunks.settings.params_dtype,
            is_distributed=config.distributed_optimizer,
            overrides=plain(config.override_optimizer_config),
            membership=membership,
        )
    base, beside = (
        ParameterMap(
            chunks,
            translation=translation,
            membership=membership,
            vocabulary=hf_config.vocab_size,
            has_scalar_head=config.model.model_type != "language_model",
            of_adapter=of_adapter,
        )
        for of_adapter in (False, True)
    )
    state = ShardedState(base, optimizer if site is None else None)
    adapter = None
    with open_initial_weights(
        config.model, hf_config, names=[entry.name for entry in state.expected()]
    ) as read:
        state.fill(read)
        if site is not None:
            adapter = initialize_adapter(site, ShardedState(beside, optimizer), read)
    offloader = _build_offloader(config, chunks, optimizer, device=membership.device)
    return EngineComponents(
        membership=membership,
        hf_config=hf_config,
        chunks=chunks,
        runner=ScheduleRunner(chunks, membership=membership, is_packed=config.remove_padding),
        optimizer=optimizer,
        state=state,
        offloader=offloader,
        offload_policy=OffloadPolicy(offloader, spec=config.residency),
        adapter=adapter,
        saving_group=SavingGroup(
            world_size=membership.topology.world_size, timeout_s=config.collective_timeout_s
        ),
        generators={} if site is None else site.generators,
    )


def _build_offloader(
    config: MegatronConfig,
    chunks: ModelChunks,
    optimizer: MegatronAdamW | None,
    *,
    device: torch.device,
) -> Offloader:
    if config.residency.optimizer_on_cpu:
        raise CapabilityError(
            "residency.optimizer_on_cpu is not supported by the Megatron engine: use residency.offload_optimizer, "
            "which keeps optimiser states in host memory between updates."
        )

    return Offloader(
        {
            PARAMETERS: lambda: _parameter_tensors(chunks),
            GRADIENTS: lambda: _gradient_tensors(chunks),
            OPTIMIZER: lambda: _optimizer_tensors(chunks, optimizer),
        },
        device=device,
    )


def _parameter_tensors(chunks: ModelChunks) -> Iterator[Tensor]:
    return (parameter.data for chunk in chunks.bare for parameter in chunk.parameters())


def _gradient_tensors(chunks: ModelChunks) -> Iterator[Tensor]:
    for chunk in chunks.bare:
        for parameter in chunk.parameters():
            if "main_grad" in vars(parameter):
                yield vars(parameter)["main_grad"]


def _optimizer_tensors(chunks: ModelChunks, optimizer: MegatronAdamW | None) -> Iterator[Tensor]:
    # Float32 parameters are their own master weights; they move with the parameters.
    parameter_storages = {
        tensor.untyped_storage().data_ptr() for tensor in _parameter_tensors(chunks)
    }
    for tensor in () if optimizer is None else optimizer.tensors():
        if tensor.untyped_storage().data_ptr() not in parameter_storages:
            yield tensor
