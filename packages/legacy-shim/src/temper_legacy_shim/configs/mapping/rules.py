"""Read the table of rules, ``data/rules.tsv``: what became of each old key, and why."""

import re
from dataclasses import dataclass
from functools import cache
from typing import cast

from temper_legacy_shim.configs.mapping.builder import read_table
from temper_legacy_shim.configs.mapping.rows import alternatives, rows_of
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
    """New keys, separated by commas; those of its executable rows unless the table names others."""
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


def _parse_row(cells: list[str]) -> Rule:
    name, programs, old, releases, new, disposition, reason, prs, hazard, source, test = cells
    executed = dict.fromkeys(row.new for row in rows_of(name) if row.sets)
    return Rule(
        id=name,
        programs=tuple(programs.split()),
        old=old,
        versions=releases,
        new=new or ", ".join(executed),
        disposition=cast("Disposition", disposition),
        reason=reason,
        prs=prs,
        hazard=hazard,
        source=source,
        test=test,
    )


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
