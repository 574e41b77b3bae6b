"""Advantages, the policy's loss, clipping, KL and entropy of a PPO-like run."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    estimator,
    kl_coefs,
    kl_ctrl,
    needs_ref,
    only_distills,
    response_key,
    takes_sampler_logprobs,
    updates_per_step,
)
from temper_legacy_shim.configs.mapping.roles.numerics_changes import has_engines
from temper_legacy_shim.configs.mapping.rows import apply_rows, fact

ACTOR = "actor_rollout_ref.actor"
_DEVIATION = "algorithm.norm_adv_by_std_in_grpo"


def build_algorithm(draft: Draft) -> None:
    """Set the block ``algorithm``."""
    for step in ("advantage", "policy-loss", "clip", "aggregation", "kl"):
        apply_rows(draft, step)
    if needs_ref(draft):
        apply_rows(draft, "kl-estimator")
        apply_rows(draft, "kl-reference")
    apply_rows(draft, "advantage-numbers")


@fact
def deviation_key(draft: Draft) -> str:
    """Return the switch of the division by the deviation; empty if the estimator has none."""
    return _DEVIATION if estimator(draft).startswith("grpo") else ""


@fact
def advantage_name(draft: Draft) -> str:
    """Return the new estimator; distill if there is none."""
    return "distill" if only_distills(draft) else str(draft.value("algorithm.advantage.name"))


@fact
def loss_mode_key(draft: Draft) -> str:
    """Return the key of the policy loss, of which the actor's own wins."""
    own = f"{ACTOR}.loss_mode"
    return own if draft.old.is_set(own) else f"{ACTOR}.policy_loss.loss_mode"


@fact
def loss_block(draft: Draft) -> str:
    """Return the block whose loss_mode counts; the numbers of the loss stand next to it."""
    return loss_mode_key(draft).rpartition(".")[0]


@fact
def clip_low_key(draft: Draft) -> str:
    return _clip_key(draft, "low")


@fact
def clip_high_key(draft: Draft) -> str:
    return _clip_key(draft, "high")


def _clip_key(draft: Draft, side: str) -> str:
    """Return the key of a bound, which was the same for both sides until v0.4.0."""
    own = f"{ACTOR}.clip_ratio_{side}"
    return own if draft.old.get(own) is not None else f"{ACTOR}.clip_ratio"


@fact
def reads_clip_ratio(draft: Draft) -> bool:
    """Check if the old trainer took clip_ratio for a side, because that side's own key was null."""
    return f"{ACTOR}.clip_ratio" in (clip_low_key(draft), clip_high_key(draft))


@fact
def clips(draft: Draft) -> bool:
    """Check if the ratio can differ from 1, which it cannot in the one update of a step."""
    has_other_ratio = takes_sampler_logprobs(draft) or kl_coefs(draft)[1] != 0
    return updates_per_step(draft) > 1 or has_other_ratio


@fact
def has_clip_bounds(draft: Draft) -> bool:
    """Check if the policy loss clips the ratio; functions of this package do not."""
    loss = str(draft.value("algorithm.policy_loss.name"))
    return loss not in ("kl_cov", "sapo") and ":" not in loss


@fact
def loss_agg_mode(draft: Draft) -> str:
    return draft.text(f"{ACTOR}.loss_agg_mode") or "token-mean"


@fact
def averages_completions(draft: Draft) -> bool:
    """Check if a loss was a mean over completions although loss_agg_mode said another one."""
    # compute_policy_loss_gspo and its neighbors pass seq-mean-token-mean to agg_loss, whatever they
    # are given.
    loss = draft.value("algorithm.policy_loss.name")
    is_own = loss in ("gmpo", "sapo") or (loss == "gspo" and not draft.since("v0.9.1"))
    return is_own and loss_agg_mode(draft) != "seq-mean-token-mean"


@fact
def has_other_terms(draft: Draft) -> bool:
    """Check if the loss had a term of the KL or the entropy."""
    return kl_coefs(draft)[0] > 0 or bool(draft.number(f"{ACTOR}.entropy_coeff"))


@fact
def divisor_key(draft: Draft) -> str:
    """Return the key of the number that seq-mean-token-sum-norm divided by."""
    # agg_loss divides by loss_mask.shape[-1], the padded width, without a factor. Samplers padded
    # completions to response_length.
    factor = f"{ACTOR}.loss_scale_factor"
    is_read = draft.old.get(factor) is not None and has_engines(draft)
    return factor if is_read else response_key(draft)


@fact
def has_adapter(draft: Draft) -> bool:
    """Check if the new actor trains an adapter, so that it is its own reference without it."""
    return any(f"actor.engine.lora.{name}" in draft.settings for name in ("rank", "path"))


@fact
def has_kl_loss(draft: Draft) -> bool:
    return kl_coefs(draft)[0] > 0


@fact
def has_kl_reward(draft: Draft) -> bool:
    return kl_coefs(draft)[1] > 0


@fact
def kl_target_key(draft: Draft) -> str:
    """Return the key that a question about the adaptive controller is about."""
    key = f"{kl_ctrl(draft)}.target_kl"
    return key if draft.old.is_set(key) else f"{kl_ctrl(draft)}.type"


@fact
def kl_target(draft: Draft) -> float:
    """Return the target of the adaptive controller, for the mean KL of a token."""
    return draft.number(f"{kl_ctrl(draft)}.target_kl") or 0.1


@fact
def kl_loss_word(draft: Draft) -> str:
    return draft.text(f"{ACTOR}.kl_loss_type") or "low_var_kl"


@fact
def kl_reward_word(draft: Draft) -> str:
    return draft.text("algorithm.kl_penalty") or "kl"
