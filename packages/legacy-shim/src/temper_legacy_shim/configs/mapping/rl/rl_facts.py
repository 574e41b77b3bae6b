"""Facts of a PPO-like run for several builders: estimator, sizes, critic, reference."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rows import fact

ASYNC = "fully_async"
ONE_STEP_OFF = "one_step_off"


@fact
def estimator(draft: Draft) -> str:
    """Return the old estimator; gae if no one said."""
    # Dumped configurations have the enum's class before its value.
    return (
        draft.text("algorithm.adv_estimator").removeprefix("AdvantageEstimator.").lower() or "gae"
    )


@fact
def needs_critic(draft: Draft) -> bool:
    """Check if the old trainer built a critic: for gae, or as critic.enable says."""
    if only_distills(draft):
        return False
    # need_critic() of verl looks at critic.enable first, and at the estimator if it is null.
    given = draft.old.get("critic.enable")
    if isinstance(given, bool):
        return given
    return estimator(draft) == "gae"


def completions_per_prompt(draft: Draft) -> int:
    """Return the sampler's n; no release read the rollout.n of fully asynchronous programs."""
    return max(1, draft.integer("actor_rollout_ref.rollout.n") or 1)


@fact
def response_key(draft: Draft) -> str:
    """Return the key of the longest completion, which every release read from the sampler's block.

    It follows data.max_response_length, which is named where both say the same.
    """
    # rollout.yaml sets it to ${oc.select:data.max_response_length,512}, and samplers read no other.
    own, data = "actor_rollout_ref.rollout.response_length", "data.max_response_length"
    return own if own in draft.old.origin and draft.old.get(own) != draft.old.get(data) else data


@fact
def is_async(draft: Draft) -> bool:
    """Check if the old program trained while it sampled, without waiting."""
    return ASYNC in draft.old.entry or draft.old.has("async_training.staleness_threshold")


@fact
def uses_servers(draft: Draft) -> bool:
    """Check if a chat scheduler (v0.4.1) or agent loops asked servers for completions."""
    # Since v0.7.0, init_workers of the trainer sets async_rollout_mode in any case.
    mode = draft.text("actor_rollout_ref.rollout.mode")
    is_chosen = draft.since("v0.4.1") and (mode == "async" or is_async(draft))
    return draft.since("v0.7.0") or is_chosen


@fact
def reads_top_k(draft: Draft) -> bool:
    """Check if top_k had an effect: the first agent loops asked for temperature and top_p alone."""
    # AgentLoopWorker.generate_sequences has top_k since v0.7.1. The server of v0.4.1 had it as a
    # default of its OpenAI routes, which agent loops bypass.
    return not uses_servers(draft) or draft.since("v0.7.1") or not draft.since("v0.5.0")


@fact
def evaluation_key(draft: Draft) -> str:
    """Return the key of the evaluation's frequency; early asynchronous samplers evaluated."""
    # FullyAsyncRollouter read rollout.test_freq until v0.7.0. FullyAsyncTrainer, which evaluates
    # since v0.7.1, reads trainer.test_freq.
    return (
        "rollout.test_freq"
        if is_async(draft) and not draft.since("v0.7.1")
        else "trainer.test_freq"
    )


@fact
def updates_per_call(draft: Draft) -> int:
    """Return the updates of a call of the workers, after which the old schedule advanced.

    Between two weight syncs an asynchronous trainer called its workers several times. All these
    calls are one RL step here. Other trainers called them once in a step; 1 stands for it.
    """
    if not is_async(draft):
        return 1
    batches = draft.integer("async_training.require_batches")
    passes = draft.integer("actor_rollout_ref.actor.ppo_epochs")
    return max(1, batches or 1) * max(1, passes or 1)


@fact
def is_one_step_off(draft: Draft) -> bool:
    """Check if the old program sampled one step ahead."""
    return ONE_STEP_OFF in draft.old.entry


@fact
def has_sampler_gpus(draft: Draft) -> bool:
    """Check if the sampler had GPUs of its own, next to those of the trainer."""
    return is_async(draft) or is_one_step_off(draft)


def is_dapo(draft: Draft) -> bool:
    """Check if the trainer is that of DAPO's recipe or of another recipe with a group filter."""
    return "dapo" in draft.old.entry or "entropy" in draft.old.entry


@fact
def only_distills(draft: Draft) -> bool:
    """Check if teachers are the only training signal, without rewards."""
    return draft.switch("distillation.enabled") and not draft.switch(
        "distillation.distillation_loss.use_task_rewards"
    )


FILTER = "algorithm.filter_groups"
GENERATED = "data.gen_batch_size"
CORRECTION = "algorithm.rollout_correction"
_SECOND_TRAINER = "trainer.use_v1"


@fact
def filters_groups(draft: Draft) -> bool:
    """Check if groups with equal rewards were discarded, by DAPO or the second trainer."""
    # RayPPOTrainer, the first trainer of main_ppo, has no code for it.
    return draft.switch(f"{FILTER}.enable") and (is_dapo(draft) or is_second_trainer(draft))


@fact
def is_second_trainer(draft: Draft) -> bool:
    """Check if main_ppo ran the trainer that is the default since v0.9.0."""
    is_main = draft.old.entry.rpartition(".")[2] in ("", "ppo", "main_ppo")
    has_choice = is_main and not has_sampler_gpus(draft) and not is_dapo(draft)
    return has_choice and draft.switch(_SECOND_TRAINER)


