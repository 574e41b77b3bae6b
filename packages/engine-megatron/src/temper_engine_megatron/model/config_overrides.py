"""Overrides for fields in Megatron's own configs, checked against its dataclasses.

Rejects fields that the model or the engine sets, and fields that have no effect here.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib.metadata import version

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from temper_engine_api.errors import ConfigError
from temper_engine_megatron.config import MegatronConfig, Override

_SET_BY_MODEL = frozenset(
    {
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "normalization",
        "layernorm_epsilon",
        "gated_linear_unit",
        "activation_func",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "num_moe_experts",
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "moe_router_pre_softmax",
        "rotary_interleaved",
        "multi_latent_attention",
        "attention_dropout",
        "hidden_dropout",
        "mtp_num_layers",
        "use_mup",
        "mup_base_hidden_size",
        "mup_width_mult",
        "mup_embedding_mult",
        "mup_output_mult",
        "mup_base_head_dim",
        "mup_attn_scale_power",
        "softmax_scale",
        "softmax_type",
        "window_size",
        "window_attn_skip_freq",
        "no_rope_freq",
        "mrope_section",
        "apply_residual_connection_post_layernorm",
        "layernorm_zero_centered_gamma",
        "qk_l2_norm",
        "attention_output_gate",
        "glu_linear_offset",
        "activation_func_clamp_value",
        "experimental_attention_variant",
        "is_hybrid_model",
        "heterogeneous_block_specs",
        "moe_layer_freq",
        "moe_latent_size",
        "moe_apply_probs_on_input",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_score_function",
        "moe_router_enable_expert_bias",
    }
)
"""Fields that follow from the model's config.json."""

_SET_BY_FIELD: Mapping[str, str] = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "pipeline_model_parallel_layout": "layers_per_stage",
    "num_layers_in_first_pipeline_stage": "layers_per_stage",
    "num_layers_in_last_pipeline_stage": "layers_per_stage",
    "account_for_embedding_in_pipeline_split": "layers_per_stage",
    "account_for_loss_in_pipeline_split": "layers_per_stage",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "sequence_parallel": "sequence_parallel",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "params_dtype": "precision.compute",
    "grad_reduce_in_fp32": "precision.reduce",
    "use_distributed_optimizer": "distributed_optimizer",
    "optimizer": "optimizer.name",
    "lr": "optimizer.lr",
    "min_lr": "schedule.min_lr_ratio",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_eps": "optimizer.eps",
    "clip_grad": "optimizer.clip_grad_norm",
    "initial_loss_scale": "precision.initial_loss_scale",
    "loss_scale": "precision.initial_loss_scale",
    "loss_scale_window": "precision.loss_scale_growth_interval",
    "moe_aux_loss_coeff": "router_aux_loss",
    "moe_z_loss_coeff": "router_z_loss",
    "deterministic_mode": "deterministic",
}
"""Fields that a field of `MegatronConfig` sets, with the name of that field."""

_SET_BY_ENGINE = frozenset(
    {
        # The engine itself skips non-finite updates, and reduces gradients once per update.
        "calculate_per_token_loss",
        "finalize_model_grads_func",
        "grad_scale_func",
        "no_sync_func",
        "grad_sync_func",
        "param_sync_func",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "bucket_size",
        "num_buckets",
        "average_in_collective",
        "check_for_nan_in_grad",
        "check_for_large_grads",
        "moe_grad_scale_func",
        "mtp_grad_scale_func",
        "grad_norm_skip_threshold",
        "optimizer_cuda_graph",
        "use_megatron_fsdp",
        "use_custom_fsdp",
        "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances",
        # Matrices are split over tensor-parallel ranks only.
        "tensor_parallel_num_weight_shards",
        "gtp_weight_remat_size",
        "use_layer_wise_distributed_optimizer",
        "expert_tensor_parallel_num_weight_shards",
        "expert_gtp_weight_remat_size",
        # Micro-batches differ in length, and stages send each other theirs.
        "variable_seq_lengths",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "pipeline_dtype",
        "autocast_dtype",
        "enable_autocast",
        # gloo may still be sending an output when Megatron frees it.
        "deallocate_pipeline_outputs",
        # Weights come from the model's files, and the gradient norm needs marks that initialization
        # sets.
        "perform_initialization",
        "use_cpu_initialization",
        "init_method",
        "output_layer_init_method",
        "embedding_init_method",
        # Optimizer states are read and written by parameter, as float32 tensors of AdamW.
        "use_precision_aware_optimizer",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "main_params_dtype",
        "main_grads_dtype",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_param_gather_with_optimizer_step",
        "cpu_offloading",
        "timers",
        "config_logger_dir",
        "barrier_with_L1_time",
        "cross_entropy_loss_fusion",
        "moe_router_load_balancing_type",
    }
)
"""Fields that the engine sets and depends on."""

_ONLY_TRANSFORMER_ENGINE = frozenset(
    {
        "transformer_impl",
        "use_te_activation_func",
        "activation_func_fp8_input_store",
        "tp_only_amax_red",
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
        "quant_recipe",
        "disable_parameter_transpose_cache",
        "symmetric_ar_type",
        "keep_fp8_transpose_cache",
        "reuse_grad_buf_for_mxfp8_param_ag",
    }
)
"""Fields that only layers of TransformerEngine read."""

