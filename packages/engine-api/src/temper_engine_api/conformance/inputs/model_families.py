"""Tiny models of current families: experts, windows, sinks, soft-capping, linear attention, Mamba.

Each has every kind of layer of its family at least once. `test_family.py` compares an engine with
transformers on them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from temper_engine_api.conformance.inputs.tiny_models import PADDING, TinyModel

_EXPERTS: Mapping[str, object] = MappingProxyType(
    {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        # Number of expert groups that the router chooses from first.
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    }
)
_LINEAR: Mapping[str, object] = MappingProxyType(
    {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        # Two layers with linear attention, two with full attention.
        "full_attention_interval": 2,
        "num_key_value_heads": 2,
    }
)
_SHARED_EXPERTS: Mapping[str, object] = MappingProxyType(
    {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    }
)

_ENCODER: Mapping[str, object] = MappingProxyType(
    {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "patch_size": 4, "num_heads": 2}
)
"""Sizes of an image encoder; text-only batches do not use it."""
_QWEN3_ENCODER: Mapping[str, object] = MappingProxyType(
    {**_ENCODER, "out_hidden_size": 32, "num_position_embeddings": 16}
)
_MIXED_ROPE: Mapping[str, object] = MappingProxyType(
    # Sections of the rotary dimensions for time, height and width: 4 pairs of a head of 8.
    {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
)
_QWEN3_VL: Mapping[str, object] = MappingProxyType(
    {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {**_MIXED_ROPE, "mrope_interleaved": True},
        "vision_config": {**_QWEN3_ENCODER, "deepstack_visual_indexes": [0]},
    }
)
_GEMMA3: Mapping[str, object] = MappingProxyType(
    {
        "sliding_window": 6,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
        "tie_word_embeddings": True,
    }
)

_ARCHITECTURES: Mapping[str, Mapping[str, object]] = {
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        # Windowed and full attention alternate, starting with a window.
        "sliding_window": 6,
        # The family's default extends it by a factor that changes the scale of scores.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gemma2": {
        "sliding_window": 6,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 8,
        # Small enough to matter with the weights of tiny models.
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": _GEMMA3,
    "glm4_moe": {**_EXPERTS, "num_key_value_heads": 2, "use_qk_norm": True},
    "deepseek_v3": {
        **_EXPERTS,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        # Values are narrower than queries and keys, which have 16.
        "v_head_dim": 12,
        # The norms of latents have another epsilon, which no field sets.
        "rms_norm_eps": 1e-2,
    },
    "qwen3_next": {**_LINEAR, **_SHARED_EXPERTS},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_SHARED_EXPERTS},
    "nemotron_h": {
        **_EXPERTS,
        # Its embedding has a gradient also for this token, unlike those of other families.
        "pad_token_id": PADDING,
        # Divided into four chunks of a pipeline, each has attention or a Mamba layer to adapt.
        "layers_block_type": [
            *("linear_attention", "moe", "full_attention"),
            *("linear_attention", "mlp", "full_attention"),
        ],
        "num_key_value_heads": 2,
        "moe_shared_expert_intermediate_size": 24,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        # Shorter than the sequences, so that a state is carried from chunk to chunk.
        "chunk_size": 4,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "gemma3": {
        **_GEMMA3,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            # Two rows of two patches.
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 8,
            "vision_use_head": False,
        },
    },
    "qwen2_vl": {
        "num_key_value_heads": 2,
        "rope_parameters": _MIXED_ROPE,
        "vision_config": {
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": 4,
        },
    },
    "qwen2_5_vl": {
        "num_key_value_heads": 2,
        "rope_parameters": _MIXED_ROPE,
        "vision_config": {**_ENCODER, "out_hidden_size": 32},
    },
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": {
        **_QWEN3_VL,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "qwen3_5": {**_LINEAR, "vision_config": _QWEN3_ENCODER},
    "qwen3_5_moe": {**_LINEAR, **_SHARED_EXPERTS, "vision_config": _QWEN3_ENCODER},
    "cohere": {"num_key_value_heads": 2, "logit_scale": 0.25, "tie_word_embeddings": True},
}

FAMILIES: Mapping[str, TinyModel] = MappingProxyType(
    {
        name: TinyModel(
            name=f"family-{name}",
            architecture={"model_type": name, "tie_word_embeddings": False, **fields},
        )
        for name, fields in _ARCHITECTURES.items()
    }
)
"""Tiny models by their `model_type`."""


def has_smooth_gradient(family: str) -> bool:
    """Return True if gradients in bf16 can be compared with those in float32.

    Rounding to bf16 sends some tokens to other experts than float32 does, and grows in the states
    of linear attention. In `qwen2_5_vl`, rounding changes gradients of the kit's clipped objective
    by a third of the largest entry, and those of a log-likelihood by 0.08 of it. The kit trains
    these in float32, also with `--compute bf16`.
    """
    if family == "qwen2_5_vl":
        return False
    rough = {"num_experts_per_tok", "linear_num_value_heads"}
    return not rough & FAMILIES[family].architecture.keys()
