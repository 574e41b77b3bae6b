"""What an engine is made of, and how it is built from a configuration: groups, chunks, optimizer, the map of parameters."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig

from temper_engine_api.errors import CapabilityError
from temper_engine_api.loss_scale import LossScale
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
    """Weights and training state by Hugging Face name."""
    residency: Residency
    """Where the tensors of all these lie."""


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


def _build(config: MegatronConfig, *, hf_config: PretrainedConfig, translation: Translation, membership: Membership) -> Parts:
    with megatron_on_cpu(), own_random_state():
        chunks = build_chunks(config, hf_config=hf_config, translation=translation, membership=membership)
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
    parameters = ParameterMap(
        chunks,
        translation=translation,
        membership=membership,
        vocabulary=hf_config.vocab_size,
        has_scalar_head=config.model.model_type != "language_model",
    )
    state = StateOfRanks(parameters, optimizer)
    with open_tensors(config.model, hf_config, names=[entry.name for entry in state.expected()]) as read:
        state.fill(read)
    return Parts(
        membership=membership,
        hf_config=hf_config,
        runner=ScheduleRunner(chunks, membership=membership, is_packed=config.remove_padding),
        optimizer=optimizer,
        state=state,
        residency=_residency(config, chunks, optimizer),
    )


def _residency(config: MegatronConfig, chunks: Chunks, optimizer: MegatronAdamW | None) -> Residency:
    if config.residency.optimizer_on_cpu:
        raise CapabilityError(
            "residency.optimizer_on_cpu is not supported by the Megatron engine: use residency.offload_optimizer, "
            "which keeps optimiser states in host memory between updates."
        )

    def parameters() -> list[Tensor]:
        return [parameter.data for chunk in chunks.bare for parameter in chunk.parameters()]

    def gradients() -> list[Tensor]:
        return [vars(p)["main_grad"] for chunk in chunks.bare for p in chunk.parameters() if "main_grad" in vars(p)]

    def states() -> list[Tensor]:
        # Float32 parameters are their own masters, and move as parameters.
        places = {tensor.untyped_storage().data_ptr() for tensor in parameters()}
        found = [] if optimizer is None else optimizer.tensors()
        return [tensor for tensor in found if tensor.untyped_storage().data_ptr() not in places]

    return Residency({PARAMETERS: parameters, GRADIENTS: gradients, OPTIMIZER: states}, spec=config.residency)
