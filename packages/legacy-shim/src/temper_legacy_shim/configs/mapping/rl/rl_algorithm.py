"""Advantages, the policy's loss, clipping, KL and entropy of a PPO-like run."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    CORRECTION,
    advantage,
    completions_per_prompt,
    kl_coefs,
    kl_in_loss,
    needs_critic,
    needs_ref,
    only_distills,
    response_key,
    takes_sampler_logprobs,
    updates_per_step,
    uses_servers,
)
from temper_legacy_shim.configs.mapping.roles.numerics_changes import has_engines
from temper_legacy_shim.configs.mapping.rules import apply_rules
from temper_legacy_shim.configs.translation import Setting

ACTOR = "actor_rollout_ref.actor"
_ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "gdpo": "gdpo",
    "grpo_passk": "grpo_passk",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
_IN_GROUPS = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "gdpo",
    "grpo_passk",
    "optimal_token_baseline",
)
_BARE_SINGLE = ("grpo", "dr_grpo", "rloo", "opo")
"""Estimators that took the bare reward of a completion that is alone in its group."""
BARE_REWARD = "temper_legacy_shim.old_algorithms:bare_reward"
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_KL_CLAMP = 10.0
"""Bound on the k3 of a token; a constant of every release."""


def build_algorithm(draft: Draft) -> None:
    """Set the block ``algorithm``."""
    name = _advantage(draft)
    build_policy_loss(draft)
    _clip(draft)
    _aggregation(draft)
    _kl(draft)
    facts = {"estimator": name}
    apply_rules(draft, "gamma", "gae-lambda", "whitening", "value-clip", facts=facts)


def _aggregation(draft: Draft) -> None:
    """Set the aggregation of the policy's losses, and report a critic with another loss."""
    key, mode = f"{ACTOR}.loss_agg_mode", draft.text(f"{ACTOR}.loss_agg_mode") or "token-mean"
    loss = draft.settings.get("algorithm.policy_loss.name")
    if loss is not None and mode != "seq-mean-token-mean" and _has_own_aggregation(draft, loss):
        draft.put(
            "algorithm.aggregation",
            "sequence_mean_token_mean",
            rule="aggregation",
            old=loss.old_keys,
        )
        draft.explain_drop(key, f"{loss.value} took the mean of completions' means in any case")
        if kl_coefs(draft)[0] > 0 or draft.number(f"{ACTOR}.entropy_coeff"):
            draft.find("aggregation.terms", key, loss=loss.value, mode=mode)
    else:
        apply_rules(draft, "aggregation", "horizon", blocks={"divisor": _divisor(draft)})
    apply_rules(draft, "entropy")
    critic = draft.text("critic.loss_agg_mode") or "token-mean"
    if needs_critic(draft) and critic != "token-mean":
        draft.find("critic-aggregation", "critic.loss_agg_mode", mode=critic)
    if needs_critic(draft) and draft.old.version == "v0.4.0":
        draft.find("value-loss")


def _has_own_aggregation(draft: Draft, loss: Setting) -> bool:
    """Check if a loss was a mean over completions whatever loss_agg_mode was."""
    # compute_policy_loss_gspo and its neighbors pass seq-mean-token-mean to agg_loss, whatever they
    # are given.
    return loss.value in ("gmpo", "sapo") or (loss.value == "gspo" and not draft.since("v0.9.1"))


def _divisor(draft: Draft) -> str:
    """Return the key of the number that seq-mean-token-sum-norm divided by."""
    # agg_loss divides by loss_mask.shape[-1], the padded width, without a factor. Samplers padded
    # completions to response_length.
    factor = f"{ACTOR}.loss_scale_factor"
    if draft.old.get(factor) is None:
        return response_key(draft)
    if has_engines(draft):
        return factor
    draft.explain_drop(factor, "only engines read it: the old workers divided by the padded width")
    return response_key(draft)


def _advantage(draft: Draft) -> str:
    old, key = advantage(draft), "algorithm.adv_estimator"
    n = completions_per_prompt(draft)
    if only_distills(draft):
        reason = (
            "only teachers say what is better (use_task_rewards is false), so no advantage is "
            "estimated from rewards"
        )
        draft.explain_drop(key, reason)
        draft.explain_drop("algorithm.norm_adv_by_std_in_grpo", reason)
        draft.put(
            "algorithm.advantage.name",
            "reinforce_plus_plus",
            rule="distillation",
            old=["distillation.enabled"],
        )
        draft.put(
            "algorithm.group_size",
            n,
            rule="group-size",
            old=["actor_rollout_ref.rollout.n"],
            verbatim=True,
        )
        return "distill"
    new_word = _ADVANTAGES.get(old)
    if new_word is None:
        draft.find("advantage.unknown", key, old=old, names=", ".join(_ADVANTAGES))
        return "grpo"
    # Without the deviation GRPO is Dr. GRPO, which has a name of its own here.
    if new_word == "grpo" and draft.old.get("algorithm.norm_adv_by_std_in_grpo") is False:
        new_word = "dr_grpo"
    # A group of one has no spread: its normalized advantage would always be 0.
    if new_word in _IN_GROUPS and n < 2:
        new_word = _single_estimator(draft, new_word, old=old, key=key)
    norm = ["algorithm.norm_adv_by_std_in_grpo"] if old.startswith("grpo") else []
    draft.put("algorithm.advantage.name", new_word, rule="advantage", old=[key, *norm])
    if new_word == "grpo_passk":
        draft.copy("algorithm.advantage.scale_by_std", norm[0], rule="advantage", expected="switch")
    elif new_word == "optimal_token_baseline":
        _report_token_baseline(draft, old)
    # fit() asked for a greedy baseline with do_sample=False in meta_info, which agent loops read
    # under another name since v0.8.0 (__do_sample__).
    elif new_word == "remax" and uses_servers(draft) and not draft.since("v0.8.0"):
        draft.find("advantage.drawn-baseline", key)
    draft.put(
        "algorithm.group_size",
        n,
        rule="group-size",
        old=["actor_rollout_ref.rollout.n"],
        verbatim=True,
    )
    if not norm:
        draft.explain_drop(
            "algorithm.norm_adv_by_std_in_grpo", f"only grpo has it; the estimator is {old}"
        )
    return new_word


