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
        apply_rows(draft, "first-correction")
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


@fact
def sampler_loss(draft: Draft) -> str:
    """Return the loss whose ratio had the sampler's log-probs as denominator; else empty."""
    if not takes_sampler_logprobs(draft):
        return ""
    if is_async(draft) and not draft.since("v0.7.1"):
        return "ppo_clip"
    has_gradient = draft.switch(f"{CORRECTION}.use_policy_gradient")
    return draft.text(f"{CORRECTION}.loss_type") or ("reinforce" if has_gradient else "ppo_clip")


@fact
def has_rejection(draft: Draft) -> bool:
    return any(key.startswith(REJECT) for key in draft.settings)


@fact
def ratio_bound(draft: Draft) -> float | None:
    """Return the bound that weights were truncated at; None if they were 0 outside two bounds."""
    key = f"{CORRECTION}.rollout_is_threshold"
    return None if _pair(draft.old.get(key)) else draft.number(key)


@fact
def first_rule(draft: Draft) -> str:
    level = draft.text("algorithm.rollout_is_level")
    return RATIO_RULES["sequence" if level == "sequence" else "token"]


@fact
def first_low(draft: Draft) -> float | None:
    """Return the lower bound of v0.6.0, which took the reciprocal where none was given."""
    low, high = (draft.number(f"algorithm.rollout_is_threshold{end}") for end in ("_lower", ""))
    return low if low is not None else (1 / high if high else None)


def _correction(draft: Draft) -> None:
    weighs, key = draft.text(f"{CORRECTION}.rollout_is"), f"{CORRECTION}.rollout_is_threshold"
    apply_rows(draft, "correction")
    if weighs not in ("", "token", "sequence"):
        return
    # Two bounds zero the weight outside (IcePop), which is a rejection in Temper's words.
    pair = _pair(draft.old.get(key))
    if pair and weighs and not takes_sampler_logprobs(draft):
        _reject(draft, RATIO_RULES[weighs], pair, key)
    if rejects := draft.text(f"{CORRECTION}.rollout_rs"):
        _rejection(draft, rejects=rejects)
    apply_rows(draft, "rejection")


RATIO_RULES = {"token": "ratio_token", "sequence": "ratio_sum", "geometric": "ratio_mean"}
"""Rule by the level that releases before 0.7.1 named."""
REJECT = "algorithm.rollout_correction.reject."


def _reject(draft: Draft, rule: str, bounds: tuple[float | None, float | None], *old: str) -> None:
    """Set the bounds of a rule that are not None."""
    low, high = bounds
    apply_rows(draft, "reject", reject_rule=rule, low=low, high=high, keys=" and ".join(old))


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
            apply_rows(draft, "no-rejection", value=name)
            continue
        if rule.startswith("ratio"):
            low = low if low is not None else 1 / high
            # k1 is log(rollout / old), so that its bounds are those of the inverse of our ratio.
            bounds = (_inverse(high), _inverse(low)) if name.endswith("_k1") else (low, high)
            _reject(draft, rule, bounds, *keys)
        else:
            _reject(draft, rule, (None, high), *keys)


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
