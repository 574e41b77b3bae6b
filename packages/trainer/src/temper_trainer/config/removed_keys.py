"""Keys of the older generation, each with its replacement; they are rejected with a hint."""

import re

from temper_engine_api.errors import format_install

REPLACEMENTS = {
    "distillation.enable_resource_pool": "nothing: each teacher has its own teachers.NAME.pool",
    "distillation.teacher_model": "teachers.NAME, which has its own teachers.NAME.pool",
    "distillation.teacher_models": "teachers.NAME, which has its own teachers.NAME.pool",
    "data.train_files": "data.train.paths=[FILE] with data.train=parquet or jsonl",
    "data.val_files": "data.eval.paths=[FILE] with data.eval=parquet or jsonl",
    "data.train_batch_size": "batching.prompts_per_step",
    "data.val_batch_size": "nothing: the sampler decodes rollout.max_concurrent sequences at once",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "sampling.max_tokens, and run.eval_sampling.max_tokens",
    "data.prompt_key": "data.train.prompt_key and data.eval.prompt_key",
    "data.truncation": "data.overlong_prompts=error or drop; prompts are never cut",
    "data.filter_overlong_prompts": "data.overlong_prompts=drop",
    "algorithm.adv_estimator": "the group algorithm=NAME, or algorithm.advantage",
    "algorithm.lam": "algorithm.advantage.gae_lambda",
    "algorithm.use_kl_in_reward": "algorithm.kl_reward_coef above 0, and ref=frozen",
    "algorithm.kl_penalty": "algorithm.kl_estimator (k1 for kl, k2 for mse, k3 for low_var_kl)",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_reward_coef",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage (grpo for true, dr_grpo for false)",
    "actor_rollout_ref.model.path": "actor.engine.model.path",
    "actor_rollout_ref.model.lora_rank": "actor.engine.lora.rank",
    "actor_rollout_ref.model.use_remove_padding": "nothing: batches have no padding",
    "actor_rollout_ref.model.enable_gradient_checkpointing": (
        "actor.engine.activation_checkpointing"
    ),
    "actor_rollout_ref.actor.strategy": "the group model_engine=fsdp",
    "actor_rollout_ref.actor.optim.lr": "actor.engine.optimizer.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "batching.num_mini_batches, a number of updates",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "batching.max_tokens, in tokens",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "batching.max_tokens",
    "actor_rollout_ref.actor.use_dynamic_bsz": "nothing: batches are balanced by tokens",
    "actor_rollout_ref.actor.ppo_epochs": "batching.num_passes",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.policy_loss.clip_low and clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.policy_loss.dual_clip",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_loss_coef above 0, and ref=frozen",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_loss_coef, and ref=frozen",
    "actor_rollout_ref.actor.kl_loss_type": (
        "algorithm.kl_estimator (k2 for mse, k3 for low_var_kl)"
    ),
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "actor.engine.offload.parameters",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "actor.engine.offload.optimizer",
    "actor_rollout_ref.rollout.name": "rollout.sampler",
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "critic.optim.lr": "critic.engine.optimizer.lr",
    "critic.model.path": "critic.engine.model.path",
    "critic.ppo_mini_batch_size": "batching.num_mini_batches, which applies to all roles",
    "critic.ppo_micro_batch_size_per_gpu": "batching.max_tokens",
    "critic.ppo_micro_batch_size": "batching.max_tokens",
    "critic.cliprange_value": "algorithm.advantage.value_clip",
    "critic.optim": "critic.engine.optimizer and critic.engine.schedule",
    "critic.model": "critic.engine.model and critic.engine",
    "critic.fsdp": "critic.engine",
    "critic.megatron": "critic.engine",
    "critic.strategy": "critic.engine.strategy (fsdp1 for fsdp)",
    "algorithm.kl_ctrl": "algorithm.kl_reward_coef and kl_controller",
    "algorithm.filter_groups": "algorithm.dynamic_sampling",
    "algorithm.use_pf_ppo": "algorithm.reweight",
    "data.custom_cls": "data.train.paths: write the rows of your data set class to a file",
    "data.micro_batch_size_per_gpu": "batching.max_tokens",
    "data.micro_batch_size": "batching.max_tokens",
    "data.max_length": "data.max_prompt_tokens, and batching.max_tokens for whole demonstrations",
    "reward_model.enable": "reward.function=reward_model and reward.model.engine.model",
    "custom_reward_function.path": "reward.function=package.module:function",
    "trainer.total_epochs": "run.total_epochs",
    "trainer.total_training_steps": "run.total_steps",
    "trainer.save_freq": (
        "run.save_every (0 for -1), and run.save_interval_s=null, which turns off saves by time"
    ),
    "trainer.test_freq": (
        "run.eval_every (0 for -1: evaluate only before the first and after the last step)"
    ),
    "trainer.logger": "run.trackers",
    "trainer.default_local_dir": "run.dir",
    "trainer.resume_mode": "run.resume",
    "trainer.nnodes": "actor.num_workers under runtime.kind=ray",
    "trainer.n_gpus_per_node": "actor.num_workers and runtime.gpus_per_worker with Ray",
    "trainer.use_legacy_worker_impl": "use_legacy_worker_impl, at the top level",
}
"""The key or keys to use now, or the reason why none is needed."""

