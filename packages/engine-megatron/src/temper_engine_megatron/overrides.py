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
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization"),
        *("layernorm_epsilon", "gated_linear_unit", "activation_func", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
        *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax", "rotary_interleaved"),
        *("multi_latent_attention", "attention_dropout", "hidden_dropout", "mtp_num_layers"),
        *("use_mup", "mup_base_hidden_size", "mup_width_mult", "mup_embedding_mult", "mup_output_mult", "mup_base_head_dim"),
        "mup_attn_scale_power",
    }
)
"""What the model's own config.json says."""

_ELSEWHERE: Mapping[str, str] = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "pipeline_model_parallel_layout": "layers_per_stage",
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
    "moe_aux_loss_coeff": "router_aux_loss",
    "deterministic_mode": "deterministic",
}
"""What a field of the engine's configuration says."""

_DECIDED = frozenset(
    {
        # The engine reduces gradients itself, once per update, and skips what is not finite.
        *("calculate_per_token_loss", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
        *(
            "overlap_grad_reduce",
            "overlap_param_gather",
            "bucket_size",
            "num_buckets",
            "average_in_collective",
            "check_for_nan_in_grad",
            "check_for_large_grads",
        ),
        *("moe_grad_scale_func", "mtp_grad_scale_func", "grad_norm_skip_threshold", "optimizer_cuda_graph"),
        *("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy", "num_distributed_optimizer_instances"),
        # A matrix is split over the ranks that its own sizes name.
        *("tensor_parallel_num_weight_shards", "gtp_weight_remat_size", "use_layer_wise_distributed_optimizer"),
        *("expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size"),
        # Micro-batches differ in length, and stages tell each other theirs.
        *("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm", "pipeline_dtype", "autocast_dtype", "enable_autocast"),
        # Gloo still sends an output when Megatron would free it.
        "deallocate_pipeline_outputs",
        # Weights are filled from the model's files, and the gradient norm counts what was marked while they were made.
        *("perform_initialization", "use_cpu_initialization", "init_method", "output_layer_init_method", "embedding_init_method"),
        # States are read and written by parameter, as float32 tensors that AdamW keeps.
        *("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype"),
        *("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_param_gather_with_optimizer_step", "cpu_offloading"),
        *("timers", "config_logger_dir", "barrier_with_L1_time", "cross_entropy_loss_fusion", "moe_router_load_balancing_type"),
    }
)
"""What the engine's way of computing needs as it is."""


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
        _check(given, key=key, known=[item.name for item in fields(known)], class_name=known.__name__)
    doubled = sorted(name for name in config.override_transformer_config if name.startswith("recompute_"))
    if doubled and config.recompute != "none":
        raise ConfigError(
            f"recompute is {config.recompute}, and override_transformer_config names {doubled[0]}, which it sets: remove one of them."
        )


def plain(overrides: Mapping[str, Override]) -> dict[str, object]:
    """As Megatron wants them: lists, not tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in overrides.items()}


def _check(given: Mapping[str, Override], *, key: str, known: Iterable[str], class_name: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]}?" if near else f": remove it, or look it up in {class_name}."
            raise ConfigError(f"{key} names {name!r}, which {class_name} of megatron-core {version('megatron-core')} does not have{hint}")
        if name in _CHOSEN_PER_BATCH:
            raise ConfigError(
                f"{key} names {name!r}, but context_parallel is one size for all micro-batches: remove it, and choose context_parallel for "
                "the longest of them."
            )
        if name in _ELSEWHERE:
            raise ConfigError(f"{key} names {name!r}, which {_ELSEWHERE[name]} of this configuration decides: set that instead.")
        if name in _OF_THE_MODEL:
            raise ConfigError(f"{key} names {name!r}, which the model's own config decides: change it there, or remove it here.")
        if name in _DECIDED:
            raise ConfigError(f"{key} names {name!r}, which the engine's way of computing needs as it is: remove it.")
