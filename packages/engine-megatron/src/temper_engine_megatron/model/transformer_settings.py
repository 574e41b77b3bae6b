"""Fill Megatron's transformer config, and reject models and sizes that are not supported.

Several of Megatron's defaults give wrong numbers here without an error; each such setting below
says why it differs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from transformers import PretrainedConfig

from temper_engine_api.distributed.process_group import choose_device
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_megatron.bridge_compat.bridge_translation import (
    find_sparse_layers,
    has_expert_stacks,
    read_declared_fields,
)
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.huggingface.huggingface_model import has_tied_head
from temper_engine_megatron.model.config_overrides import to_megatron_values
from temper_engine_megatron.model.rotary_frequencies import (
    compute_rotary_frequencies,
    list_rotary_kinds,
)

_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def _keep_uninitialized(weight: Tensor) -> Tensor:
    return weight


_FIXED_FIELDS: Mapping[str, object] = {
    # Megatron marks split parameters only where it initializes them. Without these marks the
    # gradient norm counts the shard of one rank only.
    "perform_initialization": True,
    "use_cpu_initialization": True,
    # All weights are replaced before they are used.
    "init_method": _keep_uninitialized,
    "output_layer_init_method": _keep_uninitialized,
    "embedding_init_method": _keep_uninitialized,
    # The objective's reduction is the only division of the loss.
    "calculate_per_token_loss": True,
    # Micro-batches differ in length.
    "variable_seq_lengths": True,
    # Megatron requires this dispatcher with variable lengths, even for dense models.
    "moe_token_dispatcher_type": "alltoall",
    # gloo may still be sending an output when Megatron frees it.
    "deallocate_pipeline_outputs": False,
    # Fused kernels; most need Apex, TransformerEngine or CUDA. Overrides can enable the others.
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    # Its gradient is bf16 even in float32 models.
    "cross_entropy_loss_fusion": False,
    "deterministic_mode": False,
    # The layers that predict more than one token are not part of transformers' models either.
    "mtp_num_layers": None,
}
"""Fields of Megatron's config that do not depend on ours."""
OWN_FIELDS = frozenset(
    {
        *("layer_windows", "rotary_kinds", "has_post_norms", "embedding_scale", "stacks_experts"),
        *("hf_config", "yarn_rotary_scaling_factor", "rotary_scale"),
    }
)
"""Attributes that this engine's layers need, and Megatron's class does not have."""
_FLOAT8_FIELDS: Mapping[str, dict[str, object]] = {
    # The other recipe with one scale per tensor, "delayed", takes it from earlier micro-batches:
    # log-probs would depend on a history that no checkpoint contains.
    "none": {"fp8": None},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}
"""Formats: e4m3, and in "hybrid" e5m2 for gradients."""
_RECOMPUTE_FIELDS: Mapping[str, dict[str, object]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def configure_transformer(
    transformer_config: Any,
    config: MegatronConfig,
    *,
    hf_config: PretrainedConfig,
    is_language_model: bool,
) -> None:
    """Set what the bridge cannot know: sizes, dtypes, switches and the user's overrides.

    Raises:
        ConfigError: If a size does not fit the model, or Megatron rejects an override.
        CapabilityError: If the model is not supported.
    """
    padded_vocab_size = _compute_padded_vocab_size(
        hf_config.vocab_size, num_ranks=config.tensor_parallel
    )
    check_divisible_sizes(transformer_config, config)
    fields = {
        **_FIXED_FIELDS,
        **_RECOMPUTE_FIELDS[config.recompute],
        **_parallel_fields(config, num_layers=transformer_config.num_layers),
        **_dtype_fields(_DTYPES[config.precision.compute]),
        **_expert_fields(transformer_config, config, hf_config=hf_config),
        **_attention_fields(transformer_config, hf_config),
        **_latent_fields(transformer_config, hf_config),
        **_FLOAT8_FIELDS[config.float8],
        "vocab_size": padded_vocab_size,
        "share_embeddings_and_output_weights": is_language_model and has_tied_head(hf_config),
        # Apply overrides last, so that they replace the engine's values.
        **to_megatron_values(config.override_transformer_config),
    }
    for name, value in fields.items():
        setattr(transformer_config, name, value)
    _check_supported(transformer_config, hf_config)
    try:
        # Computes derived fields and checks combinations. Megatron-Bridge does not call it, because
        # the checks need the fields that are set above.
        transformer_config.finalize()
    except (ValueError, AssertionError) as error:
        if not config.override_transformer_config:
            raise
        overrides = dict(config.override_transformer_config)
        raise ConfigError(
            f"megatron-core rejects override_transformer_config {overrides} in combination with "
            f"the other settings ({error}): remove or change the override."
        ) from error


def _compute_padded_vocab_size(vocab_size: int, *, num_ranks: int) -> int:
    """Round the vocabulary size up to a multiple of the rank count."""
    shard_size = -(-vocab_size // num_ranks)
    if shard_size * (num_ranks - 1) >= vocab_size:
        raise ConfigError(
            f"tensor_parallel is {num_ranks}, which leaves a rank without any of the {vocab_size} "
            "tokens of the vocabulary: lower it."
        )
    return shard_size * num_ranks


def _parallel_fields(config: MegatronConfig, *, num_layers: int) -> dict[str, object]:
    return {
        "tensor_model_parallel_size": config.tensor_parallel,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline,
        "context_parallel_size": config.context_parallel,
        "sequence_parallel": config.sequence_parallel,
        "pipeline_model_parallel_layout": _build_stage_table(config, num_layers=num_layers),
        # The interleaved schedule gives wrong results with batched communication.
        "overlap_p2p_comm": config.virtual_pipeline is not None,
        "batch_p2p_comm": config.virtual_pipeline is None,
    }


def _dtype_fields(dtype: torch.dtype) -> dict[str, object]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }


def _check_no_expert_settings(config: MegatronConfig) -> None:
    if config.expert_parallel > 1:
        raise ConfigError(
            f"expert_parallel is {config.expert_parallel}, but the model has no experts to divide: "
            "set it to 1."
        )
    for name in ("router_aux_loss", "router_z_loss"):
        if getattr(config, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)}, but the model has no experts and so no "
                "router: set it to 0."
            )
    if config.expert_products != "auto":
        raise ConfigError(
            f"expert_products is {config.expert_products!r}, but the model has no experts: set it "
            "to auto."
        )