REMOVED_BLOCKS = (
    *("actor_rollout_ref", "reward_model", "custom_reward_function", "trainer", "optim", "engine"),
    *("model", "ray_init", "ray_kwargs", "global_profiler", "async_training"),
)
"""Top-level blocks that no longer exist."""

_OLD_CONFIG_NAMES = re.compile(
    r"(ppo|sft|dapo|entropy|one_step_off_ppo|fully_async_ppo)(_megatron)?_trainer(_engine)?"
    r"|generation|evaluation"
)
"""File names of the older generation's configurations."""

_OLD_CONFIG_HINT = (
    " This is a configuration of the older generation: `temper-migrate config --config-name NAME "
    "KEY=VALUE...` translates it with its overrides, and `temper-migrate script FILE` a launch "
    f"script. To install it: {format_install('temper-legacy-shim')}."
)

_COLOCATED = re.compile(r"colocat|share_?pool", re.IGNORECASE)
_SLEEPING = re.compile(r"sleep|free_?cache_?engine|wake_?up|offload", re.IGNORECASE)
"""Settings of other systems that colocate a teacher, or free its memory between steps."""


def describe_refused_teacher_key(key: str) -> str | None:
    """Return the error message for a key that asks for a colocated or sleeping teacher, else None.

    Args:
        key: Dotted key that does not exist.
    """
    root, _, rest = key.partition(".")
    setting = rest.partition(".")[2]  # after the teacher's own name
    is_colocated = _COLOCATED.search(setting) is not None
    if root != "teachers" or not (is_colocated or _SLEEPING.search(setting)):
        return None
    return (
        f"{key} is for a teacher that {'shares devices' if is_colocated else 'sleeps'}, which is "
        "not supported: teachers are queried in every step while the policy samples and trains, so "
        "they have their own resource pool (teachers.NAME.pool) and never sleep. Remove it."
    )


def describe_old_config(name: str) -> str:
    """Return a hint for the end of an error message if a file name is an old configuration's."""
    return _OLD_CONFIG_HINT if _OLD_CONFIG_NAMES.fullmatch(name) else ""


def describe_removed_key(key: str) -> str | None:
    """Return the error message for a key of the older generation, else None."""
    hint = (
        f"`temper-migrate explain {key}` explains more; `temper-migrate config FILE` translates a "
        "whole file or old overrides, and `temper-migrate script FILE` a launch script. To install "
        f"it: {format_install('temper-legacy-shim')}."
    )
    if key == "model":
        return f"there is no key model: to name a model, set actor.engine.model.path. {hint}"
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if replacement := REPLACEMENTS.get(".".join(parts[:length])):
            return f"{key} is a key of the older generation; use: {replacement}. {hint}"
    if parts[0] in REMOVED_BLOCKS:
        return f"{key} is in the config section {parts[0]} of the older generation. {hint}"
    return None
