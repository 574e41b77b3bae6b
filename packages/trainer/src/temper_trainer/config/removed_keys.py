"""Removed and renamed keys, each with its replacement; they are rejected with a hint."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from temper_engine_api.errors import format_install
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.algorithms.distillation_losses.distillation_loss import DistillationLoss
from temper_trainer.algorithms.distillation_losses.sampled_token_losses import ReverseKlReward
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.algorithms.preference_losses.preference_loss import PreferenceLoss
from temper_trainer.algorithms.resampling import Reweighting
from temper_trainer.config.data import DatasetsSource, DataSource
from temper_trainer.config.rollout_correction import RolloutCorrection, RolloutRatio
from temper_trainer.settings.variants import Custom, Variant, list_variants

SINCE = "0.1"
"""First release that rejects these keys."""


_REMOVED_IN_0_1 = {
    "distillation.enable_resource_pool": (
        "nothing: every teacher has its own resource pool, teachers.NAME.pool"
    ),
    "distillation.teacher_model.enable_resource_pool": (
        "nothing: every teacher has its own resource pool, teachers.NAME.pool"
    ),
    "data.train_files": "data.train.paths=[FILE] with data.train=parquet or jsonl",
    "data.val_files": "data.eval.paths=[FILE] with data.eval=parquet or jsonl",
    "data.train_batch_size": "batching.prompts_per_step",
    "data.val_batch_size": "nothing: evaluation decodes rollout.max_concurrent sequences together",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": (
        "sampling.max_tokens, and run.eval_sampling.max_tokens for evaluation"
    ),
    "data.prompt_key": "data.train.prompt_key and data.eval.prompt_key",
    "data.truncation": "data.overlong_prompts=error or drop; prompts are never cut",
    "data.filter_overlong_prompts": "data.overlong_prompts=drop",
    "algorithm.adv_estimator": "the group algorithm=NAME, or algorithm.advantage",
    "algorithm.lam": "algorithm.advantage.gae_lambda",
    "algorithm.use_kl_in_reward": "algorithm.kl_reward_coef above 0 together with ref=frozen",
    "algorithm.kl_penalty": "algorithm.kl_estimator (kl is k1, mse is k2, low_var_kl is k3)",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_reward_coef",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage=grpo (true) or dr_grpo (false)",
    "actor_rollout_ref.model.path": "actor.engine.model.path",
    "actor_rollout_ref.model.lora_rank": "actor.engine.lora.rank",
    "actor_rollout_ref.model.use_remove_padding": (
        "nothing: engines always pack, there is no padding"
    ),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (
        "actor.engine.activation_checkpointing"
    ),
    "actor_rollout_ref.actor.strategy": "the group model_engine=fsdp",
    "actor_rollout_ref.actor.optim.lr": "actor.engine.optimizer.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        "batching.num_mini_batches, the number of updates: prompts_per_step / ppo_mini_batch_size"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": (
        "batching.max_tokens: micro-batches are capped in tokens, not in sequences"
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "batching.max_tokens",
    "actor_rollout_ref.actor.use_dynamic_bsz": (
        "nothing: micro-batches are always balanced by tokens"
    ),
    "actor_rollout_ref.actor.ppo_epochs": "batching.num_passes",
    "actor_rollout_ref.actor.clip_ratio": (
        "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high"
    ),
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.policy_loss.dual_clip",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.use_kl_loss": (
        "algorithm.kl_loss_coef above 0 together with ref=frozen"
    ),
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_loss_coef together with ref=frozen",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_estimator (mse is k2, low_var_kl is k3)",
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
    "critic.strategy": "critic.engine.strategy (fsdp is fsdp1)",
    "algorithm.kl_ctrl": "algorithm.kl_reward_coef and kl_controller",
    "algorithm.filter_groups": "algorithm.dynamic_sampling",
    "algorithm.use_pf_ppo": "algorithm.reweight",
    "data.custom_cls": "data.train.paths: write the rows of your data set class to a file",
    "data.micro_batch_size_per_gpu": "batching.max_tokens",
    "data.micro_batch_size": "batching.max_tokens",
    "data.max_length": "data.max_prompt_tokens, and batching.max_tokens for whole demonstrations",
    "reward_model.enable": "reward.function=reward_model and reward.model.engine.model",
    "custom_reward_function.path": "reward.function=package.module:function",
    "trainer.total_epochs": "run.total_steps: epochs * prompts / batching.prompts_per_step",
    "trainer.total_training_steps": "run.total_steps",
    "trainer.save_freq": "run.save_every (-1 is 0); run.save_interval_s=null saves by steps alone",
    "trainer.test_freq": "run.eval_every (-1 is 0: only before and after)",
    "trainer.logger": "run.trackers",
    "trainer.default_local_dir": "run.dir",
    "trainer.resume_mode": "run.resume",
    "trainer.nnodes": "actor.num_workers under runtime.kind=ray",
    "trainer.n_gpus_per_node": (
        "actor.num_workers and runtime.gpus_per_worker under runtime.kind=ray"
    ),
    "trainer.use_legacy_worker_impl": "use_legacy_worker_impl, at the top level",
}

_REMOVED_IN_0_2 = {
    "algorithm.rollout_correction.proximal": (
        "algorithm.rollout_correction=rollout_ratio in place of proximal rollout"
    ),
    "algorithm.rollout_correction.mask_low": (
        "algorithm.rollout_correction.reject, with ratio_token.low (for sequence: ratio_sum.low)"
    ),
    "algorithm.rollout_correction.mask_high": (
        "algorithm.rollout_correction.reject, with ratio_token.high (for sequence: ratio_sum.high)"
    ),
    "algorithm.rollout_correction.mask_only": (
        "algorithm.rollout_correction.reject, with ratio_token or ratio_sum, and "
        "rollout_correction.name=mask"
    ),
    "algorithm.rollout_correction.reject_kl_estimator": (
        "algorithm.rollout_correction.reject, with k2_mean.high or k3_mean.high"
    ),
    "algorithm.rollout_correction.reject_kl": (
        "algorithm.rollout_correction.reject, with k3_mean.high, or the rule of another estimator"
    ),
    "distillation.apply_as": (
        "distillation.objective=reverse_kl_reward for reward; the others are losses"
    ),
}

REMOVED_KEYS: Mapping[str, Mapping[str, str]] = {SINCE: _REMOVED_IN_0_1, "0.2": _REMOVED_IN_0_2}
"""The key or keys to use now, or the reason why none is needed. By key, within the first release
that rejects it.
"""


RENAMED_SINCE = "0.2"
"""First release with the new names below."""

RENAMED_KEYS = {
    "algorithm.advantage_arguments": "algorithm.advantage.arguments",
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.gae_lambda": "algorithm.advantage.gae_lambda",
    "algorithm.value_clip": "algorithm.advantage.value_clip",
    "algorithm.reweight.method": "algorithm.reweight.name",
    "algorithm.policy_loss_arguments": "algorithm.policy_loss.arguments",
    "algorithm.clip_low": "algorithm.policy_loss.clip_low",
    "algorithm.clip_high": "algorithm.policy_loss.clip_high",
    "algorithm.dual_clip": "algorithm.policy_loss.dual_clip",
    "algorithm.cov_share": "algorithm.policy_loss.fraction",
    "algorithm.cov_low": "algorithm.policy_loss.min_covariance",
    "algorithm.cov_high": "algorithm.policy_loss.max_covariance",
    "algorithm.kl_cov_coef": "algorithm.policy_loss.kl_cov_coef",
    "algorithm.sapo_positive_temperature": "algorithm.policy_loss.positive_temperature",
    "algorithm.sapo_negative_temperature": "algorithm.policy_loss.negative_temperature",
    "algorithm.rollout_correction.level": "algorithm.rollout_correction.name",
    "algorithm.kl_target": "algorithm.kl_controller.target",
    "algorithm.kl_horizon": "algorithm.kl_controller.horizon_completions",
    "algorithm.entropy_target": "algorithm.entropy_controller.target",
    "algorithm.entropy_coef_step": "algorithm.entropy_controller.coef_step",
    "algorithm.entropy_coef_max": "algorithm.entropy_controller.coef_max",
    "preference.loss": "preference.name",
    "preference.center_coef": "rm.center_coef",
    "reward.max_failure_share": "reward.max_failure_fraction",
    "distillation.kl_estimator": "distillation.objective.kl_estimator",
    "distillation.top_k": "distillation.objective.top_k",
    "distillation.tail": "distillation.objective.tail",
    "distillation.mixture": "distillation.objective.mixture",
}
"""New keys by the key of 0.1; the values kept their meaning, except for RENAMED_VALUES."""

RENAMED_VALUES = {
    "preference.name": {"sigmoid": "dpo"},
    "algorithm.rollout_correction.name": {"none": "mask"},
}
"""New values by the value of 0.1, by the present key."""

RENAMED_ENGINE_KEYS = {
    "residency": "offload",
    "residency.offload_parameters": "offload.parameters",
    "residency.offload_gradients": "offload.gradients",
    "residency.offload_optimizer": "offload.optimizer",
    "residency.load_optimizer_in": "offload.load_optimizer_in",
    "residency.optimizer_on_cpu": "offload.optimizer_on_cpu",
}
"""New keys below the engine of any role, by the key of 0.1."""


REMOVED_BLOCKS = (
    "actor_rollout_ref",
    "reward_model",
    "custom_reward_function",
    "trainer",
    "optim",
    "engine",
    "model",
    "ray_init",
    "ray_kwargs",
    "global_profiler",
    "async_training",
)
"""Top-level blocks that no longer exist."""


OLD_CONFIG_NAMES = (
    *(
        "ppo_trainer",
        "ppo_megatron_trainer",
        "sft_trainer",
        "sft_trainer_engine",
        "generation",
        "evaluation",
        "dapo_trainer",
    ),
    *(
        "dapo_megatron_trainer",
        "entropy_trainer",
        "one_step_off_ppo_trainer",
        "one_step_off_ppo_megatron_trainer",
    ),
    *("fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer"),
)
"""File names of the older generation's configurations."""


