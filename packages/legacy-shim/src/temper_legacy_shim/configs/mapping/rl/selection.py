"""Selection and weighting of completions: dynamic sampling, reweighting, rollout correction."""

import re

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    CORRECTION,
    estimator,
    is_async,
    takes_sampler_logprobs,
)
from temper_legacy_shim.configs.mapping.rows import apply_rows, fact
from temper_legacy_shim.configs.reading.config_values import Plain


def build_selection(draft: Draft) -> None:
    """Set ``algorithm.dynamic_sampling``, ``reweight`` and ``rollout_correction``."""
    apply_rows(draft, "dynamic-sampling")
    apply_rows(draft, "reweight")
    # The block replaced the plain keys of v0.6.0; a release reads only one of the forms.
    if draft.old.has(f"{CORRECTION}.rollout_is") or takes_sampler_logprobs(draft):
        _correction(draft)
    elif draft.switch("algorithm.rollout_is"):
        _first_correction(draft)
    else:
        apply_rows(draft, "no-correction")
    apply_rows(draft, "truncated-weights")


@fact
def program(draft: Draft) -> str:
    return draft.old.entry or "main_ppo"


@fact
def reweights(draft: Draft) -> bool:
    """Check if completions were drawn again by their rewards, which the estimator gae alone did."""
    return draft.switch("algorithm.use_pf_ppo") and estimator(draft) == "gae"


@fact
def pf_ppo(draft: Draft) -> str:
    """Return the beginning of the keys that were read; v0.4.1 did not read its own block."""
    return "algorithm.pf_ppo_" if draft.old.version == "v0.4.1" else "algorithm.pf_ppo."


@fact
def changed_pf_ppo(draft: Draft) -> str:
    """Return the keys of the block that v0.4.1 did not read and that are no defaults."""
    default = {"algorithm.pf_ppo.reweight_method": "pow", "algorithm.pf_ppo.weight_pow": 2.0}
    return " and ".join(
        key for key, value in default.items() if draft.old.get(key) not in (None, value)
    )


@fact
def given_pf_ppo(draft: Draft) -> str:
    keys = changed_pf_ppo(draft).split(" and ")
    return " and ".join(f"{key}={draft.text(key)}" for key in keys)


def _put(draft: Draft, name: str, value: str | float | bool | None, *old: str) -> None:
    draft.put(f"algorithm.rollout_correction.{name}", value, rule="correction", old=old)


def _first_correction(draft: Draft) -> None:
    """Set the correction from the keys of v0.6.0: booleans, a level, a mode."""
    block = "algorithm.rollout_is"
    level, mode = draft.text(f"{block}_level") or "token", draft.text(f"{block}_mode") or "truncate"
    high, low = draft.number(f"{block}_threshold"), draft.number(f"{block}_threshold_lower")
    if draft.old.get(f"{block}_threshold") is None:
        draft.explain_drop(
            block,
            f"without rollout_is_threshold, which is null, {draft.old.version} corrected nothing",
        )
        return
    _veto(draft, f"{block}_veto_threshold")
    if level not in ("token", "sequence"):
        _no_counterpart(draft, f"{block}_level", level)
        return
    _put(draft, "name", level, f"{block}_level", block)
    if mode == "truncate":
        _put(draft, "truncate_at", high, f"{block}_threshold", f"{block}_mode")
        return
    _put(draft, "truncate_at", None, f"{block}_mode")
    # v0.6.0 took the reciprocal where no lower bound was given.
    low = low if low is not None else (1 / high if high else None)
    _reject(
        draft, RATIO_RULES[level], (low, high), f"{block}_threshold", f"{block}_threshold_lower"
    )


def _correction(draft: Draft) -> None:
    weighs, rejects = draft.text(f"{CORRECTION}.rollout_is"), draft.text(f"{CORRECTION}.rollout_rs")
    bypasses = takes_sampler_logprobs(draft)
    if not weighs and not rejects and not bypasses:
        draft.explain_drop(CORRECTION, "neither weights nor rejection are asked for")
        return
    _veto(draft, f"{CORRECTION}.rollout_token_veto_threshold")
    if weighs and weighs not in ("token", "sequence"):
        _no_counterpart(draft, f"{CORRECTION}.rollout_is", weighs)
        return
    if bypasses:
        _bypass(draft, weighs)
    elif weighs:
        _weights(draft, weighs)
    if rejects:
        _rejection(draft, rejects=rejects)
    if not weighs and not bypasses and any(key.startswith(REJECT) for key in draft.settings):
        _put(draft, "name", "mask", f"{CORRECTION}.rollout_is")


def _weights(draft: Draft, level: str) -> None:
    """Set truncated weights; a threshold ``LOW_HIGH`` sets weights to 0 outside (IcePop)."""
    key = f"{CORRECTION}.rollout_is_threshold"
    _put(draft, "name", level, f"{CORRECTION}.rollout_is")
    pair = _pair(draft.old.get(key))
    # Two bounds zero the weight outside, which is a rejection in Temper's words.
    if pair is not None:
        # The default truncates at 2, which a rejection by both bounds replaces.
        _put(draft, "truncate_at", None, key)
        _reject(draft, RATIO_RULES[level], pair, key)
    else:
        _put(draft, "truncate_at", draft.number(key), key)
    if draft.switch(f"{CORRECTION}.rollout_is_batch_normalize"):
        _put(draft, "self_normalize", True, f"{CORRECTION}.rollout_is_batch_normalize")
        if level == "sequence":
            draft.find(
                "correction.sequence-normalization", f"{CORRECTION}.rollout_is_batch_normalize"
            )


