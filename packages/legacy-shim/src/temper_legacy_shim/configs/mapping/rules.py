"""Read the table of rules, ``data/rules.tsv``, and set new keys by its executable rows."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import cast

from temper_legacy_shim.configs.mapping.builder import Draft, read_table
from temper_legacy_shim.configs.reading.config_values import Plain, parse_value
from temper_legacy_shim.configs.reading.trees import (
    Family,
    all_keys,
    default_tree,
    families_of,
    known_keys,
    versions,
)
from temper_legacy_shim.configs.translation import Disposition


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSetting:
    """An executable part of a row, ``NEW <- OLD : CONVERTER``; see ``apply_rules``."""

    new: str
    """New key; may hold places of a role, such as {engine}."""
    old: str
    """Old key; empty for a value that does not depend on one."""
    converter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    id: str
    """Its name, which reports and comments of a YAML show."""
    programs: tuple[str, ...]
    """Programs: ppo, sft (second generation), sft1 (first), generation, evaluation."""
    old: str
    """Old keys: ``{a,b}`` is either, ``*`` one part of a key, ``**`` the rest of it where a release
    had
    that key, ``***`` any rest: blocks whose entries went on to another library."""
    versions: str
    """Releases it is about; empty is all."""
    new: str
    """New keys, separated by commas; empty if `settings` has them."""
    settings: tuple[RuleSetting, ...]
    """Executable settings; empty if Python code sets the keys, or none is set."""
    disposition: Disposition
    reason: str
    prs: str
    """Pull requests of the old system."""
    hazard: str
    """Possible difference in behavior."""
    source: str
    """Evidence next to the default trees, ``TAG:PATH:LINE; ...``; see ``sources_of``."""
    test: str
    """``RELEASE ENTRY OLD... => DISPOSITION FINDING... NEW...``, repeated by the tests."""


@cache
def rules() -> tuple[Rule, ...]:
    """Parse all rows in order; the first match counts, and wildcards come last."""
    return tuple(map(_parse_row, read_table("rules.tsv")))


def _parse_row(row: list[str]) -> Rule:
    name, programs, old, releases, new, settings, disposition, reason, prs, hazard, source, test = (
        row
    )
    executed = tuple(map(_parse_setting, filter(None, settings.split(" ; "))))
    return Rule(
        id=name,
        programs=tuple(programs.split()),
        old=old,
        versions=releases,
        new=new or ", ".join(setting.new for setting in executed),
        settings=executed,
        disposition=cast("Disposition", disposition),
        reason=reason,
        prs=prs,
        hazard=hazard,
        source=source,
        test=test,
    )


def _parse_setting(text: str) -> RuleSetting:
    new, _, rest = text.partition(" <- ")
    old, _, converter = rest.partition(": ")
    return RuleSetting(new=new, old=old.strip(), converter=converter)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    matches: re.Pattern[str]
    is_open: bool
    """True if keys of no release match: blocks that went on to another library."""
    rule: Rule


@cache
def _index(program: str) -> tuple[dict[str, Rule], tuple[_Pattern, ...]]:
    exact: dict[str, Rule] = {}
    patterns: list[_Pattern] = []
    for rule in rules():
        if program not in rule.programs:
            continue
        for key in alternatives(rule.old):
            if "*" in key:
                patterns.append(
                    _Pattern(
                        matches=_pattern(key), is_open="**" not in key or "***" in key, rule=rule
                    )
                )
            else:
                exact.setdefault(key, rule)
    return exact, tuple(patterns)


@cache
def _known() -> frozenset[str]:
    """Return every key and block that a default tree ever had."""
    leaves = known_keys()
    blocks = {
        ".".join(parts[:count])
        for parts in (key.split(".") for key in leaves)
        for count in range(1, len(parts))
    }
    return frozenset(leaves | blocks)


def find_rule(program: str, key: str) -> Rule | None:
    exact, patterns = _index(program)
    if key in exact:
        return exact[key]
    is_known = key in _known()
    return next(
        (item.rule for item in patterns if (item.is_open or is_known) and item.matches.match(key)),
        None,
    )


def is_block(key: str) -> bool:
    """Check if a release contains a block of this name, which can be set as a value."""
    return key in _known() and key not in known_keys()


def rule_named(name: str) -> Rule | None:
    return _index_by_id().get(name)


@cache
def _index_by_id() -> dict[str, Rule]:
    return {rule.id: rule for rule in rules()}


def alternatives(text: str) -> list[str]:
    """Return every key that ``{a,b}`` stands for, nested ones too."""
    start = text.find("{")
    if start < 0:
        return [text]
    depth, parts, begin = 0, [], start + 1
    for at in range(start, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                parts.append(text[begin:at])
                break
        elif text[at] == "," and depth == 1:
            parts.append(text[begin:at])
            begin = at + 1
    rest = alternatives(text[at + 1 :])
    return list(
        itertools.chain.from_iterable(
            [text[:start] + inner + after for inner in alternatives(part) for after in rest]
            for part in parts
        )
    )


def _pattern(key: str) -> re.Pattern[str]:
    """Compile a pattern; ``a.**`` matches a.b.c, and a itself if it is set as one value."""
    text = re.escape(key).replace(r"\*\*\*", "\0").replace(r"\*\*", "\0").replace(r"\*", "[^.]+")
    if text.endswith("\\.\0"):
        text = text[:-3] + r"(\..+)?"
    return re.compile(text.replace("\0", ".+") + r"\Z")


_FILES: dict[Family, tuple[str, str]] = {
    "ppo_fsdp": ("ppo", "ppo_trainer.yaml"),
    "ppo_megatron": ("ppo", "ppo_megatron_trainer.yaml"),
    "sft_columns": ("sft1", "sft_trainer.yaml"),
    "sft_fsdp": ("sft", "sft_trainer_engine.yaml"),
    "sft_megatron": ("sft", "sft_trainer_engine.yaml engine=megatron"),
    "generation": ("generation", "generation.yaml"),
    "evaluation": ("evaluation", "evaluation.yaml"),
}
"""Kind of program and composed file of each tree."""


def sources_of(rule: Rule) -> list[str]:
    """Return every source of a rule, the default trees first; at least one."""
    cited = [part for part in rule.source.split("; ") if part]
    return [*tree_sources(rule), *cited, *rule.prs.split()]


@cache
def tree_sources(rule: Rule) -> tuple[str, ...]:
    """List the default files with keys of the rule, with their first and last release."""
    out = []
    for family, (program, file) in _FILES.items():
        if program not in rule.programs:
            continue
        own = _keys(family, program).get(rule.id, frozenset())
        having = [
            version
            for version in versions()
            if family in families_of(version) and own & default_tree(version, family).keys()
        ]
        if having:
            out.append(f"{file} {having[0]}" + (f" to {having[-1]}" if len(having) > 1 else ""))
    return tuple(out)


@cache
def _keys(family: Family, program: str) -> dict[str, frozenset[str]]:
    """Return the keys of a tree by the rule they fall under."""
    result: dict[str, set[str]] = {}
    for key in all_keys(family):
        rule = find_rule(program, key)
        if rule is not None:
            result.setdefault(rule.id, set()).add(key)
    return {name: frozenset(keys) for name, keys in result.items()}


_NO_BLOCKS: Mapping[str, str] = MappingProxyType({})


def apply_rules(
    draft: Draft,
    *names: str,
    blocks: Mapping[str, str] = _NO_BLOCKS,
    old: str = "",
    facts: Mapping[str, str] = _NO_BLOCKS,
) -> None:
    """Set the new keys of these rows, in their order.

    Converters: ``number`` and ``any`` copy; ``number or X`` sets X if the release has no such key;
    ``switch`` is a boolean, ``count`` the same as 0 or 1; ``size`` is 1 if unset; ``at least 0``,
    ``above 0`` (else nothing), ``integer`` (if set), ``integer or null`` and ``frequency`` are
    whole numbers; ``value X`` is constant; ``a=x b=y unset=u else=z`` translates words, and
    ``else=?NAME`` reports other words by the message of that name; ``nonzero or X`` is X also for
    0. An old key may be ``A or B``, where B counts if A is not set, or ``A and B``, where B is only
    named as a source. ``- <- OLD : drop NAME`` sets nothing and gives the reason for an old key.

    Options follow a comma: ``if KEY=VALUE`` sets nothing unless the fact has that value, or the new
    key was set to it before; values may be joined by ``|``. ``else drop NAME`` gives the reason for
    an old key then. ``verbatim`` keeps the spelling, and ``on by default`` is for switches that a
    release lacks.

    Args:
        draft: the translation; changed in place.
        names: ids of rows.
        blocks: blocks of a role, for rows that apply to several roles.
        old: the old key to use instead of the row's.
        facts: what conditions ask for and messages show, next to new settings.
    """
    for name in names:
        rule = rule_named(name)
        assert rule is not None
        for setting in rule.settings:
            keys = _old_keys(draft, old or setting.old.format_map(blocks))
            converter, *options = setting.converter.split(", ")
            conditions = [option for option in options if option.startswith("if ")]
            holds = all(_holds(draft, condition, facts) for condition in conditions)
            reasons = [option for option in options if option.startswith("else drop ")]
            if holds and converter.startswith("drop "):
                draft.drop(converter.removeprefix("drop "), keys[0], facts)
            elif holds:
                new = setting.new.format_map(blocks)
                _apply(draft, new, keys, rule=name, converter=converter, options=options)
            elif reasons:
                draft.drop(reasons[0].removeprefix("else drop "), keys[0], facts)


def _old_keys(draft: Draft, text: str) -> list[str]:
    """Return the key that gives the value, and further keys that are its sources."""
    first, _, fallback = text.partition(" or ")
    if fallback and draft.old.get(first) is None:
        return [fallback]
    return first.split(" and ")


def _apply(
    draft: Draft, new: str, keys: list[str], *, rule: str, converter: str, options: list[str]
) -> None:
    old = keys[0]
    kind, _, argument = converter.partition(" ")
    if kind in ("number", "any"):
        draft.copy(new, old, rule=rule, expected="number" if kind == "number" else "any")
        if argument and not draft.old.has(old):
            draft.put(new, parse_value(argument.removeprefix("or "))[0], rule=rule)
        return
    value, is_set, is_verbatim = _convert(draft, old, converter, is_on="on by default" in options)
    if is_set:
        draft.put(
            new,
            value,
            rule=rule,
            old=keys if old else [],
            verbatim=is_verbatim or "verbatim" in options,
        )


def _holds(draft: Draft, condition: str, facts: Mapping[str, str]) -> bool:
    """Check a condition, ``if KEY=VALUE``, on the facts and the new settings so far."""
    key, _, values = condition.removeprefix("if ").partition("=")
    setting = draft.settings.get(key)
    actual = facts.get(key, None if setting is None else str(setting.value))
    return actual in values.split("|")


def _convert(draft: Draft, old: str, converter: str, *, is_on: bool) -> tuple[Plain, bool, bool]:
    """Return the value, True if it is set, and True if it may keep the old spelling."""
    if converter.startswith("nonzero or "):
        default = parse_value(converter.removeprefix("nonzero or "))[0]
        if isinstance(default, float):
            return float(draft.number(old) or default), True, False
        return draft.integer(old) or default, True, False
    number = None
    if converter in ("size", "at least 0", "above 0", "integer", "integer or null"):
        number = draft.integer(old)
    match converter:
        case "switch":
            return draft.switch(old) or (is_on and not draft.old.has(old)), True, False
        case "count":
            return int(draft.switch(old)), True, False
        case "frequency":
            return max(0, draft.frequency(old)), True, False
        case "size":
            return number or 1, True, True
        case "at least 0":
            return max(0, number or 0), True, False
        case "above 0":
            return number, number is not None and number > 0, True
        case "integer":
            return number, number is not None, True
        case "integer or null":
            return number, True, True
    if converter.startswith("value "):
        return parse_value(converter.removeprefix("value "))[0], True, False
    words = dict(pair.split("=") for pair in converter.split())
    # An empty text counts as unset: verl took the default for both.
    result = words.get(draft.text(old) or "unset", words["else"])
    if result.startswith("?"):
        draft.find(result[1:], old, old=draft.text(old))
        return None, False, False
    return result, True, False