OLD_CONFIG_HINT = (
    "This is a configuration of the older generation: `temper-migrate config --config-name NAME "
    "KEY=VALUE...` translates it with its overrides, and `temper-migrate script FILE` a launch "
    f"script. To install it: {format_install('temper-legacy-shim')}."
)


COLOCATION_NAMES = ("colocated", "colocate", "is_colocated", "enable_colocation", "share_pool")
"""Names of settings in other systems that colocate a teacher; compared without underscores and
case.
"""


SLEEP_NAMES = (
    *(
        "sleep",
        "sleep_level",
        "sleep_mode",
        "enable_sleep",
        "enable_sleep_mode",
        "free_cache_engine",
        "wake_up",
        "offload",
    ),
    *("param_offload", "cpu_offload", "offload_to_cpu"),
)
"""Names of settings in other systems that let a teacher sleep or offload it between steps."""


def describe_refused_teacher_key(key: str) -> str | None:
    """Return the error message for a key that asks for a colocated or sleeping teacher, else None.

    Args:
        key: Dotted key that does not exist.
    """
    parts = key.split(".")
    if parts[0] != "teachers":
        return None
    words = {part.replace("_", "").lower() for part in parts[2:]}  # after the teacher's own name
    if words & {name.replace("_", "") for name in COLOCATION_NAMES}:
        kind = "shares devices"
    elif words & {name.replace("_", "") for name in SLEEP_NAMES}:
        kind = "sleeps"
    else:
        return None
    return (
        f"{key} is for a teacher that {kind}, which is not supported: teachers are queried in "
        "every step while the policy samples and trains, so they have their own resource pool "
        "(teachers.NAME.pool) and never sleep. Remove it."
    )


