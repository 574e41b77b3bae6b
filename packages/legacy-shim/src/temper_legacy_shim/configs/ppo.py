"""PPO and its kin: GRPO, DAPO, the entropy recipe, one-step-off and fully asynchronous runs, on FSDP and Megatron."""

from temper_legacy_shim.configs.batches import build_batches, explain_unused
from temper_legacy_shim.configs.data import build_rl_data
from temper_legacy_shim.configs.draft import Draft
from temper_legacy_shim.configs.generations import build_generation
from temper_legacy_shim.configs.lora import build_lora
from temper_legacy_shim.configs.numerics import build_numerics
from temper_legacy_shim.configs.refusals import find_refusals
from temper_legacy_shim.configs.rewards import build_reward
from temper_legacy_shim.configs.rl_algorithm import build_algorithm, has_ref_role
from temper_legacy_shim.configs.rl_facts import needs_critic, needs_ref
from temper_legacy_shim.configs.roles import ACTOR, CRITIC, REF, build_role, is_megatron
from temper_legacy_shim.configs.rollout import build_rollout
from temper_legacy_shim.configs.run_length import build_run
from temper_legacy_shim.configs.selection import build_selection
from temper_legacy_shim.configs.turns import build_staleness, build_teachers, build_turns


def build_ppo(draft: Draft) -> None:
    """Everything, in the order of a configuration: roles last, since the algorithm decides which there are."""
    if is_megatron(draft):
        draft.put("model_engine", "megatron", rule="model-engine", old=["actor_rollout_ref.actor.strategy"], group=True)
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
        draft.say("critic", "the estimator needs no critic, so there is none")
    if has_ref_role(draft):
        build_role(draft, REF)
    else:
        without = "no KL coefficient is above 0, so there is no reference policy"
        draft.say("actor_rollout_ref.ref", "there is no reference model of its own" if needs_ref(draft) else without)
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
