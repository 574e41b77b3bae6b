"""Explain an old key: the history in the old trees, and the rule."""

import difflib
from dataclasses import dataclass

from temper_legacy_shim.configs.mapping.rows import alternatives
from temper_legacy_shim.configs.mapping.rules import Rule, find_rule, rules, sources_of
from temper_legacy_shim.configs.reading.config_values import Plain, hydra_text
from temper_legacy_shim.configs.reading.trees import GONE, Family, all_keys, history_of, versions
from temper_legacy_shim.errors import UsageError

_FAMILIES: dict[Family, str] = {
    "ppo_fsdp": "ppo",
    "ppo_megatron": "ppo",
    "sft_columns": "sft1",
    "sft_fsdp": "sft",
    "sft_megatron": "sft",
    "generation": "generation",
    "evaluation": "evaluation",
}
_TITLES: dict[Family, str] = {
    "ppo_fsdp": "PPO on FSDP",
    "ppo_megatron": "PPO on Megatron",
    "sft_columns": "supervised fine-tuning, first generation",
    "sft_fsdp": "supervised fine-tuning on FSDP engines",
    "sft_megatron": "supervised fine-tuning on Megatron engines",
    "generation": "generation",
    "evaluation": "evaluation",
}

_MOST_NEAR = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    family: Family
    since: str
    """The first release that had it."""
    gone: str | None
    """The first release without it; None where v0.9.0 has it still."""
    defaults: tuple[tuple[str, Plain], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything that is known of a key."""

    key: str
    """Key as requested, without + or ~."""
    lives: tuple[Life, ...]
    """History by tree; empty if no release had it."""
    rules: tuple[Rule, ...]
    """The rule for each type of program, without repetition."""


def explain_key(text: str) -> Explanation:
    """Look a key up.

    Raises:
        UsageError: the key is unknown to all releases and rules; the message shows similar keys.
    """
    key = text.strip().lstrip("+~").partition("=")[0].strip()
    if not key:
        raise UsageError(f"{text!r} is no key: give one such as actor_rollout_ref.actor.grad_clip.")
    lives = tuple(life for family in _FAMILIES if (life := _life(family, key)) is not None)
    programs = dict.fromkeys([_FAMILIES[life.family] for life in lives] or ("ppo", "sft", "sft1"))
    result = tuple(
        dict.fromkeys(rule for program in programs if (rule := find_rule(program, key)) is not None)
    )
    if not lives and not result:
        near = _near(key)
        hint = f" Near it are {', '.join(near)}." if near else ""
        raise UsageError(
            f"{key} is a key of no release from {versions()[0]} to {versions()[-1]}, and no rule "
            f"names it.{hint}"
        )
    return Explanation(key=key, lives=lives, rules=result)


def _life(family: Family, key: str) -> Life | None:
    history = history_of(family, key)
    if not history:
        below = [name for name in all_keys(family) if name.startswith(f"{key}.")]
        if not below:
            return None
        return Life(
            family=family,
            since=min((history_of(family, name)[0][0] for name in below), key=versions().index),
            gone=None,
            defaults=(),
        )
    gone = next((version for version, value in reversed(history) if value == GONE), None)
    is_gone = gone is not None and history[-1][1] == GONE
    return Life(
        family=family,
        since=history[0][0],
        gone=gone if is_gone else None,
        defaults=tuple((version, value) for version, value in history if value != GONE),
    )


def _near(key: str) -> list[str]:
    """Find keys that end with the given text, else similar keys."""
    known = _known()
    ending = sorted(
        (name for name in known if name.endswith(f".{key}")),
        key=lambda name: (name.count("."), name),
    )
    if ending:
        return ending[:_MOST_NEAR]
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.7)
    if close or "." in key:
        return close
    lasts = {name.rpartition(".")[2] for name in known}
    words = difflib.get_close_matches(key, lasts, n=3, cutoff=0.7)
    return [name for word in words for name in known if name.rpartition(".")[2] == word][
        :_MOST_NEAR
    ]


def _known() -> list[str]:
    keys = {key for family in _FAMILIES for key in all_keys(family)}
    keys |= {key for rule in rules() for key in alternatives(rule.old) if key and "*" not in key}
    return sorted(keys)


def sentences(item: Explanation) -> list[str]:
    lines = [item.key]
    for life in item.lives:
        until = f", gone in {life.gone}" if life.gone else ""
        lines.append(f"  {_TITLES[life.family]}: since {life.since}{until}")
        lines += [
            f"    default {hydra_text(value)} from {version}" for version, value in life.defaults
        ]
    if not item.lives:
        lines.append("  in no default tree: it was added with +, or belongs to a recipe")
    for rule in item.rules:
        new = f" -> {rule.new}" if rule.new else ""
        lines.append(f"  {rule.disposition}{new} [{rule.id}]")
        lines.append(f"    {rule.reason}")
        if rule.hazard:
            lines.append(f"    hazard: {rule.hazard}")
        lines.append(f"    source: {'; '.join(sources_of(rule))}")
    return lines


def plain_explanation(item: Explanation) -> dict[str, Plain]:
    return {
        "key": item.key,
        "trees": [
            {
                "tree": life.family,
                "since": life.since,
                "gone": life.gone,
                "defaults": [
                    {"from": version, "default": value} for version, value in life.defaults
                ],
            }
            for life in item.lives
        ],
        "rules": [
            {
                "id": rule.id,
                "disposition": rule.disposition,
                "new": rule.new,
                "reason": rule.reason,
                "hazard": rule.hazard,
                "prs": list(rule.prs.split()),
                "sources": list[Plain](sources_of(rule)),
            }
            for rule in item.rules
        ],
    }
