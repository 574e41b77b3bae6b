"""Fields of Megatron's own configurations that a user sets by name, checked against the real dataclasses and what the engine decides."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib.metadata import version

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from temper_engine_api.errors import ConfigError
from temper_engine_megatron.config import MegatronConfig, Override

_OF_THE_MODEL = frozenset(
    {
        *(
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
        ),
        *(
            "layernorm_epsilon",
            "gated_linear_unit",
            "activation_func",
            "add_bias_linear",
            "add_qkv_bias",
            "qk_layernorm",
        ),
        *(
            "num_moe_experts",
            "moe_router_topk",
            "moe_ffn_hidden_size",
            "moe_router_pre_softmax",
            "rotary_interleaved",
        ),
        *("multi_latent_attention", "attention_dropout", "hidden_dropout", "mtp_num_layers"),
        *(
            "use_mup",
            "mup_base_hidden_size",
            "mup_width_mult",
            "mup_embedding_mult",
            "mup_output_mult",
            "mup_base_head_dim",
        ),
        *(
            "mup_attn_scale_power",
            "softmax_scale",
            "softmax_type",
            "window_size",
            "window_attn_skip_freq",
            "no_rope_freq",
            "mrope_section",
        ),
        *(
            "apply_residual_connection_post_layernorm",
            "layernorm_zero_centered_gamma",
            "qk_l2_norm",
            "attention_output_gate",
        ),
        *(
            "glu_linear_offset",
            "activation_func_clamp_value",
            "experimental_attention_variant",
            "is_hybrid_model",
        ),
        *(
            "heterogeneous_block_specs",
            "moe_layer_freq",
            "moe_latent_size",
            "moe_apply_probs_on_input",
        ),
        *(
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate",
            "moe_router_num_groups",
            "moe_router_group_topk",
        ),
        *(
            "moe_router_topk_scaling_factor",
            "moe_router_score_function",
            "moe_router_enable_expert_bias",
        ),
    }
)
"""What the model's own config.json says."""

