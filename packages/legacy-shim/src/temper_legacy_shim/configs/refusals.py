"""What a release took when it composed the configuration, and refused when it read it."""

from temper_legacy_shim.configs.draft import Draft
from temper_legacy_shim.configs.numerics import has_engines
from temper_legacy_shim.configs.roles import ACTOR, CRITIC, REF, is_megatron


def find_refusals(draft: Draft) -> None:
    """One finding for each value with which the old run would have ended before its first step."""
    mode = "actor_rollout_ref.rollout.mode"
    if draft.since("v0.7.0") and draft.text(mode) == "sync":
        why = "a ValueError, since synchronous servers are gone (#4690); servers are asynchronous here too"
        _refuse(draft, "rollout-mode", mode, "sync", why)
    if not (is_megatron(draft) and draft.since("v0.7.0") and has_engines(draft)):
        return
    for role in (ACTOR, REF, CRITIC):
        key = f"{role.megatron}.use_mbridge"
        if draft.old.is_set(key) and not draft.switch(key):
            _refuse(draft, "mbridge", key, "False", "Megatron's engine asserts that a bridge is used, and one is used here")


def _refuse(draft: Draft, rule: str, key: str, value: str, why: str) -> None:
    draft.find("refused", rule, f"{key}={value}: {draft.old.version} would not have started: {why}.", key)
