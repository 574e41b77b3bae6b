"""Where a rule is from: default trees that have its keys, pull requests that moved them, lines of the old code that read them."""

from functools import cache

from temper_legacy_shim.configs.rules import Rule, find_rule
from temper_legacy_shim.configs.trees import Family, all_keys, default_tree, families_of, versions

_FILES: dict[Family, tuple[str, str]] = {
    "ppo_fsdp": ("ppo", "ppo_trainer.yaml"),
    "ppo_megatron": ("ppo", "ppo_megatron_trainer.yaml"),
    "sft_columns": ("sft1", "sft_trainer.yaml"),
    "sft_fsdp": ("sft", "sft_trainer_engine.yaml"),
    "sft_megatron": ("sft", "sft_trainer_engine.yaml engine=megatron"),
    "generation": ("generation", "generation.yaml"),
    "evaluation": ("evaluation", "evaluation.yaml"),
}
"""For each tree: the kind of program, and the file that it is composed from."""


def sources_of(rule: Rule) -> list[str]:
    """Every source of a rule, the default trees first; at least one."""
    cited = [part for part in rule.source.split("; ") if part]
    return [*tree_sources(rule), *cited, *rule.prs.split()]


@cache
def tree_sources(rule: Rule) -> tuple[str, ...]:
    """The files whose composed defaults have keys that fall under the rule, with the first and the last release."""
    out = []
    for family, (program, file) in _FILES.items():
        if program not in rule.programs:
            continue
        own = _keys(family, program).get(rule.id, frozenset())
        having = [version for version in versions() if family in families_of(version) and own & default_tree(version, family).keys()]
        if having:
            out.append(f"{file} {having[0]}" + (f" to {having[-1]}" if len(having) > 1 else ""))
    return tuple(out)


@cache
def _keys(family: Family, program: str) -> dict[str, frozenset[str]]:
    """Keys of a tree by the rule that they fall under."""
    found: dict[str, set[str]] = {}
    for key in all_keys(family):
        rule = find_rule(program, key)
        if rule is not None:
            found.setdefault(rule.id, set()).add(key)
    return {name: frozenset(keys) for name, keys in found.items()}