_ELSEWHERE: Mapping[str, str] = {
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
"""What a field of the engine's configuration says."""

_DECIDED = frozenset(
    {
        # The engine reduces gradients itself, once per update, and skips what is not finite.
        *(
            "calculate_per_token_loss",
            "finalize_model_grads_func",
            "grad_scale_func",
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
        ),
        *(
            "overlap_grad_reduce",
            "overlap_param_gather",
            "bucket_size",
            "num_buckets",
            "average_in_collective",
            "check_for_nan_in_grad",
            "check_for_large_grads",
        ),
        *(
            "moe_grad_scale_func",
            "mtp_grad_scale_func",
            "grad_norm_skip_threshold",
            "optimizer_cuda_graph",
        ),
        *(
            "use_megatron_fsdp",
            "use_custom_fsdp",
            "data_parallel_sharding_strategy",
            "num_distributed_optimizer_instances",
        ),
        # A matrix is split over the ranks that its own sizes name.
        *(
            "tensor_parallel_num_weight_shards",
            "gtp_weight_remat_size",
            "use_layer_wise_distributed_optimizer",
        ),
        *("expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size"),
        # Micro-batches differ in length, and stages tell each other theirs.
        *(
            "variable_seq_lengths",
            "overlap_p2p_comm",
            "batch_p2p_comm",
            "pipeline_dtype",
            "autocast_dtype",
            "enable_autocast",
        ),
        # Gloo still sends an output when Megatron would free it.
        "deallocate_pipeline_outputs",
        # Weights are filled from the model's files, and the gradient norm counts what was marked while they were made.
        *(
            "perform_initialization",
            "use_cpu_initialization",
            "init_method",
            "output_layer_init_method",
            "embedding_init_method",
        ),
        # States are read and written by parameter, as float32 tensors that AdamW keeps.
        *(
            "use_precision_aware_optimizer",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "main_params_dtype",
            "main_grads_dtype",
        ),
        *(
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "overlap_param_gather_with_optimizer_step",
            "cpu_offloading",
        ),
        *(
            "timers",
            "config_logger_dir",
            "barrier_with_L1_time",
            "cross_entropy_loss_fusion",
            "moe_router_load_balancing_type",
        ),
    }
)
"""What the engine's way of computing needs as it is."""

_IDLE = frozenset(
    {
        # Attention and norms are the engine's own, in plain torch.
        *(
            "attention_softmax_in_fp32",
            "apply_query_key_layer_scaling",
            "masked_softmax_fusion",
            "attention_backend",
            "cp_comm_type",
        ),
        *("hierarchical_context_parallel_sizes", "log_max_attention_logit", "flash_decode"),
        *("memory_efficient_layer_norm", "persist_layer_norm"),
        # Only TransformerEngine's layers have it.
        *(
            "transformer_impl",
            "use_te_activation_func",
            "activation_func_fp8_input_store",
            "tp_only_amax_red",
            "kitchen_attention_backend",
        ),
        *(
            "first_last_layers_bf16",
            "num_layers_at_start_in_bf16",
            "num_layers_at_end_in_bf16",
            "quant_recipe",
        ),
        *("disable_parameter_transpose_cache", "symmetric_ar_type", "moe_grouped_gemm"),
        *(
            "cpu_offloading_num_layers",
            "cpu_offloading_activations",
            "cpu_offloading_weights",
            "cpu_offloading_double_buffering",
        ),
        # Weights are filled from the model's files, and the head is the engine's own.
        *(
            "init_method_std",
            "embedding_init_method_std",
            "cross_entropy_fusion_impl",
            "mtp_loss_scaling_factor",
            "mtp_standalone",
        ),
        *(
            "hetereogenous_dist_checkpoint",
            "moe_per_layer_logging",
            "moe_router_bias_update_rate",
            "mlp_chunks_for_prefill",
        ),
        # Every parameter has the rate of the schedule, AdamW, and the loss scale that every engine has.
        *(
            "decoupled_lr",
            "decoupled_min_lr",
            "sgd_momentum",
            "min_loss_scale",
            "hysteresis",
            "store_param_remainders",
        ),
        *(
            "use_torch_optimizer_for_cpu_offload",
            "overlap_cpu_optimizer_d2h_h2d",
            "pin_cpu_grads",
            "pin_cpu_params",
        ),
        *(
            "reuse_grad_buf_for_mxfp8_param_ag",
            "outer_dp_sharding_strategy",
            "keep_fp8_transpose_cache",
        ),
    }
)
"""What nothing of the engine reads."""

_IDLE_FAMILIES = (
    *(
        "fp8",
        "fp4",
        "tp_comm_",
        "use_kitchen",
        "qk_clip",
        "dsa_",
        "linear_",
        "mamba_",
        "inference_",
        "fsdp_",
        "megatron_fsdp_",
    ),
    *("muon_", "lion_", "soap_", "adaptive_muon_"),
)
"""Beginnings of more such names."""

_CHOSEN_PER_BATCH = frozenset({"hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"})
"""See docs/decisions/0017-one-context-size.md."""


def check_overrides(config: MegatronConfig) -> None:
    """Refuse names that Megatron does not have, and those that mean something only the engine or the model can say.

    Raises:
        ConfigError: naming the key, and what to do instead.
    """
    for key, known in (
        ("override_transformer_config", TransformerConfig),
        ("override_ddp_config", DistributedDataParallelConfig),
        ("override_optimizer_config", OptimizerConfig),
    ):
        given: Mapping[str, Override] = getattr(config, key)
        _check(
            given, key=key, known=[item.name for item in fields(known)], class_name=known.__name__
        )
        switches = {item.name for item in fields(known) if item.type in (bool, "bool")}
        for name in sorted(switches & given.keys()):
            if not isinstance(given[name], bool):
                raise ConfigError(
                    f"{key} sets {name} to {given[name]!r}, but must be true or false."
                )
    doubled = sorted(
        name for name in config.override_transformer_config if name.startswith("recompute_")
    )
    if doubled and config.recompute != "none":
        raise ConfigError(
            f"recompute is {config.recompute}, and override_transformer_config names {doubled[0]}, which it sets: remove one of them."
        )


def plain(overrides: Mapping[str, Override]) -> dict[str, object]:
    """As Megatron wants them: lists, not tuples."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in overrides.items()
    }


def _check(
    given: Mapping[str, Override], *, key: str, known: Iterable[str], class_name: str
) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = (
                f": did you mean {near[0]}?"
                if near
                else f": remove it, or look it up in {class_name}."
            )
            raise ConfigError(
                f"{key} names {name!r}, which {class_name} of megatron-core {version('megatron-core')} does not have{hint}"
            )
        if name in _CHOSEN_PER_BATCH:
            raise ConfigError(
                f"{key} names {name!r}, but context_parallel is one size for all micro-batches: remove it, and choose context_parallel for "
                "the longest of them."
            )
        if name in _ELSEWHERE:
            raise ConfigError(
                f"{key} names {name!r}, which {_ELSEWHERE[name]} of this configuration decides: set that instead."
            )
        if name in _OF_THE_MODEL:
            raise ConfigError(
                f"{key} names {name!r}, which the model's own config decides: change it there, or remove it here."
            )
        if name in _IDLE or name.startswith(_IDLE_FAMILIES):
            raise ConfigError(
                f"{key} names {name!r}, which nothing of this engine reads, so that it would have no effect: remove it."
            )
        if name in _DECIDED:
            raise ConfigError(
                f"{key} names {name!r}, which the engine's way of computing needs as it is: remove it."
            )
