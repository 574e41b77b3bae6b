"""PPO and its relatives.

GRPO, DAPO, the entropy recipe, one-step-off and fully asynchronous runs, on FSDP and Megatron.
"""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.data_sources import build_rl_data
from temper_legacy_shim.configs.mapping.rl.batches import build_batches, explain_unused
from temper_legacy_shim.configs.mapping.rl.reward_functions import build_reward
from temper_legacy_shim.configs.mapping.rl.rl_algorithm import build_algorithm, has_ref_role
from temper_legacy_shim.configs.mapping.rl.rl_facts import build_generation, needs_critic, needs_ref
from temper_legacy_shim.configs.mapping.rl.rollout import build_rollout
from temper_legacy_shim.configs.mapping.rl.run_length import build_run
from temper_legacy_shim.configs.mapping.rl.selection import build_selection
from temper_legacy_shim.configs.mapping.rl.turns import build_staleness, build_teachers, build_turns
from temper_legacy_shim.configs.mapping.roles.lora import build_lora
from temper_legacy_shim.configs.mapping.roles.numerics_changes import build_numerics, has_engines
from temper_legacy_shim.configs.mapping.roles.role_engine import build_role
from temper_legacy_shim.configs.mapping.roles.roles import ACTOR, CRITIC, REF, is_megatron


def build_ppo(draft: Draft) -> None:
    """Set everything in the order of a configuration.

    Roles last, since the algorithm decides which exist.
    """
    if is_megatron(draft):
        draft.put(
            "model_engine",
            "megatron",
            rule="model-engine",
            old=["actor_rollout_ref.actor.strategy"],
            group=True,
        )
    if needs_critic(draft):
        draft.put("critic", "value_model", rule="critic", group=True)
    build_rl_data(draft)
    build_role(draft, ACTOR)
    build_lora(draft, ACTOR)
    build_batches(draft)
    explain_unused(draft)
    build_algorithm(draft)
    if needs_critic(draft):
        build_role(draft, CRITIC)
        build_lora(draft, CRITIC)
    else:
        draft.explain_drop("critic", "the estimator needs no critic, so there is none")
    if has_ref_role(draft):
        build_role(draft, REF)
    else:
        without = "no KL coefficient is above 0, so there is no reference policy"
        draft.explain_drop(
            "actor_rollout_ref.ref",
            "there is no reference model of its own" if needs_ref(draft) else without,
        )
    build_rollout(draft)
    build_selection(draft)
    build_turns(draft)
    build_staleness(draft)
    build_teachers(draft)
    build_reward(draft)
    build_run(draft)
    build_numerics(draft)
    build_generation(draft)
    find_refusals(draft)


def find_refusals(draft: Draft) -> None:
    """Report each value with which the old run would have ended before its first step."""
    mode = "actor_rollout_ref.rollout.mode"
    if draft.since("v0.7.0") and draft.text(mode) == "sync":
        draft.find("rollout-mode", mode)
    if not (is_megatron(draft) and draft.since("v0.7.0") and has_engines(draft)):
        return
    for role in (ACTOR, REF, CRITIC):
        key = f"{role.megatron}.use_mbridge"
        if draft.old.is_set(key) and not draft.switch(key):
            draft.find("mbridge", key)
