"""The modules that are mutated, and the sessions of the kit that run on each mutant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "packages" / "engine-fsdp"
SOURCES = PACKAGE / "src" / "temper_engine_fsdp"

MODULES = (
    "engine.py",
    "model/activation_checkpointing.py",
    "model/expert_routers.py",
    "model/output_head.py",
    "model/pack_layout.py",
    "model/packed_attention.py",
    "model/packed_model.py",
    "model/routing_replay.py",
    "model/scored_attention.py",
    "model/sequence_parallel.py",
    "model/token_logprobs.py",
    "model/token_mixers.py",
    "runtime/numerics.py",
    "sharding/expert_parallel.py",
    "sharding/fsdp1.py",
    "sharding/fsdp2.py",
    "sharding/sharded_module.py",
    "sharding/sharded_parameter.py",
    "training/lora_adapter.py",
    "training/micro_batch_runner.py",
    "training/sharded_optimizer.py",
    "training/torch_optimizer.py",
)
"""Modules that compute outputs, losses, gradients, norms or updates, or pack or shard tensors."""

EXPERT_MODULES = (
    "model/expert_routers.py",
    "model/routing_replay.py",
    "sharding/expert_parallel.py",
)
"""Modules that compute only in mixtures of experts."""

DENSE_MODULES = tuple(module for module in MODULES if module not in EXPERT_MODULES)
"""Modules that compute in dense models, which most tests of the kit use."""

GROUP_ORDER = (
    "gradient",
    "update",
    "optimizer",
    "logprob",
    "sizes",
    "value",
    "settings",
    "model_settings",
    "adapter",
    "batch",
    "weights",
    "checkpoint",
    "expert_adapter",
    "router",
    "offload",
    "rfc_loop",
    "call_order",
    "failed_call",
    "interrupted_call",
    "capability",
    "step_directory",
)
"""Groups of the kit; those that detect most mutants come first."""

NUMERIC_GROUPS = GROUP_ORDER[: GROUP_ORDER.index("checkpoint") + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KitSession:
    """One run of the kit on a mutant. The ranks stay alive through all of its layouts."""

    arguments: tuple[str, ...]
    layouts: Mapping[str, tuple[str, ...]]
    """Groups to run by layout, in this order."""
    modules: tuple[str, ...] = DENSE_MODULES
    """Modules whose mutants need this session."""
    needs_cuda: bool = False


SHARDING_MODULES = (
    "engine.py",
    "model/sequence_parallel.py",
    "sharding/fsdp1.py",
    "sharding/fsdp2.py",
    "sharding/sharded_module.py",
    "sharding/sharded_parameter.py",
)

FAMILY_MODULES = (
    "model/output_head.py",
    "model/pack_layout.py",
    "model/packed_attention.py",
    "model/packed_model.py",
    "model/scored_attention.py",
    "model/token_logprobs.py",
    "model/token_mixers.py",
)
"""Modules that compute what only some families of models have."""

FAMILIES = "gpt_oss,gemma2,qwen3_5_text,nemotron_h,cohere"
"""Families with sinks, soft-capping, linear attention, Mamba layers and a scale of the logits."""

SESSIONS = {
    "one-rank": KitSession(
        arguments=(
            *("--world-sizes", "1"),
            "--layouts",
            "logits-kept.1,head-chunks.1,checkpointed.1,optimizer-on-cpu.1,fsdp1.1",
        ),
        layouts={
            "1-rank": GROUP_ORDER,
            "logits-kept.1": ("gradient", "logprob", "sizes", "adapter"),
            "head-chunks.1": ("gradient", "logprob", "sizes", "value"),
            "checkpointed.1": ("gradient", "update", "logprob", "sizes", "adapter"),
            "optimizer-on-cpu.1": ("update", "optimizer", "settings", "weights", "checkpoint"),
            "fsdp1.1": ("gradient", "update", "optimizer", "adapter", "weights"),
        },
    ),
    "families": KitSession(
        arguments=("--world-sizes", "1", "--families", FAMILIES),
        layouts={"1-rank": ("family",)},
        modules=FAMILY_MODULES,
    ),
    "two-ranks": KitSession(
        arguments=(
            *("--world-sizes", "2"),
            *("--layouts", "fsdp1.2,sp2.2,replicated.2,no-reshard.2,fsdp1-replicated.2,together.2"),
        ),
        layouts={
            "2-ranks": GROUP_ORDER,
            "fsdp1.2": (*NUMERIC_GROUPS, "offload", "failed_call"),
            "sp2.2": NUMERIC_GROUPS,
            "replicated.2": ("gradient", "update", "weights", "adapter", "checkpoint"),
            "no-reshard.2": ("gradient", "update", "weights"),
            "fsdp1-replicated.2": ("gradient", "update", "weights", "adapter"),
            "together.2": ("gradient", "update"),
        },
    ),
    "families-in-slices": KitSession(
        arguments=("--layouts", "sp2.2", "--families", "gpt_oss,gemma2"),
        layouts={"sp2.2": ("family",)},
        modules=(
            "model/pack_layout.py",
            "model/packed_attention.py",
            "model/sequence_parallel.py",
        ),
    ),
    "experts": KitSession(
        arguments=("--world-sizes", "1", "--layouts", "ep.2,ep-hybrid.4,ep-sp2-checkpointed.4"),
        layouts={
            "1-rank": ("router", "expert_adapter", "sizes"),
            "ep.2": (
                *("router", "gradient", "update", "weights"),
                *("expert_adapter", "checkpoint", "sizes"),
            ),
            "ep-hybrid.4": ("gradient",),
            "ep-sp2-checkpointed.4": ("router", "gradient"),
        },
        modules=EXPERT_MODULES,
    ),
    "bf16": KitSession(
        arguments=("--compute", "bf16", "--world-sizes", "1", "--layouts", "fsdp1.1,logits-kept.1"),
        layouts={
            "1-rank": NUMERIC_GROUPS,
            "fsdp1.1": ("gradient", "update"),
            "logits-kept.1": ("gradient", "logprob"),
        },
    ),
    "four-ranks": KitSession(
        arguments=("--layouts", "hybrid.4,hybrid-no-reshard.4,fsdp1-hybrid.4,reshard-to-2.4"),
        layouts={
            "hybrid.4": ("gradient", "update", "weights"),
            "fsdp1-hybrid.4": ("gradient", "update", "weights"),
            "reshard-to-2.4": ("gradient", "update"),
            "hybrid-no-reshard.4": ("gradient", "update"),
        },
        modules=SHARDING_MODULES,
    ),
    "cuda": KitSession(
        arguments=("--device", "cuda", "--world-sizes", "1", "--layouts", "optimizer-on-cpu.1"),
        layouts={
            "1-rank": NUMERIC_GROUPS,
            "optimizer-on-cpu.1": ("update", "optimizer"),
        },
        needs_cuda=True,
    ),
    "cuda-bf16": KitSession(
        arguments=(
            *("--device", "cuda", "--compute", "bf16"),
            *("--world-sizes", "1", "--layouts", "optimizer-on-cpu.1"),
        ),
        layouts={
            "1-rank": NUMERIC_GROUPS,
            "optimizer-on-cpu.1": ("update", "optimizer"),
        },
        needs_cuda=True,
    ),
}
"""Sessions of the kit, cheapest first. A mutant survives if it passes all that it needs."""

QUICK_GROUPS = ("gradient", "update", "weights")
"""Groups that run first, in all layouts of a session."""

FIRST_LAYOUTS = {
    "model/activation_checkpointing.py": ("one-rank", "checkpointed.1"),
    "model/scored_attention.py": ("families", "1-rank"),
    "model/sequence_parallel.py": ("two-ranks", "sp2.2"),
    "model/token_mixers.py": ("families", "1-rank"),
    "sharding/expert_parallel.py": ("experts", "ep.2"),
    "sharding/fsdp1.py": ("two-ranks", "fsdp1.2"),
    "sharding/fsdp2.py": ("two-ranks", "2-ranks"),
    "sharding/sharded_parameter.py": ("two-ranks", "2-ranks"),
}
"""Session and layout that are most likely to detect the mutants of a module."""

FIRST_GROUPS = {
    "model/expert_routers.py": ("router",),
    "model/routing_replay.py": ("router",),
    "model/output_head.py": ("value", "logprob"),
    "model/pack_layout.py": ("model_settings",),
    "training/lora_adapter.py": ("adapter", "expert_adapter"),
    "training/micro_batch_runner.py": ("router",),
    "training/torch_optimizer.py": ("settings", "optimizer"),
}
"""Groups of the kit that are most likely to detect the mutants of a module."""