def takes_sampler_logprobs(draft: Draft) -> bool:
    """Check if the ratio of the policy loss had the sampler's log-probs as denominator."""
    if is_async(draft) and not draft.since("v0.7.1"):
        return draft.switch("async_training.use_rollout_log_probs") and not draft.switch(
            "async_training.compute_prox_log_prob"
        )
    if is_dapo(draft) or (is_one_step_off(draft) and not draft.since("v0.7.0")):
        # Their fit() calls compute_log_prob of the actor in any case. That of one-step-off looks at
        # bypass_mode since v0.7.0.
        return False
    return draft.switch(f"{CORRECTION}.bypass_mode") or draft.switch(
        f"{CORRECTION}.use_policy_gradient"
    )


def kl_in_loss(draft: Draft) -> bool:
    """Check if the old actor's loss had an active KL term."""
    return draft.switch("actor_rollout_ref.actor.use_kl_loss")


def kl_in_reward(draft: Draft) -> bool:
    """Check if the reward carried a KL penalty: before v0.4.0 unless the loss had a KL term."""
    # Before, fit() called apply_kl_penalty whenever the actor's use_kl_loss was off.
    if draft.since("v0.4.0"):
        return draft.switch("algorithm.use_kl_in_reward")
    return not kl_in_loss(draft)


@fact
def kl_ctrl(draft: Draft) -> str:
    """Return the block of the KL in the reward; the first releases had it in the critic's."""
    blocks = ("algorithm.kl_ctrl", "critic.kl_ctrl")
    return next((block for block in blocks if draft.old.has(f"{block}.kl_coef")), blocks[0])


def kl_coefs(draft: Draft) -> tuple[float, float]:
    """Return the coefficients (loss, reward); 0 without a term."""
    loss = draft.number("actor_rollout_ref.actor.kl_loss_coef") if kl_in_loss(draft) else 0.0
    reward = draft.number(f"{kl_ctrl(draft)}.kl_coef") if kl_in_reward(draft) else 0.0
    return float(loss or 0.0), float(reward or 0.0)


@fact
def needs_ref(draft: Draft) -> bool:
    """Check if a reference policy changes anything."""
    return any(coef > 0 for coef in kl_coefs(draft))


def updates_per_step(draft: Draft) -> int:
    # A setting that equals our default is not written, and both defaults are 1.
    result = 1
    for key in ("batching.num_mini_batches", "batching.num_passes"):
        setting = draft.settings.get(key)
        result *= (
            int(setting.value) if setting is not None and isinstance(setting.value, int) else 1
        )
    return result


def prompts_of_step(draft: Draft) -> tuple[int | None, list[str]]:
    if is_async(draft):
        return _async_prompts(draft)
    # Without a filter nothing is left out of what the data loader returns.
    # RayPPOTrainer._create_dataloader takes gen_batch_size as the batch size since v0.4.0.
    is_loader = draft.since("v0.4.0") and not is_second_trainer(draft)
    if is_loader and not filters_groups(draft) and draft.old.get(GENERATED) is not None:
        return draft.integer(GENERATED), [GENERATED]
    prompts = draft.integer("data.train_batch_size")
    if prompts is not None and prompts < 1:
        draft.find("prompts-per-step", "data.train_batch_size", prompts=prompts)
        return None, []
    return prompts, ["data.train_batch_size"]


def _async_prompts(draft: Draft) -> tuple[int | None, list[str]]:
    """Return the prompts between two weight syncs, which are one step here."""
    keys = [
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "async_training.require_batches",
        "async_training.trigger_parameter_sync_step",
    ]
    mini = draft.integer(keys[0])
    if mini is None:
        return None, []
    return mini * max(1, draft.integer(keys[1]) or 1) * max(1, draft.integer(keys[2]) or 1), keys


_ROLLOUTS = "rollout.total_rollout_steps"


@fact
def num_weight_syncs(draft: Draft) -> int | None:
    """Return the weight syncs of an asynchronous run, which are steps; None if not known."""
    # One of total_rollout_steps is one prompt, and not a batch.
    rollouts, prompts = draft.integer(_ROLLOUTS), prompts_of_step(draft)[0]
    return None if rollouts is None or prompts is None else max(1, rollouts // prompts)


@fact
def weight_sync_keys(draft: Draft) -> str:
    return " and ".join([_ROLLOUTS, *prompts_of_step(draft)[1]])


@fact
def updates_of_run(draft: Draft) -> int | None:
    """Return the calls of an asynchronous run, in which FullyAsyncTrainer counts weight syncs."""
    syncs = num_weight_syncs(draft)
    return None if syncs is None else syncs * updates_per_call(draft)


@fact
def chooses_trainer(draft: Draft) -> bool:
    """Check if the program is main_ppo of a release with two trainers."""
    is_main = draft.old.entry.rpartition(".")[2] in ("", "main_ppo")
    is_known = _SECOND_TRAINER in draft.old.defaults
    return is_known and is_main and not has_sampler_gpus(draft)


@fact
def trainer_mode(draft: Draft) -> str:
    return draft.text("trainer.v1.trainer_mode") or "sync"


@fact
def written(draft: Draft) -> str:
    """Say if the user chose the trainer."""
    return "written" if draft.old.is_set(_SECOND_TRAINER) else "the default"


@fact
def evaluates(draft: Draft) -> bool:
    """Check if the old trainer evaluated held-out prompts."""
    # fit() reads it with a default of True, also in releases whose trees lack it.
    before = draft.switch("trainer.val_before_train") or not draft.old.has(
        "trainer.val_before_train"
    )
    return before or draft.frequency(evaluation_key(draft)) > 0


@fact
def has_eval_data(draft: Draft) -> bool:
    """Check if the new configuration sets held-out prompts or demonstrations."""
    return "data.eval.paths" in draft.settings
