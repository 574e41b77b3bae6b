"""Which policy loss: the trainer's own by name, the old trainers' further ones by import path."""

from temper_legacy_shim.configs.draft import Draft

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
    "dppo_tv": "temper_legacy_shim.old_algorithms:WithinDivergence",
    "dppo_kl": "temper_legacy_shim.old_algorithms:WithinDivergence",
}


def build_policy_loss(draft: Draft) -> None:
    """Keys ``algorithm.policy_loss`` and those of its own."""
    key = f"{_ACTOR}.loss_mode" if draft.old.is_set(f"{_ACTOR}.loss_mode") else f"{_ACTOR}.policy_loss.loss_mode"
    old = draft.text(key) or "vanilla"
    ours = _LOSSES.get(old)
    if ours is None:
        draft.find("person", "policy-loss", f"{key} is {old}, which is no policy loss of ours ({', '.join(_LOSSES)}): choose one.", key)
        return
    draft.put("algorithm.policy_loss", ours, rule="policy-loss", old=[key])
    block = key.rpartition(".")[0]
    if ours == "clip_cov":
        draft.copy("algorithm.cov_fraction", f"{block}.clip_cov_ratio", rule="covariance", expected="number")
        draft.copy("algorithm.cov_low", f"{block}.clip_cov_lb", rule="covariance", expected="number")
        draft.copy("algorithm.cov_high", f"{block}.clip_cov_ub", rule="covariance", expected="number")
    if ours == "kl_cov":
        draft.copy("algorithm.cov_fraction", f"{block}.kl_cov_ratio", rule="covariance", expected="number")
        draft.copy("algorithm.kl_cov_coef", f"{block}.ppo_kl_coef", rule="covariance", expected="number")
    if ours == "sapo":
        draft.copy("algorithm.sapo_positive_temperature", f"{_ACTOR}.tau_pos", rule="sapo", expected="number")
        draft.copy("algorithm.sapo_negative_temperature", f"{_ACTOR}.tau_neg", rule="sapo", expected="number")
    if old.startswith("dppo_"):
        _divergence(draft, distance=old.removeprefix("dppo_"), key=key)


def _divergence(draft: Draft, *, distance: str, key: str) -> None:
    """The clip's bounds were the largest moves, and the dual clip's the largest ratio."""
    new = "algorithm.policy_loss_arguments"
    low, high = clip_bounds(draft)
    draft.put(f"{new}.distance", distance, rule="policy-loss", old=[key])
    draft.copy(f"{new}.low", low, rule="policy-loss", expected="number")
    draft.copy(f"{new}.high", high, rule="policy-loss", expected="number")
    draft.copy(f"{new}.max_ratio", f"{_ACTOR}.clip_ratio_c", rule="policy-loss", expected="number")


def has_clip(draft: Draft) -> bool:
    """Return whether the loss has a clip of the ratio."""
    loss = draft.settings.get("algorithm.policy_loss")
    return loss is None or (loss.value not in ("kl_cov", "sapo") and ":" not in str(loss.value))


def clip_bounds(draft: Draft) -> tuple[str, str]:
    """The keys that the release read its bounds from."""
    low, high = f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high"
    whole = f"{_ACTOR}.clip_ratio"
    return (low if draft.old.get(low) is not None else whole), (high if draft.old.get(high) is not None else whole)
