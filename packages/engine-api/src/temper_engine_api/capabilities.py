"""Capabilities that an engine can claim.

The trainer checks them before a run, and the conformance tests check that the claims are true.
"""

from enum import StrEnum


class Capability(StrEnum):
    """An optional feature of an engine; using one that is not claimed raises CapabilityError."""

    LANGUAGE_MODEL = "language_model"
    """A language-model head."""
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
    DATA_PARALLEL = "data_parallel"
    """More than one data-parallel rank."""
    SEQUENCE_PARALLEL = "sequence_parallel"
    """Ulysses sequence parallelism."""
    TENSOR_PARALLEL = "tensor_parallel"
    """Tensor parallel."""
    PIPELINE_PARALLEL = "pipeline_parallel"
    """Pipeline parallel."""
    CONTEXT_PARALLEL = "context_parallel"
    """Context parallel."""
    RESHARD_ON_LOAD = "reshard_on_load"
    """A checkpoint can be loaded with another world size or layout."""
    BACKGROUND_SAVE = "background_save"
    """`save_checkpoint(in_background=True)` and `stage_part`."""
    PORTABLE_STATE = "portable_state"
    """`export_state` and `load_state`."""