def describe_removed_key(key: str) -> str | None:
    """Return the error message for a removed key, else None."""
    if key.startswith("distillation.teacher_models.") and key.endswith(".enable_resource_pool"):
        # Between the two is the teacher's name.
        key = "distillation.enable_resource_pool"
    for since, replacements in REMOVED_KEYS.items():
        for removed, replacement in replacements.items():
            if key == removed or key.startswith(f"{removed}."):
                return f"{key} was removed in {since}; use: {replacement}. {_hint(key)}"
    block = key.partition(".")[0]
    if block in REMOVED_BLOCKS:
        return (
            f"{key} is in the config section {block} of the older generation; the section was "
            f"removed in {SINCE}. {_hint(key)}"
        )
    return None


def find_new_key(key: str) -> str | None:
    """Return the present name of a key of 0.1 that was renamed, else None."""
    for old, new in RENAMED_KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    if source := _SOURCE_KIND.fullmatch(key):
        return f"{source['block']}.name"
    role, engine, engine_key = key.partition(".engine.")
    engine_key = RENAMED_ENGINE_KEYS.get(engine_key, "")
    return f"{role}{engine}{engine_key}" if engine_key else None


_SOURCE_KIND = re.compile(
    r"(?P<block>data\.(train|eval)|data\.(train|eval)_sets\.[^.]+|warm_start\.data)\.kind"
)
"""Key of 0.1 that chose a data source."""


