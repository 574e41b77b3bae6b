"""Capabilities that an engine can claim.

The trainer checks them before a run, and the conformance tests check that the claims are true.
"""

from enum import StrEnum

from temper_engine_api.specs import EngineConfig


class Capability(StrEnum):
    """An optional feature of an engine; using one that is not claimed raises CapabilityError."""

    LANGUAGE_MODEL = "language_model"
    """A language-model head, with log-probs and entropies."""
    VALUE_MODEL = "value_model"
    """A value head: one number per state."""
    REWARD_MODEL = "reward_model"
    """A reward head: one score per sequence."""
    FULL_LOGITS = "full_logits"
    """Hooks can request full logits."""
    LOGPROB_AT = "logprob_at"
    """The head computes `HeadOutput.LOGPROB_AT`."""
    ADAPTER = "adapter"
    """LoRA adapters: `disable_adapter`, `export_adapter`, `load_adapter`."""
    ADAPTER_ON_EXPERTS = "adapter_on_experts"
    """LoRA on the fused tensors of MoE experts: `lora.target_parameters`."""
    OFFLOAD = "offload"
    """Parameters, gradients and optimizer states can be offloaded between contexts."""
    ANY_OPTIMIZER = "any_optimizer"
    """`optimizer.name` may be the dotted path of a torch optimizer."""
    FP16 = "fp16"
    """`precision.compute` may be fp16, with a dynamic loss scale."""
    OTHER_DTYPES = "other_dtypes"
    """Master weights, gradient reduction and buffers may be bf16."""
    ROUTING_REPLAY = "routing_replay"
    """MoE models: batches may prescribe the experts of each token, column `ROUTED_EXPERTS`, and
    forward-only calls return them as `HeadOutput.ROUTED_EXPERTS`."""
    DATA_PARALLEL = "data_parallel"
    """More than one data-parallel rank."""
    SEQUENCE_PARALLEL = "sequence_parallel"
    """Ulysses: ranks split each sequence; inside attention, they split the heads instead."""
    TENSOR_PARALLEL = "tensor_parallel"
    """Ranks split each layer's matrices."""
    PIPELINE_PARALLEL = "pipeline_parallel"
    """Ranks split the layers into stages."""
    CONTEXT_PARALLEL = "context_parallel"
    """Ranks split each sequence, also inside attention."""
    RESHARD_ON_LOAD = "reshard_on_load"
    """A checkpoint can be loaded with another world size or layout."""
    BACKGROUND_SAVE = "background_save"
    """Saving while training continues: `save_checkpoint(in_background=True)`, `stage_part`."""
    PORTABLE_STATE = "portable_state"
    """Exchange of the training state with other engines: `export_state`, `load_state`."""


def find_required_capabilities(config: EngineConfig) -> set[Capability]:
    """Return the capabilities that an engine needs for these settings."""
    optimizer, precision = config.optimizer, config.precision
    dtypes = {precision.parameters, precision.reduce, precision.buffers}
    needs = {
        Capability.ANY_OPTIMIZER: optimizer is not None and not optimizer.is_adamw,
        Capability.ADAPTER: config.lora.is_enabled,
        Capability.ADAPTER_ON_EXPERTS: bool(config.lora.target_parameters),
        Capability.OFFLOAD: config.offload.offloads_anything,
        Capability.FP16: precision.compute == "fp16",
        Capability.OTHER_DTYPES: dtypes != {"fp32"},
    }
    return {
        Capability(config.model.model_type),
        *(capability for capability, is_needed in needs.items() if is_needed),
    }
