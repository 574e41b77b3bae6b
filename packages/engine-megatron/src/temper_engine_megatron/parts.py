"""What an engine is made of, and how it is built from a configuration: groups, chunks, optimizer, the map of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from temper_engine_api.errors import CapabilityError
from temper_engine_api.loss_scale import LossScale
from temper_engine_megatron.adapter_model import plan_adapter
from temper_engine_megatron.adapter_state import Adapter, fill_adapter
from temper_engine_megatron.bridge_compat import Translation
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.cpu_device import megatron_on_cpu
from temper_engine_megatron.groups import Membership, join, leave, own_random_state
from temper_engine_megatron.huggingface import open_tensors, read_config
from temper_engine_megatron.model import Chunks, build_chunks
from temper_engine_megatron.numerics import check_deterministic_environment
from temper_engine_megatron.optimizer import MegatronAdamW
from temper_engine_megatron.overrides import check_overrides, plain
from temper_engine_megatron.parameter_map import ParameterMap
from temper_engine_megatron.residency import GRADIENTS, OPTIMIZER, PARAMETERS, Residency
from temper_engine_megatron.saving_group import SavingGroup
from temper_engine_megatron.schedule_runner import ScheduleRunner
from temper_engine_megatron.state import StateOfRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that exists between ``init_model`` and ``close``."""

    membership: Membership
    """This rank, its groups and its device."""
    hf_config: PretrainedConfig
    """The model's own configuration."""
    runner: ScheduleRunner
    """Passes over micro-batches."""
    optimizer: MegatronAdamW | None
    """None where the configuration has none."""
    state: StateOfRanks
    """Weights by Hugging Face name, with the training state where they are what is trained."""
    residency: Residency
    """Where the tensors of all these lie."""
    adapter: Adapter | None
    """What is trained in their place, where there is one."""
    saving_group: SavingGroup
    """Where threads that save in the background meet."""
    generators: Mapping[str, torch.Generator]
    """Random numbers of this rank beside torch's own, by the name they have in a checkpoint."""

    @property
    def trained(self) -> StateOfRanks:
        """What is trained."""
        return self.state if self.adapter is None else self.adapter.state


def build_parts(config: MegatronConfig, *, loss_scale: LossScale) -> Parts:
    """Build everything; collective."""
    check_overrides(config)
    hf_config = read_config(config.model)
    translation = Translation(hf_config)
    membership = join(config)
    try:
        if config.deterministic:
            check_deterministic_environment(membership.device)
        parts = _build(config, hf_config=hf_config, translation=translation, membership=membership)
    except BaseException:
        leave(membership)
        raise
    if loss_scale.is_on:
        # Also of what experts add to the loss.
        translation.settings.grad_scale_func = lambda loss: loss * loss_scale.value
    return parts


def _build(
    config: MegatronConfig,
    *,
    hf_config: PretrainedConfig,
    translation: Translation,
    membership: Membership,
) -> Parts:
    site = None
    if config.lora.is_on:
        site = plan_adapter(
            config, hf_config=hf_config, translation=translation, membership=membership
        )
    with megatron_on_cpu(), own_random_state():
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
    state = StateOfRanks(base, optimizer if site is None else None)
    adapter = None
    with open_tensors(
        config.model, hf_config, names=[entry.name for entry in state.expected()]
    ) as read:
        state.fill(read)
        if site is not None:
            adapter = fill_adapter(site, StateOfRanks(beside, optimizer), read)
    return Parts(
        membership=membership,
        hf_config=hf_config,
        runner=ScheduleRunner(chunks, membership=membership, is_packed=config.remove_padding),
        optimizer=optimizer,
        state=state,
        residency=_residency(config, chunks, optimizer),
        adapter=adapter,
        saving_group=SavingGroup(
            world_size=membership.topology.world_size, timeout_s=config.collective_timeout_s
        ),
        generators={} if site is None else site.generators,
    )


def _residency(
    config: MegatronConfig, chunks: Chunks, optimizer: MegatronAdamW | None
) -> Residency:
    if config.residency.optimizer_on_cpu:
        raise CapabilityError(
            "residency.optimizer_on_cpu is not supported by the Megatron engine: use residency.offload_optimizer, "
            "which keeps optimiser states in host memory between updates."
        )

    def parameters() -> list[Tensor]:
        return [parameter.data for chunk in chunks.bare for parameter in chunk.parameters()]

    def gradients() -> list[Tensor]:
        return [
            vars(p)["main_grad"]
            for chunk in chunks.bare
            for p in chunk.parameters()
            if "main_grad" in vars(p)
        ]

    def states() -> list[Tensor]:
        # Float32 parameters are their own masters, and move as parameters.
        places = {tensor.untyped_storage().data_ptr() for tensor in parameters()}
        found = [] if optimizer is None else optimizer.tensors()
        return [tensor for tensor in found if tensor.untyped_storage().data_ptr() not in places]

    return Residency(
        {PARAMETERS: parameters, GRADIENTS: gradients, OPTIMIZER: states}, spec=config.residency
    )
