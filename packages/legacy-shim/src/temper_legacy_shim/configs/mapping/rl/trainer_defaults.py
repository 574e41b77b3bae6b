"""The trainer's defaults of every key that a translation can set; a test compares them."""

from temper_legacy_shim.configs.reading.config_values import Plain

_OPTIMIZER: dict[str, Plain] = {
    "optimizer.name": "adamw",
    "optimizer.arguments": {},
    "optimizer.lr": 1e-6,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.01,
    "optimizer.decays_vectors": False,
    "optimizer.clip_grad_norm": 1.0,
    "schedule.kind": "constant",
    "schedule.warmup_steps": 0,
    "schedule.warmup_ratio": 0.0,
    "schedule.total_steps": None,
    "schedule.decay_steps": None,
    "schedule.min_lr_ratio": 0.0,
    "schedule.advance": "update",
}
_ENGINE: dict[str, Plain] = {
    "model.path": None,
    "model.trust_remote_code": False,
    "model.seed": 0,
    "precision.compute": "bf16",
    "precision.parameters": "fp32",
    "precision.reduce": "fp32",
    "precision.buffers": "fp32",
    "offload.parameters": False,
    "offload.gradients": None,
    "offload.optimizer": False,
    "offload.optimizer_on_cpu": False,
    "lora.rank": 0,
    "lora.alpha": None,
    "lora.dropout": 0.0,
    "lora.target_modules": "all-linear",
    "lora.exclude_modules": [],
    "lora.path": None,
    "device": "auto",
    "deterministic": False,
    "collective_timeout_s": 600.0,
}
_FSDP: dict[str, Plain] = {
    "strategy": "fsdp2",
    "sequence_parallel": 1,
    "fsdp_size": None,
    "reshard_after_forward": True,
    "forward_prefetch": 0,
    "wrap_modules": [],
    "activation_checkpointing": False,
    "head_keeps_logits": False,
}
_MEGATRON: dict[str, Plain] = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "virtual_pipeline": None,
    "context_parallel": 1,
    "expert_parallel": 1,
    "recompute": "none",
    "router_aux_loss": 0.0,
    "expert_tensor_parallel": None,
    "distributed_optimizer": False,
}
_ROLES = ("actor", "critic", "ref")

DEFAULTS: dict[str, Plain] = {
    "task": "rl",
    "loop": "sync",
    "use_legacy_worker_impl": "disable",
    "data.train.prompt_key": "question",
    "data.train.answer_key": "answer",
    "data.train.messages_key": None,
    "data.train.name": "jsonl",
    "data.train.max_rows": None,
    "data.eval.prompt_key": "question",
    "data.eval.answer_key": "answer",
    "data.eval.name": "jsonl",
    "data.eval.max_rows": None,
    "data.tokenizer.path": None,
    "data.max_prompt_tokens": 1024,
    "data.overlong_prompts": "error",
    "data.shuffle": True,
    "data.train_on": "all",
    "data.chat_template": None,
    "sampling.temperature": 1.0,
    "sampling.top_p": 1.0,
    "sampling.top_k": 0,
    "sampling.max_tokens": 512,
    "run.eval_num_completions": 1,
    "run.eval_sampling.temperature": 0.0,
    "run.eval_sampling.top_p": 1.0,
    "run.eval_sampling.top_k": 0,
    "run.eval_sampling.max_tokens": 512,
    "rollout.sampler": "hf",
    "rollout.dtype": "fp32",
    "rollout.num_replicas": 1,
    "rollout.max_concurrent": 256,
    "rollout.pool": "train",
    "rollout.canary_tolerance": None,
    "rollout.vllm.tensor_parallel_size": 1,
    "rollout.vllm.gpu_memory_utilization": None,
    "rollout.vllm.max_model_len": None,
    "rollout.vllm.max_num_batched_tokens": None,
    "rollout.vllm.enforce_eager": False,
    "rollout.vllm.enable_chunked_prefill": None,
    "rollout.vllm.enable_prefix_caching": True,
    "rollout.vllm.load_format": "dummy",
    "rollout.vllm.sleep_level": 0,
    "algorithm.advantage.name": "grpo",
    "algorithm.group_size": 8,
    "algorithm.policy_loss.name": "ppo",
    "algorithm.policy_loss.clip_low": 0.2,
    "algorithm.policy_loss.clip_high": 0.2,
    "algorithm.policy_loss.dual_clip": None,
    "algorithm.policy_loss.fraction": 2e-4,
    "algorithm.policy_loss.min_covariance": 1.0,
    "algorithm.policy_loss.max_covariance": 5.0,
    "algorithm.policy_loss.kl_cov_coef": 1.0,
    "algorithm.policy_loss.positive_temperature": 1.0,
    "algorithm.policy_loss.negative_temperature": 1.05,
    "algorithm.aggregation": "token_mean",
    "algorithm.horizon": None,
    "algorithm.entropy_coef": 0.0,
    "algorithm.kl_loss_coef": 0.0,
    "algorithm.kl_reward_coef": 0.0,
    "algorithm.kl_reference": "ref",
    "algorithm.kl_controller.horizon_completions": 10_000,
    "algorithm.kl_estimator": "k3",
    "algorithm.kl_clamp": None,
    "algorithm.advantage.gamma": 1.0,
    "algorithm.advantage.gae_lambda": 1.0,
    "algorithm.whiten_advantages": False,
    "algorithm.advantage.value_clip": None,
    "batching.prompts_per_step": 64,
    "batching.num_mini_batches": 1,
    "batching.num_passes": 1,
    "batching.max_tokens": 16384,
    "reward.function": "gsm8k_strict",
    "reward.num_workers": 0,
    "reward.timeout_s": 10.0,
    "runtime.kind": "inline",
    "runtime.gpus_per_worker": 0.0,
    "run.dir": "runs/default",
    "run.seed": 0,
    "run.total_steps": 100,
    "run.resume": "never",
    "run.save_every": 0,
    "run.save_interval_s": 900.0,
    "run.max_ckpt_to_keep": 2,
    "run.eval_every": 0,
    "run.num_table_rows": 4,
    "run.trackers": ["jsonl", "tensorboard"],
    "generate.num_completions": 1,
    "generate.file": "completions.jsonl",
    **{f"{role}.num_workers": 1 for role in _ROLES},
    **{f"{role}.pool": "train" for role in _ROLES},
    **{
        f"{role}.engine.{key}": value
        for role in _ROLES
        for block in (_ENGINE, _FSDP, _MEGATRON)
        for key, value in block.items()
    },
    **{
        f"{role}.engine.{key}": value
        for role in ("actor", "critic")
        for key, value in _OPTIMIZER.items()
    },
    "critic.engine.optimizer.lr": 1e-5,
}
"""Defaults by dotted key; other keys are always written."""


_CLIPS: dict[Plain, tuple[float, float]] = {
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "gmpo": (0.4, 0.4),
    "dppo": (0.15, 0.15),
}
LOSS_DEFAULTS: dict[Plain, dict[str, Plain]] = {
    loss: {"algorithm.policy_loss.clip_low": low, "algorithm.policy_loss.clip_high": high}
    for loss, (low, high) in _CLIPS.items()
}
"""Defaults of policy losses where they differ from those of ppo, by the name of the loss."""


def is_our_default(key: str, value: Plain, *, policy_loss: Plain = "ppo") -> bool:
    """Check if the key can be left out without a change."""
    defaults = DEFAULTS | LOSS_DEFAULTS.get(policy_loss, {})
    return (
        key in defaults
        and defaults[key] == value
        and isinstance(value, bool) == isinstance(defaults[key], bool)
    )