_TRANSFORMER_ENGINE_PREFIXES = ("fp8", "fp4", "tp_comm_")
"""Prefixes of more such fields."""

_UNUSED = frozenset(
    {
        # Attention and norms are plain torch.
        "attention_softmax_in_fp32",
        "apply_query_key_layer_scaling",
        "masked_softmax_fusion",
        "attention_backend",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "log_max_attention_logit",
        "flash_decode",
        "memory_efficient_layer_norm",
        "persist_layer_norm",
        "cpu_offloading_num_layers",
        "cpu_offloading_activations",
        "cpu_offloading_weights",
        "cpu_offloading_double_buffering",
        # The engine's own layers have other products of experts and another attention.
        "moe_grouped_gemm",
        "kitchen_attention_backend",
        # Weights come from the model's files, and the head is the engine's own.
        "init_method_std",
        "embedding_init_method_std",
        "cross_entropy_fusion_impl",
        "mtp_loss_scaling_factor",
        "mtp_standalone",
        "hetereogenous_dist_checkpoint",
        "moe_per_layer_logging",
        "moe_router_bias_update_rate",
        "mlp_chunks_for_prefill",
        # The learning rate, AdamW and the loss scale are the same in all engines.
        "decoupled_lr",
        "decoupled_min_lr",
        "sgd_momentum",
        "min_loss_scale",
        "hysteresis",
        "store_param_remainders",
        "use_torch_optimizer_for_cpu_offload",
        "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads",
        "pin_cpu_params",
        "outer_dp_sharding_strategy",
    }
)
"""Fields that this engine never reads."""

_UNUSED_PREFIXES = (
    "use_kitchen",
    "qk_clip",
    "dsa_",
    "linear_",
    "mamba_",
    "inference_",
    "fsdp_",
    "megatron_fsdp_",
    "muon_",
    "lion_",
    "soap_",
    "adaptive_muon_",
)
"""Prefixes of more such fields."""

_CHOSEN_PER_BATCH = frozenset({"hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"})
"""Fields for context-parallel sizes per batch; see docs/decisions/0017-one-context-size.md."""


def check_overrides(config: MegatronConfig) -> None:
    """Check the overrides of Megatron's configs.

    Raises:
        ConfigError: If Megatron has no such field, the model or the engine decides it, or it has no
            effect; has what to do instead.
    """
    for key, config_class in (
        ("override_transformer_config", TransformerConfig),
        ("override_ddp_config", DistributedDataParallelConfig),
        ("override_optimizer_config", OptimizerConfig),
    ):
        overrides: Mapping[str, Override] = getattr(config, key)
        known = [field.name for field in fields(config_class)]
        for name in overrides:
            _check_name(name, key=key, known=known, class_name=config_class.__name__)
        # Megatron does not check types, and a text such as "false" would count as true.
        switches = {field.name for field in fields(config_class) if field.type in (bool, "bool")}
        for name in sorted(switches & overrides.keys()):
            if not isinstance(overrides[name], bool):
                raise ConfigError(
                    f"{key} sets {name} to {overrides[name]!r}, but it must be true or false."
                )
    recompute_overrides = sorted(
        name for name in config.override_transformer_config if name.startswith("recompute_")
    )
    if recompute_overrides and config.recompute != "none":
        raise ConfigError(
            f"recompute is {config.recompute}, which also sets {recompute_overrides[0]} of "
            "override_transformer_config: remove one of them."
        )


def to_megatron_values(overrides: Mapping[str, Override]) -> dict[str, object]:
    """Convert tuples to lists, which Megatron expects."""
    # MegatronConfig has tuples, so that it cannot be changed.
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in overrides.items()
    }


def _check_name(name: str, *, key: str, known: Iterable[str], class_name: str) -> None:
    if name not in known:
        close_matches = difflib.get_close_matches(name, known, n=1)
        hint = (
            f": did you mean {close_matches[0]}?"
            if close_matches
            else f": remove it, or look up its name in {class_name}."
        )
        raise ConfigError(
            f"{key} names {name!r}, which {class_name} of megatron-core "
            f"{version('megatron-core')} does not have{hint}"
        )
    if name in _CHOSEN_PER_BATCH:
        raise ConfigError(
            f"{key} names {name!r}, but context_parallel is the same for all micro-batches: remove "
            "it, and choose context_parallel for the longest of them."
        )
    if name in _SET_BY_FIELD:
        raise ConfigError(
            f"{key} names {name!r}, which {_SET_BY_FIELD[name]} of this config decides: set that "
            "instead."
        )
    if name in _SET_BY_MODEL:
        raise ConfigError(
            f"{key} names {name!r}, which the model's own config decides: change it there, or "
            "remove it here."
        )
    if name in _ONLY_TRANSFORMER_ENGINE or name.startswith(_TRANSFORMER_ENGINE_PREFIXES):
        raise ConfigError(
            f"{key} names {name!r}, which only layers of TransformerEngine read: remove it. This "
            "config selects these layers with layers, and their float8 products with float8."
        )
    if name in _UNUSED or name.startswith(_UNUSED_PREFIXES):
        raise ConfigError(
            f"{key} names {name!r}, which this engine never reads, so it would have no effect: "
            "remove it."
        )
    if name in _SET_BY_ENGINE:
        raise ConfigError(f"{key} names {name!r}, which the engine sets and depends on: remove it.")