UNIONS: Mapping[str, type[Variant]] = {
    "algorithm.advantage": AdvantageEstimator,
    "algorithm.policy_loss": PolicyLoss,
    "algorithm.reweight": Reweighting,
    "algorithm.rollout_correction": RolloutCorrection,
    "distillation.objective": DistillationLoss,
    "preference": PreferenceLoss,
}
"""Settings that were a name in 0.1, with those of all names next to it, or one block for all."""


OPTIONAL_BLOCKS = {"algorithm.kl_controller": "target", "algorithm.entropy_controller": "target"}
"""Blocks whose settings were next to each other in 0.1, and the one whose null was `off`."""


def rename_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a run of 0.1 under their present keys.

    Args:
        settings: By dotted key; present ones are returned unchanged.

    Returns:
        Without the settings of variants that the run did not use.
    """
    renamed = {find_new_key(key) or key: value for key, value in settings.items()}
    if renamed.pop("distillation.apply_as", "loss") == "reward":
        renamed["distillation.objective"] = ReverseKlReward.name
    for key, values in RENAMED_VALUES.items():
        if key in renamed:
            renamed[key] = values.get(str(renamed[key]), renamed[key])
    if settings.get("task") == "rm" and "preference.label_smoothing" in renamed:
        # Tasks dpo and rm had this key in common.
        renamed["rm.label_smoothing"] = renamed.pop("preference.label_smoothing")
    if renamed.pop("algorithm.rollout_correction.proximal", "old") == "rollout":
        renamed["algorithm.rollout_correction.name"] = RolloutRatio.name
    for block, switch in OPTIONAL_BLOCKS.items():
        own_keys = [key for key in renamed if key.startswith(f"{block}.")]
        if own_keys and renamed.get(f"{block}.{switch}") is None:
            renamed = {key: value for key, value in renamed.items() if key not in own_keys}
            renamed[block] = None
    sources = [match["block"] for key in settings if (match := _SOURCE_KIND.fullmatch(key))]
    for block in sources:
        paths = renamed.get(f"{block}.paths")
        if renamed[f"{block}.name"] == DatasetsSource.name and isinstance(paths, list | tuple):
            renamed[f"{block}.path"] = paths[0]
    for block, union in {**UNIONS, **dict.fromkeys(sources, DataSource)}.items():
        if renamed.get(block) is not None:
            renamed[f"{block}.name"] = renamed.pop(block)
        if f"{block}.name" not in renamed:
            continue
        chosen: Any = list_variants(union).get(str(renamed[f"{block}.name"]), Custom)
        own = {"name", *(field.name for field in fields(chosen))}
        renamed = {
            key: value
            for key, value in renamed.items()
            if not key.startswith(f"{block}.")
            or key.removeprefix(f"{block}.").partition(".")[0] in own
        }
    return renamed


def describe_renamed_key(key: str) -> str | None:
    """Return the error message for a renamed key, else None."""
    new = find_new_key(key)
    if new is None:
        return None
    values = "".join(
        f"{value} is now {new_value}, and "
        for value, new_value in RENAMED_VALUES.get(new, {}).items()
    )
    block = new.rpartition(".")[0]
    null = f" Instead of null, leave out {block}." if block in OPTIONAL_BLOCKS else ""
    return (
        f"{key} was renamed in {RENAMED_SINCE} to {new}; {values}its "
        f"{'other ' if values else ''}values mean the same. Write the new name.{null}"
    )


def _hint(key: str) -> str:
    return (
        f"`temper-migrate explain {key}` explains more; `temper-migrate config FILE` translates a "
        "whole file or old overrides, and `temper-migrate script FILE` a launch script (pip "
        "install temper-legacy-shim)."
    )