def _report_token_baseline(draft: Draft, old: str) -> None:
    """Report how the optimal token baseline differs from the old one."""
    draft.find("advantage.estimated-energy", "algorithm.adv_estimator", old=old)
    if draft.text(f"{CORRECTION}.rollout_is"):
        draft.find(
            "advantage.unweighted-energy",
            "algorithm.adv_estimator",
            f"{CORRECTION}.rollout_is",
            old=old,
        )
    has_turns = draft.switch("actor_rollout_ref.rollout.multi_turn.enable")
    if has_turns and old == "optimal_token_baseline":
        draft.find("advantage.trained-positions", "algorithm.adv_estimator", old=old)


def _single_estimator(draft: Draft, new_word: str, *, old: str, key: str) -> str:
    """Return the estimator of a run with one completion per prompt, which has no group."""
    if new_word not in _BARE_SINGLE:
        draft.find("advantage.group-of-one", key, "actor_rollout_ref.rollout.n", old=old)
        return new_word
    draft.find(
        "advantage.bare-reward", key, "actor_rollout_ref.rollout.n", old=old, new_word=new_word
    )
    return BARE_REWARD


def _clip(draft: Draft) -> None:
    low, high = clip_bounds(draft)
    full = f"{ACTOR}.clip_ratio"
    # update_policy takes clip_ratio for a side only if that side's key is null, and the trees since
    # v0.4.0 set both to 0.2.
    if draft.old.is_set(full) and full not in (low, high):
        draft.explain_drop(
            full,
            f"{draft.old.version} did not read it: clip_ratio_low and clip_ratio_high are set, by "
            "default to 0.2, and win (since v0.4.0)",
        )
        value, took = draft.old.get(full), draft.old.get(low)
        if value != took:
            draft.find(
                "clip-ratio-ignored", full, value=value, took=took, value_2=draft.old.get(high)
            )
    if (
        updates_per_step(draft) == 1
        and kl_coefs(draft)[1] == 0
        and not takes_sampler_logprobs(draft)
    ):
        for key in (low, high, full, f"{ACTOR}.clip_ratio_c"):
            draft.explain_drop(
                key,
                "a step makes one update, so the policy's ratio is always 1 and nothing is ever "
                "clipped",
            )
        return
    loss = draft.settings.get("algorithm.policy_loss.name")
    if loss is not None and (loss.value in ("kl_cov", "sapo") or ":" in str(loss.value)):
        for key in (low, high, full):
            draft.explain_drop(key, "this policy loss clips no ratio")
        return
    draft.copy("algorithm.policy_loss.clip_low", low, rule="clip", expected="number")
    draft.copy("algorithm.policy_loss.clip_high", high, rule="clip", expected="number")
    _dual_clip(draft)


def _dual_clip(draft: Draft) -> None:
    """Set the bound of the loss on large ratios: ppo's dual clip, or dppo's largest ratio."""
    key = f"{ACTOR}.clip_ratio_c"
    loss = draft.settings.get("algorithm.policy_loss.name")
    if loss is not None and loss.value == "dppo":
        draft.copy("algorithm.policy_loss.max_ratio", key, rule="dual-clip", expected="number")
        return
    if loss is not None and loss.value != "ppo":
        draft.explain_drop(key, f"the policy loss {loss.value} has no dual clip")
        return
    bound = draft.number(key)
    if bound is None:
        return
    # The old loss asserted a bound above 1 at the first update.
    if bound <= 1:
        draft.find("dual-clip", key, bound=bound)
        return
    draft.put(
        "algorithm.policy_loss.dual_clip", float(bound), rule="dual-clip", old=[key], verbatim=True
    )