def check_divisible_sizes(transformer_config: Any, config: MegatronConfig) -> None:
    """Check that layers split into equal shards; tensor-parallel ranks may share a key head.

    Raises:
        ConfigError: If a size does not divide the dimension that it splits.
    """
    num_heads = transformer_config.num_attention_heads
    num_key_heads = transformer_config.num_query_groups or num_heads
    if config.tensor_parallel > num_key_heads and getattr(
        transformer_config, "attention_output_gate", False
    ):
        raise ConfigError(
            f"tensor_parallel is {config.tensor_parallel}, more than the model's {num_key_heads} "
            "key heads, which Megatron does not support with gated attention: lower it."
        )
    splits = [
        ("tensor_parallel", config.tensor_parallel, num_heads, "the model's {} attention heads")
    ]
    if config.tensor_parallel % num_key_heads:
        splits.append(
            ("tensor_parallel", config.tensor_parallel, num_key_heads, "the model's {} key heads")
        )
    if transformer_config.num_moe_experts:
        splits.append(
            (
                "expert_tensor_parallel",
                config.expert_tensor_parallel_size,
                transformer_config.moe_ffn_hidden_size,
                "the {} rows of an expert's matrices",
            )
        )
    shared_width = transformer_config.moe_shared_expert_intermediate_size
    if transformer_config.num_moe_experts and shared_width:
        splits.append(
            (
                "tensor_parallel",
                config.tensor_parallel,
                shared_width,
                "the {} rows of the shared experts' matrices",
            )
        )
    # Layers of Nemotron-H have one part each, and not all have an MLP or experts.
    num_mlps = (
        transformer_config.num_layers
        if transformer_config.has_paired_layers
        else len(transformer_config.tokenwise_layers)
    )
    if len(find_sparse_layers(transformer_config)) < num_mlps:
        splits.append(
            (
                "tensor_parallel",
                config.tensor_parallel,
                transformer_config.ffn_hidden_size,
                "the {} rows of an MLP's matrices",
            )
        )
    if transformer_config.multi_latent_attention:
        splits += [
            ("tensor_parallel", config.tensor_parallel, rows, "the {} rows of a latent matrix")
            for rows in (
                transformer_config.q_lora_rank or 0,
                transformer_config.kv_lora_rank + transformer_config.qk_pos_emb_head_dim,
            )
        ]
    for name, num_ranks, dim, description in splits:
        if dim % num_ranks:
            raise ConfigError(
                f"{name} is {num_ranks}, which must divide {description.format(dim)}: choose "
                "another."
            )


