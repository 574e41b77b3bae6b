"""Several turns, tools, teachers, and loops that sample ahead."""

from temper_legacy_shim.configs.draft import Draft
from temper_legacy_shim.configs.rl_facts import is_async

TURNS = "actor_rollout_ref.rollout.multi_turn"
_TEACHERS = "distillation.teacher_models"
_LOSS = "distillation.distillation_loss"


def build_turns(draft: Draft) -> None:
    """Ask about tools and agent loops: they are code of the old system's kind."""
    enabled = draft.switch(f"{TURNS}.enable") or "multiturn" in draft.config_name or "multi_turn" in draft.config_name
    tools = draft.text(f"{TURNS}.tool_config_path")
    custom = [
        key
        for key in (
            f"{TURNS}.interaction_config_path",
            f"{TURNS}.completion_callback",
            "actor_rollout_ref.rollout.agent.agent_loop_config_path",
        )
        if draft.text(key)
    ]
    if not enabled and not tools and not custom:
        draft.say(TURNS, "one completion for each prompt: multi_turn is not enabled")
        return
    what = "; ".join([f"tools of {tools}"] * bool(tools) + [f"{key}={draft.text(key)}" for key in custom]) or "turns without tools"
    turns = draft.integer(f"{TURNS}.max_assistant_turns") or draft.integer(f"{TURNS}.max_turns") or draft.integer(f"{TURNS}.max_user_turns")
    draft.find(
        "person",
        "multi-turn",
        f"rollouts have several turns ({what}), and what answers in them is code of the old system's kind: write it as an Environment, and "
        f"set environment.name=package.module:Class{f' and environment.max_turns={turns}' if turns else ''} (calculator and python exist).",
    )
    draft.say(TURNS, "turns and tools become an environment, which is asked about once")
    draft.say("actor_rollout_ref.rollout.agent", "turns and tools become an environment, which is asked about once")


def build_staleness(draft: Draft) -> None:
    """The share of stale samples becomes a bound on their age."""
    if not is_async(draft):
        return
    share = draft.number("async_training.staleness_threshold")
    if share is not None:
        draft.put(
            "asynchrony.max_staleness",
            1 if share <= 1 else int(-(-share // 1)),
            rule="staleness",
            old=["async_training.staleness_threshold"],
        )
    partial = draft.switch("async_training.partial_rollout")
    draft.put("asynchrony.partial_rollouts", partial, rule="staleness", old=["async_training.partial_rollout"])
    draft.find(
        "hazard",
        "staleness",
        f"async_training.staleness_threshold {share} was the share of samples that might be older than the newest weights; here "
        "asynchrony.max_staleness bounds the age of each.",
        "async_training.staleness_threshold",
    )


def build_teachers(draft: Draft) -> None:
    """On-policy distillation of v0.8.0 and later."""
    if not draft.switch("distillation.enabled"):
        draft.say("distillation", "distillation is not enabled")
        return
    names = {key.removeprefix(f"{_TEACHERS}.").partition(".")[0] for key in draft.old.below(_TEACHERS)}
    taught = [name for name in sorted(names) if draft.text(f"{_TEACHERS}.{name}.model_path")]
    if not taught:
        draft.find(
            "person",
            "distillation",
            "distillation is enabled, but no teacher has a model_path: say which model teaches.",
            "distillation.enabled",
        )
    for name in taught:
        _teacher(draft, name)
    if len(taught) > 1:
        draft.copy("data.train.route_key", "distillation.teacher_key", rule="distillation")
    _distillation_loss(draft)
    draft.put(
        "task",
        "rl" if draft.switch(f"{_LOSS}.use_task_rewards") else "distill",
        rule="distillation",
        old=[f"{_LOSS}.use_task_rewards", "distillation.enabled"],
    )


def _teacher(draft: Draft, name: str) -> None:
    old, new = f"{_TEACHERS}.{name}", f"teachers.{name}"
    draft.copy(f"{new}.engine.model.path", f"{old}.model_path", rule="distillation")
    route = draft.text(f"{old}.key")
    if route:
        draft.put(f"{new}.route", route, rule="distillation", old=[f"{old}.key"], verbatim=True)
    replicas = draft.integer(f"{old}.num_replicas")
    if replicas is not None and replicas > 1:
        draft.put(f"{new}.num_replicas", replicas, rule="distillation", old=[f"{old}.num_replicas"], verbatim=True)
    draft.put(f"{new}.backend", "vllm", rule="distillation", old=[f"{old}.inference.name"])


def _distillation_loss(draft: Draft) -> None:
    mode = draft.text(f"{_LOSS}.loss_mode") or "k3"
    is_reward = draft.switch(f"{_LOSS}.use_policy_gradient")
    key = f"{_LOSS}.loss_mode"
    if mode in ("k1", "kl", "k2", "mse", "k3", "low_var_kl"):
        estimator = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(mode, mode)
        draft.put("distillation.objective", "reverse_kl", rule="distillation", old=[key])
        if estimator == "k1" and not is_reward:
            draft.find("person", "distillation", f"{key} is {mode} as a loss, whose expected gradient is 0: choose k2 or k3.", key)
        else:
            draft.put("distillation.kl_estimator", estimator, rule="distillation", old=[key])
        draft.put("distillation.apply_as", "reward" if is_reward else "loss", rule="distillation", old=[f"{_LOSS}.use_policy_gradient"])
    elif mode.startswith("forward_kl"):
        draft.put("distillation.objective", "forward_kl", rule="distillation", old=[key])
        draft.copy("distillation.top_k", f"{_LOSS}.topk", rule="distillation", expected="number")
    else:
        draft.find(
            "person", "distillation", f"{key} is {mode}: choose distillation.objective forward_kl, reverse_kl or jensen_shannon.", key
        )
    coef = draft.number(f"{_LOSS}.distillation_loss_coef")
    if coef is not None:
        draft.put("distillation.coef", float(coef), rule="distillation", old=[f"{_LOSS}.distillation_loss_coef"])
    clamp = draft.number(f"{_LOSS}.loss_max_clamp")
    if clamp is not None and clamp > 0:
        draft.put("distillation.clamp", float(clamp), rule="distillation", old=[f"{_LOSS}.loss_max_clamp"], verbatim=True)
