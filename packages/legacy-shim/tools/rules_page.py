"""Print the page of all rules: ``python packages/legacy-shim/tools/rules_page.py``."""

import sys

from temper_legacy_shim.configs.mapping.rules import Rule, rules, sources_of

_HEAD = """\
# Every rule of `temper-migrate config`

Made by `python packages/legacy-shim/tools/rules_page.py` from the table that the translator uses;
[the guide](config.md) says how to read a report. `{a,b}` is either, `*` one part of a key, `**` the
rest where a release had that key, `***` any rest. Programs: ppo, sft (second generation), sft1
(first), generation, evaluation. A row without an old key is a value that is written out because the
old default differs, or a finding.

Sources are of verl: files of defaults with the releases whose composed tree has the keys,
`TAG:PATH:LINE`, and the pull requests (`#`) that brought, changed or took away the keys.

The last column is a translation that shows the rule, and a test of its own: release, entry and old
tokens, on top of a small run of that program (for PPO: GRPO on FSDP, 64 prompts of 4 completions,
mini-batches of 16 prompts, micro-batches of 2 completions, 8 GPUs). After `=>` stand what becomes
of the token that the rule is about, the level of a finding of that rule, and new settings.

| rule | programs | old key | new key | what becomes of it | reason | hazard | source | test |
|---|---|---|---|---|---|---|---|---|
"""


def page() -> str:
    return _HEAD + "".join(f"{_row(rule)}\n" for rule in rules())


def _row(rule: Rule) -> str:
    origin = "; ".join(sources_of(rule))
    words = (rule.disposition, rule.reason, rule.hazard, origin)
    cells = (
        rule.id,
        " ".join(rule.programs),
        _code(rule.old),
        _code(rule.new),
        *words,
        _code(rule.test),
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    sys.stdout.write(page())