def _expert_fields(
    transformer_config: Any, config: MegatronConfig, *, hf_config: PretrainedConfig
) -> dict[str, object]:
    """Return the additional fields for an MoE model; none for a dense model.

    Raises:
        CapabilityError: If only some layers or none have experts, or a token has one.
        ConfigError: If its experts cannot be divided like this, or a dense model has settings of
            experts.
    """
    if transformer_config.num_moe_experts == 0:
        raise CapabilityError(
            f"the {hf_config.model_type} model has num_experts 0, so all its layers are dense, "
            "which the Megatron engine does not support: use the FSDP engine."
        )
    if not transformer_config.num_moe_experts:
        _check_no_expert_settings(config)
        return {}
    hf_fields = read_declared_fields(hf_config)
    if hf_fields.get("decoder_sparse_step", 1) != 1 or hf_fields.get("mlp_only_layers"):
        raise CapabilityError(
            "the Megatron engine does not support models in which only some layers have experts: "
            "use the FSDP engine."
        )
    is_normalized = hf_fields.get("norm_topk_prob", True)
    if transformer_config.moe_router_topk == 1 and is_normalized:
        raise CapabilityError(
            "the model chooses one expert per token (num_experts_per_tok is 1). transformers "
            "divides its weight by itself, which Megatron refuses or leaves out: use the FSDP "
            "engine."
        )
    if transformer_config.num_moe_experts % config.expert_parallel:
        raise ConfigError(
            f"expert_parallel is {config.expert_parallel}, which must divide the "
            f"{transformer_config.num_moe_experts} experts of a layer: choose a divisor."
        )
    if config.tensor_parallel > 1 and not config.sequence_parallel:
        raise ConfigError(
            "a mixture of experts with tensor_parallel above 1 would send each token to its "
            "experts once per rank: set sequence_parallel."
        )
    _check_expert_products(config)
    return {
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": config.expert_tensor_parallel_size,
        # Megatron's grouped products and fused permutation need TransformerEngine; see
        # GroupedExperts for ours.
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": config.router_aux_loss,
        "moe_z_loss_coeff": config.router_z_loss or None,
        # True computes the softmax over all experts, and keeps the chosen probabilities as they
        # are. False computes the softmax over the chosen experts only.
        "moe_router_pre_softmax": not is_normalized,
        # Overlapping shared experts needs CUDA streams.
        "moe_shared_expert_overlap": False,
        # The engine does not train these biases, so they stay as they are in the files.
        "moe_router_bias_update_rate": 0.0,
        **_bias_router_fields(transformer_config, hf_fields),
    }


