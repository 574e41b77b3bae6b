"""What several builders of a PPO-like run have to know: its estimator, its sizes, whether there is a critic or a reference."""

from temper_legacy_shim.configs.draft import Draft

ASYNC = "fully_async"
ONE_STEP_OFF = "one_step_off"


def advantage(draft: Draft) -> str:
    """The old estimator; gae where nobody said."""
    return draft.text("algorithm.adv_estimator").removeprefix("AdvantageEstimator.").lower() or "gae"


def needs_critic(draft: Draft) -> bool:
    """Whether the old trainer built a critic: for gae, unless critic.enable says otherwise."""
    if only_distills(draft):
        return False
    said = draft.old.get("critic.enable")
    if isinstance(said, bool):
        return said
    return advantage(draft) == "gae"


def completions_per_prompt(draft: Draft) -> int:
    """rollout.n; a fully asynchronous run has it under its own block too."""
    own = draft.integer("rollout.n") if is_async(draft) and draft.old.has("rollout.n") else None
    return max(1, own or draft.integer("actor_rollout_ref.rollout.n") or 1)


def is_async(draft: Draft) -> bool:
    """Whether the old program trained while it sampled, without waiting."""
    return ASYNC in draft.old.entry or draft.old.has("async_training.staleness_threshold")


def is_one_step_off(draft: Draft) -> bool:
    """Whether the old program sampled one step ahead."""
    return ONE_STEP_OFF in draft.old.entry


def is_dapo(draft: Draft) -> bool:
    """Whether it is the trainer of DAPO's recipe, or one that filters groups."""
    return "dapo" in draft.old.entry or "entropy" in draft.old.entry


def only_distills(draft: Draft) -> bool:
    """Whether teachers alone said what is better, and no reward."""
    return draft.switch("distillation.enabled") and not draft.switch("distillation.distillation_loss.use_task_rewards")


def filters_groups(draft: Draft) -> bool:
    """DAPO's dynamic sampling."""
    return draft.switch("algorithm.filter_groups.enable")


def kl_in_loss(draft: Draft) -> bool:
    """Whether the old actor's loss had a KL term that does something."""
    return draft.switch("actor_rollout_ref.actor.use_kl_loss")


def kl_in_reward(draft: Draft) -> bool:
    """Whether the reward carried a KL penalty; before v0.4.0 it did unless the loss had one."""
    if draft.since("v0.4.0"):
        return draft.switch("algorithm.use_kl_in_reward")
    return not kl_in_loss(draft)


def kl_coefs(draft: Draft) -> tuple[float, float]:
    """(of the loss, of the reward); 0 where there is none."""
    loss = draft.number("actor_rollout_ref.actor.kl_loss_coef") if kl_in_loss(draft) else 0.0
    key = next((key for key in ("algorithm.kl_ctrl.kl_coef", "critic.kl_ctrl.kl_coef") if draft.old.has(key)), "algorithm.kl_ctrl.kl_coef")
    reward = draft.number(key) if kl_in_reward(draft) else 0.0
    return float(loss or 0.0), float(reward or 0.0)


def needs_ref(draft: Draft) -> bool:
    """Whether a reference policy changes anything."""
    return any(coef > 0 for coef in kl_coefs(draft))


def updates_per_step(draft: Draft) -> int:
    """As put by the batch builder."""
    found = 1
    for key in ("batching.num_mini_batches", "batching.num_passes"):
        setting = draft.settings.get(key)
        found *= int(setting.value) if setting is not None and isinstance(setting.value, int) else 1
    return found


def prompts_of_step(draft: Draft) -> tuple[int | None, list[str]]:
    """Prompts of one step and the keys that say so."""
    if is_async(draft):
        return _async_prompts(draft)
    if is_dapo(draft) and not filters_groups(draft) and draft.old.has("data.gen_batch_size"):
        key = "data.gen_batch_size"  # that recipe's data loader goes by it, and without the filter nothing is left out
        return draft.integer(key), [key]
    prompts = draft.integer("data.train_batch_size")
    if prompts is not None and prompts < 1:
        draft.find("person", "prompts-per-step", f"data.train_batch_size is {prompts}, but must be at least 1.", "data.train_batch_size")
        return None, []
    return prompts, ["data.train_batch_size"]


def _async_prompts(draft: Draft) -> tuple[int | None, list[str]]:
    """Between two weight syncs the old trainer took so many mini-batches: those are one step here."""
    keys = ["actor_rollout_ref.actor.ppo_mini_batch_size", "async_training.require_batches", "async_training.trigger_parameter_sync_step"]
    mini = draft.integer(keys[0])
    if mini is None:
        return None, []
    return mini * max(1, draft.integer(keys[1]) or 1) * max(1, draft.integer(keys[2]) or 1), keys
