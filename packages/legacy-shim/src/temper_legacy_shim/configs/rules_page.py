"""The page of the documentation that shows every rule; ``python -m temper_legacy_shim.configs.rules_page`` prints it."""

import sys

from temper_legacy_shim.configs.rules import Rule, rules

_HEAD = """\
# Every rule of `temper-migrate config`

Made by `python -m temper_legacy_shim.configs.rules_page` from the table that the translator uses; [the guide](config.md) says how to read
a report. `{a,b}` is either, `*` one part of a key, `**` the rest where a release had that key, `***` any rest. Programs: ppo, sft
(second generation), sft1 (first), generation, evaluation. Numbers with `#` are pull requests of verl. A row without an old key is a value
that is written out because the old default differs, or a finding.

| rule | programs | old key | new key | what becomes of it | reason | hazard | source |
|---|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(f"{_row(rule)}\n" for rule in rules())


def _row(rule: Rule) -> str:
    cells = (rule.id, " ".join(rule.programs), _code(rule.old), _code(rule.new), rule.disposition, rule.reason, rule.hazard, rule.prs)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    sys.stdout.write(page())