def _bias_router_fields(transformer_config: Any, hf_fields: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of a router that adds a bias to choose experts, as in DeepSeek-V3.

    Raises:
        CapabilityError: If Megatron chooses experts in another way.
    """
    if not transformer_config.moe_router_enable_expert_bias:
        return {}
    num_groups, num_top_groups = hf_fields.get("n_group") or 1, hf_fields.get("topk_group") or 1
    if num_groups > 1 and transformer_config.moe_router_topk // num_top_groups != 2:
        raise CapabilityError(
            f"the model chooses {transformer_config.moe_router_topk} experts in "
            f"{num_top_groups} of {num_groups} groups. transformers ranks groups by their two best "
            f"experts, Megatron by {transformer_config.moe_router_topk // num_top_groups}, so they "
            "would choose other groups: use the FSDP engine."
        )
    if not hf_fields.get("norm_topk_prob", True):
        raise CapabilityError(
            "the model has a sigmoid router without norm_topk_prob, which Megatron does not "
            "have: use the FSDP engine."
        )
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": num_groups if num_groups > 1 else None,
        "moe_router_group_topk": num_top_groups if num_groups > 1 else None,
    }


def _attention_fields(transformer_config: Any, hf_config: PretrainedConfig) -> dict[str, object]:
    """Return windows, rotary embeddings and other fields that Megatron lacks or takes otherwise."""
    frequencies, rotary_scale = compute_rotary_frequencies(hf_config)
    # A Llama with sliding_window has full attention.
    hf_fields = read_declared_fields(hf_config)
    num_layers = transformer_config.num_layers
    # Some configs have a switch, others only a window.
    has_windows = hf_fields.get("use_sliding_window", hf_fields.get("sliding_window") is not None)
    # Nemotron-H configs may set sliding_window, but no layer uses it.
    kinds = hf_config.to_dict().get("layers_block_type") or hf_fields.get("layer_types")
    kinds = kinds or ["sliding_attention"] * num_layers
    rotary_kinds = list_rotary_kinds(hf_config)
    is_gemma = hf_config.model_type == "gemma3_text"
    fields: dict[str, object] = {
        "layer_windows": tuple(
            hf_config.sliding_window if has_windows and kind == "sliding_attention" else None
            for kind in kinds
        ),
        "rotary_kinds": None if rotary_kinds is None else tuple(map(rotary_kinds.index, kinds)),
        "has_post_norms": is_gemma,
        "embedding_scale": transformer_config.hidden_size**0.5 if is_gemma else None,
        "stacks_experts": has_expert_stacks(hf_config),
        "hf_config": hf_config,
        # Megatron's linear attention refuses packed sequences.
        "experimental_attention_variant": None,
        # Windows, angles and kernels are the engine's own.
        "attention_backend": AttnBackend.auto,
        "window_size": None,
        "window_attn_skip_freq": None,
        "position_embedding_type": "rope",
        # Megatron's attention would multiply with a factor of its own.
        "yarn_rotary_scaling_factor": 1.0,
        "rotary_scale": None,
    }
    if rotary_scale != 1.0 and not transformer_config.multi_latent_attention:
        num_rotated = 2 * frequencies.shape[-1]
        # Megatron derives a head_dim that the model's config does not have, but only in finalize().
        head_dim = transformer_config.kv_channels or (
            transformer_config.hidden_size // transformer_config.num_attention_heads
        )
        if num_rotated < head_dim:
            fields["rotary_scale"] = (num_rotated, rotary_scale)
        else:
            # Queries and keys have the factor each, in all of their dimensions.
            scale = transformer_config.softmax_scale or head_dim**-0.5
            fields["softmax_scale"] = scale * rotary_scale**2
    return fields


def _latent_fields(transformer_config: Any, hf_config: PretrainedConfig) -> dict[str, object]:
    """Return the fields of latent attention, whose scale depends on the extended context."""
    if not transformer_config.multi_latent_attention:
        return {}
    rope = dict(hf_config.rope_parameters)
    is_extended = rope.get("rope_type", "default") != "default"
    return {
        # Angles come from `rotary_frequencies`.
        "rope_type": "rope",
        "rotary_scaling_factor": rope.get("factor", 1.0) if is_extended else 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _check_expert_products(config: MegatronConfig) -> None:
    if config.expert_products != "grouped":
        return
    device = choose_device("auto").type if config.device == "auto" else config.device
    if device != "cuda" or config.precision.compute != "bf16":
        raise CapabilityError(
            f"expert_products is 'grouped', which needs bf16 on CUDA, but the device is {device} "
            f"and precision.compute {config.precision.compute}: set it to auto."
        )
    if config.lora.is_enabled and config.lora.target_parameters:
        raise CapabilityError(
            "expert_products is 'grouped', but lora.target_parameters adapts experts, which then "
            "run one after another: set it to auto."
        )


def _check_supported(transformer_config: Any, hf_config: PretrainedConfig) -> None:
    if transformer_config.normalization != "RMSNorm":
        raise CapabilityError(
            f"the Megatron engine does not support {transformer_config.normalization}: use a model "
            "with RMSNorm."
        )
    if transformer_config.attention_dropout or transformer_config.hidden_dropout:
        raise CapabilityError(
            "the model has dropout, which the Megatron engine does not support: set it to 0 in the "
            "model's config."
        )
    hf_fields = hf_config.to_dict()
    unsupported = ("attn_logit_softcapping", "final_logit_softcapping")
    for name in (*unsupported, "use_bidirectional_attention"):
        if hf_fields.get(name):
            raise CapabilityError(
                f"the model has {name} {hf_fields[name]}, which the Megatron engine does not "
                "support: use the FSDP engine."
            )
    if transformer_config.stacks_experts and transformer_config.expert_tensor_parallel_size > 1:
        raise ConfigError(
            f"the experts of {hf_config.model_type} cannot be split over tensor-parallel ranks: "
            "set expert_tensor_parallel to 1."
        )


def _build_stage_table(config: MegatronConfig, *, num_layers: int) -> list[list[str]] | None:
    """Return the layers per chunk: all stages for chunk c, then all stages for chunk c + 1.

    Megatron's own division requires equal chunks; a table allows any number of layers.
    """
    if config.pipeline_parallel == 1:
        return None
    num_chunks = config.pipeline_parallel * (config.virtual_pipeline or 1)
    # Differences of rounded multiples, so that sizes differ by at most one and add up to all
    # layers.
    sizes: Sequence[int] = config.layers_per_stage or [
        num_layers * (i + 1) // num_chunks - num_layers * i // num_chunks for i in range(num_chunks)
    ]
    if sum(sizes) != num_layers:
        raise ConfigError(
            f"layers_per_stage {list(sizes)} adds up to {sum(sizes)}, but the model has "
            f"{num_layers} layers: change the numbers so that they add up."
        )
    table = [["decoder"] * size for size in sizes]
    table[0].insert(0, "embedding")
    table[-1].append("loss")
    return table
