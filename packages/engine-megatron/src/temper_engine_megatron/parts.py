"""What an engine is made of, and how it is built from a configuration: groups, chunks, optimizer, the map of parameters."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from temper_engine_megatron.bridge_compat import Translation
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.cpu_device import megatron_on_cpu
from temper_engine_megatron.groups import Membership, join, leave, own_random_state
from temper_engine_megatron.huggingface import open_tensors, read_config
from temper_engine_megatron.model import build_chunks
from temper_engine_megatron.numerics import check_deterministic_environment
from temper_engine_megatron.optimizer import MegatronAdamW
from temper_engine_megatron.parameter_map import ParameterMap
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


def build_parts(config: MegatronConfig) -> Parts:
    """Build everything; collective."""
    hf_config = read_config(config.model)
    translation = Translation(hf_config)
    membership = join(config)
    try:
        if config.deterministic:
            check_deterministic_environment(membership.device)
        return _build(config, hf_config=hf_config, translation=translation, membership=membership)
    except BaseException:
        leave(membership)
        raise


def _build(config: MegatronConfig, *, hf_config: PretrainedConfig, translation: Translation, membership: Membership) -> Parts:
    with megatron_on_cpu(), own_random_state():
        chunks = build_chunks(config, hf_config=hf_config, translation=translation, membership=membership)
    optimizer = None
    if config.optimizer is not None:
        optimizer = MegatronAdamW(
            chunks.wrapped,
            spec=config.optimizer,
            is_bf16=config.precision.compute == "bf16",
            is_distributed=config.distributed_optimizer,
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
        runner=ScheduleRunner(chunks, membership=membership),
        optimizer=optimizer,
        state=state,
    )