def _bypass(draft: Draft, weighs: str) -> None:
    key, loss_key = f"{CORRECTION}.bypass_mode", f"{CORRECTION}.loss_type"
    keys = [key, loss_key]
    if is_async(draft) and not draft.since("v0.7.1"):
        keys = ["async_training.use_rollout_log_probs", "async_training.compute_prox_log_prob"]
        loss = "ppo_clip"
    else:
        loss = draft.text(loss_key) or (
            "reinforce" if draft.switch(f"{CORRECTION}.use_policy_gradient") else "ppo_clip"
        )
    if loss == "ppo_clip":
        _put(draft, "name", "rollout_ratio", *keys, f"{CORRECTION}.rollout_is")
        if weighs:
            draft.explain_drop(
                f"{CORRECTION}.rollout_is",
                "the objective's own ratio is to the sampler, and is the correction",
            )
        return
    draft.find(
        "correction.loss-type", key, loss_key, f"{CORRECTION}.use_policy_gradient", loss=loss
    )


RATIO_RULES = {"token": "ratio_token", "sequence": "ratio_sum", "geometric": "ratio_mean"}
"""Rule by the level that releases before 0.7.1 named."""
REJECT = "algorithm.rollout_correction.reject."


def _reject(draft: Draft, rule: str, bounds: tuple[float | None, float | None], *old: str) -> None:
    """Set the bounds of a rule that are not None."""
    for name, bound in zip(("low", "high"), bounds, strict=True):
        if bound is not None:
            _put(draft, f"reject.{rule}.{name}", bound, *old)


def _rejection(draft: Draft, *, rejects: str) -> None:
    """Translate each of the rules, which are separated by commas, as their thresholds may be."""
    keys = (
        f"{CORRECTION}.rollout_rs",
        f"{CORRECTION}.rollout_rs_threshold",
        f"{CORRECTION}.rollout_rs_threshold_lower",
    )
    names = [name.strip() for name in rejects.split(",") if name.strip()]
    for name, (low, high) in zip(names, _bounds(draft, count=len(names)), strict=True):
        rule = _rule(name)
        # Temper takes one pair of bounds for each rule, so a second use of a rule is reported.
        if rule is None or high is None or f"{REJECT}{rule}.high" in draft.settings:
            _no_counterpart(draft, keys[0], name)
            continue
        if rule.startswith("ratio"):
            low = low if low is not None else 1 / high
            # k1 is log(rollout / old), so that its bounds are those of the inverse of our ratio.
            bounds = (_inverse(high), _inverse(low)) if name.endswith("_k1") else (low, high)
            _reject(draft, rule, bounds, *keys)
        else:
            _reject(draft, rule, (None, high), *keys)
    if any(key.startswith(REJECT) for key in draft.settings):
        draft.find("correction.rejection", keys[0], rejects=rejects)


def _rule(name: str) -> str | None:
    """Return the rule of an old name such as ``seq_mean_k3``; None if there is none."""
    parts = re.fullmatch(r"(?:token|seq_(sum|mean|max))_(k[123])", name)
    if parts is None:
        return RATIO_RULES.get(name)
    statistic = "ratio" if parts[2] == "k1" else parts[2]
    return f"{statistic}_{parts[1] or 'token'}"


def _inverse(bound: float | None) -> float | None:
    """Return 1 / bound without the noise of the last digit."""
    return None if not bound else round(1 / bound, 12)


def _bounds(draft: Draft, *, count: int) -> list[tuple[float | None, float | None]]:
    """Return (lower, upper) for each of ``count`` rules.

    A threshold is 2.0, ``0.6_1.6``, a pair of keys, or one of these for each rule with commas
    between them; a single one is for all rules.
    """
    value = draft.old.get(f"{CORRECTION}.rollout_rs_threshold")
    low = draft.number(f"{CORRECTION}.rollout_rs_threshold_lower")
    if isinstance(value, str):
        parts = value.split(",")
        bounds = [_one_bound(part.strip(), low) for part in parts]
        return bounds if len(bounds) == count else bounds[:1] * count
    high = (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else draft.number(f"{CORRECTION}.rollout_is_threshold")
    )
    return [(low, high)] * count


def _one_bound(text: str, low: float | None) -> tuple[float | None, float | None]:
    try:
        return _pair(text) or (low, float(text))
    except ValueError:
        return low, None


def _pair(value: Plain) -> tuple[float, float] | None:
    """Return both bounds of ``LOW_HIGH``; None for a value of another form."""
    first, separator, second = value.partition("_") if isinstance(value, str) else ("", "", "")
    try:
        return (float(first), float(second)) if separator else None
    except ValueError:
        return None


def _veto(draft: Draft, key: str) -> None:
    """Reject completions with a token whose probability is below this fraction of the sampler's."""
    threshold = draft.number(key)
    if threshold is None:
        return
    _reject(draft, "ratio_max", (threshold, None), key)
    draft.find("correction.rejection", key, rejects=f"{threshold:g}")


def _no_counterpart(draft: Draft, key: str, value: str) -> None:
    draft.find("correction.no-counterpart", key, value=value)
    draft.explain_drop(key, "no counterpart; see the hazard")