def _kl(draft: Draft) -> None:
    in_loss, in_reward = kl_coefs(draft)
    block = "algorithm.kl_ctrl" if draft.old.has("algorithm.kl_ctrl.kl_coef") else "critic.kl_ctrl"
    is_adaptive = draft.text(f"{block}.type") == "adaptive"
    controller = ("adaptive" if is_adaptive else "fixed") if in_reward > 0 else "none"
    facts = {
        "kl_in_loss": "true" if in_loss > 0 else "false",
        "kl_in_reward": "true" if in_reward > 0 else "false",
        "kl_controller": controller,
    }
    apply_rules(draft, "kl-loss", facts=facts)
    if in_reward > 0:
        _kl_reward(draft, in_reward, block=block)
    if controller == "adaptive":
        key = f"{block}.target_kl"
        target = draft.number(key) or 0.1
        draft.find(
            "kl-controller", key if draft.old.is_set(key) else f"{block}.type", target=target
        )
    blocks = {"controller": block}
    apply_rules(draft, "kl-controller", "kl-reward", "kl-estimator", blocks=blocks, facts=facts)
    if not needs_ref(draft):
        return
    _estimator(draft, in_loss=in_loss > 0, in_reward=in_reward > 0)
    _reference(draft)


def _kl_reward(draft: Draft, coef: float, *, block: str) -> None:
    old = [f"{block}.kl_coef", "algorithm.use_kl_in_reward"]
    draft.put("algorithm.kl_reward_coef", coef, rule="kl-reward", old=old, verbatim=False)
    if not draft.since("v0.4.0"):
        draft.find("kl-reward", f"{block}.kl_coef", coef=coef)


def _estimator(draft: Draft, *, in_loss: bool, in_reward: bool) -> None:
    keys = [f"{ACTOR}.kl_loss_type"] * in_loss + ["algorithm.kl_penalty"] * in_reward
    # kl_penalty() of verl: kl is k1, mse is k2 and low_var_kl is k3. A + means the straight-through
    # form, which v0.8.0 brought.
    words = {key: draft.text(key) or ("low_var_kl" if "loss" in key else "kl") for key in keys}
    values = {key: _ESTIMATORS.get(word.removesuffix("+")) for key, word in words.items()}
    for key, word in words.items():
        if values[key] is None:
            draft.find("kl-estimator.unknown", key, word=word)
            return
        if word.endswith("+") and not draft.since("v0.8.0"):
            draft.find("kl-estimator.plus", key, word=word)
    # Temper estimates the KL once, for the loss and for the reward.
    if len(set(values.values())) > 1:
        draft.find("kl-estimator.two", *keys, detail=words[keys[0]], detail_2=words[keys[1]])
        return
    result = values[keys[0]]
    # A "+" changes the gradient of a loss, and k2 has the gradient it would get.
    if in_loss and words[keys[0]].endswith("+") and result != "k2":
        result = f"{result}+"
    # The gradient of k1 as a loss is 0 in expectation, so the old term only added noise.
    if in_loss and result == "k1":
        draft.find("kl-estimator.zero-gradient", keys[0], detail=words[keys[0]])
        return
    draft.put("algorithm.kl_estimator", result, rule="kl-estimator", old=keys)
    if result in ("k3", "k3+"):
        draft.put("algorithm.kl_clamp", _KL_CLAMP, rule="kl-estimator", old=())


def _reference(draft: Draft) -> None:
    """Set the reference: the actor without its adapter, or a role of its own."""
    # The old workers switched the adapter off for the reference (ref_in_actor), so that no second
    # model was loaded.
    if draft.settings.get("actor.engine.lora.rank") or draft.settings.get("actor.engine.lora.path"):
        draft.put("algorithm.kl_reference", "disabled_adapter", rule="kl-reference", old=[])
        return
    draft.put(
        "ref",
        "frozen",
        rule="reference",
        old=[f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"],
        group=True,
    )


def has_ref_role(draft: Draft) -> bool:
    """Check if the reference is a separate model."""
    return "ref" in draft.settings


__all__ = ["build_algorithm", "has_ref_role", "kl_in_loss", "needs_critic"]


_ACTOR = "actor_rollout_ref.actor"
_LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "temper_legacy_shim.old_algorithms:PlainGradient",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}


def build_policy_loss(draft: Draft) -> None:
    """Set ``algorithm.policy_loss`` and the keys of that loss."""
    key = (
        f"{_ACTOR}.loss_mode"
        if draft.old.is_set(f"{_ACTOR}.loss_mode")
        else f"{_ACTOR}.policy_loss.loss_mode"
    )
    old = draft.text(key) or "vanilla"
    new_word = _LOSSES.get(old)
    if new_word is None:
        draft.find("policy-loss", key, old=old, names=", ".join(_LOSSES))
        return
    draft.put("algorithm.policy_loss.name", new_word, rule="policy-loss", old=[key])
    blocks = {"mode": key, "block": key.rpartition(".")[0]}
    apply_rules(draft, "policy-loss", "covariance", "sapo", blocks=blocks)


def clip_bounds(draft: Draft) -> tuple[str, str]:
    """Return the keys of the bounds that this release used."""
    low, high = f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high"
    full = f"{_ACTOR}.clip_ratio"
    return (low if draft.old.get(low) is not None else full), (
        high if draft.old.get(high) is not None else full
    )
