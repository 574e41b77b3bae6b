"""Report a translation: plain values, table rows, a YAML file, and each token."""

from collections.abc import Iterable, Mapping, Sequence

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rules import Rule, find_rule, is_block
from temper_legacy_shim.configs.reading.config_values import (
    FROM_FILE,
    Override,
    Plain,
    flatten,
    from_environment,
    yaml_text,
)
from temper_legacy_shim.configs.reading.entry_points import GROUPS, Program
from temper_legacy_shim.configs.translation import (
    EXIT_CODES,
    Disposition,
    Finding,
    Outcome,
    Setting,
    TokenReport,
    Translation,
)

SCHEMA = "temper-migrate/config/1"
"""Name of the form below; it changes with the form. docs/migration/config.md describes it."""

OUTCOMES = {Outcome.CLEAN: "clean", Outcome.PINNED: "pinned", Outcome.PERSON: "needs a person"}


def plain_report(translation: Translation) -> dict[str, Plain]:
    """Return the full report, ready for JSON."""
    source = translation.source
    return {
        "schema": SCHEMA,
        "outcome": OUTCOMES[translation.outcome],
        "exit_code": EXIT_CODES[translation.outcome],
        "source": {
            "version": source.version,
            "is_given": source.is_given,
            "evidence": list(source.evidence),
            "entry": source.entry,
            "program": source.program,
            "tree": source.family,
        },
        "settings": [
            {
                "key": item.key,
                "value": item.value,
                "is_group": item.is_group,
                "is_pinned": item.is_pinned,
                "rule": item.rule,
                "old_keys": list(item.old_keys),
                "sources": list(item.sources),
                "is_verbatim": item.is_verbatim,
            }
            for item in translation.settings
        ],
        "tokens": [
            {
                "index": token.index,
                "text": token.text,
                "key": token.key,
                "disposition": token.disposition,
                "new_keys": list(token.new_keys),
                "rule": token.rule,
                "reason": token.reason,
                "prs": list(token.prs.split()),
                "hazard": token.hazard,
            }
            for token in translation.tokens
        ],
        "findings": [
            {
                "level": item.level,
                "rule": item.rule,
                "message": item.message,
                "old_keys": list(item.old_keys),
            }
            for item in translation.findings
        ],
        "unmapped": dict(translation.unmapped),
    }


def summary_lines(translations: Sequence[Translation], *, next_step: str) -> list[str]:
    """Summarize a report: counts of settings, differences and decisions; the next command."""
    tokens = [token for each in translations for token in each.tokens]
    translated = sum(bool(token.new_keys) for token in tokens)
    dropped = sum(
        not token.new_keys and token.disposition not in ("unmapped", "needs a person", "conflict")
        for token in tokens
    )
    pinned = sum(setting.is_pinned for each in translations for setting in each.settings)
    findings = [finding for each in translations for finding in each.findings]
    unmapped = sum(finding.rule == "unmapped" for finding in findings)
    levels = [finding.level for finding in findings if finding.rule != "unmapped"]
    has = "has" if dropped == 1 else "have"
    lines = [
        f"translated: {translated} of {len(tokens)} settings"
        + (f"; {dropped} {has} no effect here (--table gives the reasons)" * bool(dropped))
    ]
    lines += (
        [
            (
                f"written out: {pinned} default{'s' * (pinned != 1)} of the old release, because "
                "ours differ"
            )
        ]
        if pinned
        else []
    )
    differ = levels.count("hazard")
    lines += [f"will behave differently: {differ} (hazards below)"] if differ else []
    lines += (
        [f"unknown: {unmapped} key{'s' * (unmapped != 1)} that no release has (below)"]
        if unmapped
        else []
    )
    decide = levels.count("person")
    lines += [f"to decide: {decide} (below)"] if decide else []
    return [*lines, f"next: {next_step}"]


def sort_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with those first that ask most of the reader."""
    return sorted(findings, key=lambda finding: _LEVELS.index(finding.level))


_LEVELS = ("person", "hazard", "refused", "note")


def unmapped_lines(translation: Translation) -> list[str]:
    """Return the section of keys that no release had: the action, then each finding."""
    messages = [finding.message for finding in translation.findings if finding.rule == "unmapped"]
    if not messages:
        return []
    head = (
        f"unmapped: {len(messages)} of a fork's own, or slips; nothing was guessed: if they did "
        "something, say it in another way"
    )
    return [head, *(f"  unmapped: {message}" for message in messages)]


COLUMNS = ("old", "new", "rule", "reason", "hazard")
"""Columns of ``table_rows``."""


def table_rows(translation: Translation) -> list[tuple[str, str, str, str, str]]:
    """Build rows (old, new, rule and disposition, reason and hazard) of tokens and pins."""
    values = {setting.key: setting.override for setting in translation.settings}
    rows = []
    for token in translation.tokens:
        new = "\n".join(values.get(key, key) for key in token.new_keys) or "-"
        rows.append(
            (
                token.text,
                new,
                f"{token.disposition}\n{token.rule}".strip(),
                token.reason,
                token.hazard,
            )
        )
    pinned = [setting for setting in translation.settings if setting.is_pinned]
    return rows + [
        ("(default)", item.override, f"pinned\n{item.rule}", item.comment.partition(" [")[0], "")
        for item in pinned
    ]


def yaml_of(translation: Translation) -> str:
    """Return a file for ``temper-train --config-dir DIR --config-name NAME``.

    Groups stand in its defaults list; every value has a comment with the old key it comes from, or
    the old default it pins, and the rule in brackets. What a person has to decide stands at
    the top.
    """
    lines = [*_header(translation), "defaults:", "  - temper"]
    lines += [
        f"  - override /{item.key}: {yaml_text(item.value)}  # {printable(item.comment)}"
        for item in translation.settings
        if item.is_group
    ]
    lines += ["  - _self_", ""]
    lines += _block({item.key: item for item in translation.settings if not item.is_group})
    return "\n".join(lines) + "\n"


def _header(translation: Translation) -> list[str]:
    source = translation.source
    lines = [
        (
            f"# Written by temper-migrate config from {source.entry or source.program} of "
            f"{source.release}."
        ),
        (
            "# A comment names the old key, or the old default that is pinned, and the rule: "
            "temper-migrate explain KEY says more."
        ),
    ]
    for finding in translation.findings:
        if finding.level in ("person", "hazard"):
            word = "DECIDE" if finding.level == "person" else "differs"
            lines.append(f"# {word}: {finding.message}")
    return [printable(line) for line in lines]


def printable(text: str) -> str:
    """Escape text for one line of a YAML file, which holds no control characters."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def _to_file_name(setting: Setting) -> Plain:
    return from_environment(setting.value, is_number=setting.is_number)


def _block(settings: Mapping[str, Setting]) -> list[str]:
    """Return the nested blocks, in the order of the first value of each."""
    return _lines(sorted(settings.items(), key=lambda item: _position(item[0], settings)))


def _position(key: str, settings: Mapping[str, Setting]) -> tuple[int, ...]:
    """Compute the sort key of a setting, so that the settings of a block stay together."""
    names = list(settings)
    parts = key.split(".")
    result = []
    for count in range(1, len(parts) + 1):
        prefix = ".".join(parts[:count])
        result.append(
            next(
                number
                for number, name in enumerate(names)
                if name == prefix or name.startswith(f"{prefix}.")
            )
        )
    return tuple(result)


def _lines(items: Sequence[tuple[str, Setting]]) -> list[str]:
    lines: list[str] = []
    open_blocks: list[str] = []
    for key, setting in items:
        parts = key.split(".")
        while open_blocks != parts[: len(open_blocks)]:
            open_blocks.pop()
        for depth in range(len(open_blocks), len(parts) - 1):
            lines.append(f"{'  ' * depth}{yaml_text(parts[depth])}:")
            open_blocks.append(parts[depth])
        lines.append(
            f"{'  ' * (len(parts) - 1)}{yaml_text(parts[-1])}: {yaml_text(_to_file_name(setting))} "
            f" # {printable(setting.comment)}"
        )
    return lines


_CARRYING = ("kept", "renamed", "moved", "mapped", "computed")


def report_tokens(
    draft: Draft, tokens: Sequence[Override], *, program: Program
) -> tuple[TokenReport, ...]:
    carried: dict[int | str, list[str]] = {}
    for setting in draft.settings.values():
        for index in setting.sources:
            carried.setdefault(index, []).append(setting.key)
        if not setting.is_pinned:
            for key in setting.old_keys:
                carried.setdefault(key, []).append(setting.key)
    return tuple(
        _report(
            draft,
            token,
            program=program,
            # Values of a file share one index, so their keys find the settings.
            new_keys=tuple(carried.get(token.key if token.index == FROM_FILE else token.index, ())),
        )
        for token in tokens
    )


def _report(
    draft: Draft, token: Override, *, program: Program, new_keys: tuple[str, ...]
) -> TokenReport:
    if token.kind != "set":
        return _no_override(token)
    if token.index in draft.old.superseded:
        later = draft.old.superseded[token.index]
        return _made(
            token,
            "superseded",
            f"token {later + 1} sets the same key and wins.",
            find_rule(program, token.key),
        )
    rule = find_rule(program, token.key)
    if token.key in GROUPS and rule is not None:
        return _made(token, rule.disposition, rule.reason, rule, new_keys=("model_engine",))
    if rule is None and (isinstance(token.value, dict) or is_block(token.key)):
        return _translate_block(token, program=program, new_keys=new_keys)
    if rule is None:
        return _made(
            token,
            "unmapped",
            "a key of no release: a fork's own, or a slip. Nothing was guessed.",
            None,
        )
    # A question outranks the rule: the user has to act, whatever becomes of the value.
    requested = next(
        (
            f
            for f in draft.findings
            if f.level == "person" and _is_about(f, token.key) and f.rule != "unmapped"
        ),
        None,
    )
    if requested is not None:
        disposition: Disposition = "conflict" if len(requested.old_keys) > 1 else "needs a person"
        return _made(token, disposition, requested.message, rule, new_keys=new_keys)
    if new_keys:
        disposition = rule.disposition if rule.disposition in _CARRYING else "mapped"
        return _made(token, disposition, rule.reason, rule, new_keys=new_keys)
    reason = _find_drop_reason(draft, token.key)
    if reason is not None:
        # Keys and releases are spelled as they are, also at the start of a sentence.
        is_word = reason.partition(" ")[0].replace("-", "").isalpha()
        return _made(
            token,
            "ignored" if rule.disposition == "ignored" else "dropped",
            f"{reason[0].upper() if is_word else reason[0]}{reason[1:]}.",
            rule,
        )
    if rule.disposition in _CARRYING:
        return _made(token, "dropped", f"No effect in this configuration. {rule.reason}", rule)
    return _made(token, rule.disposition, rule.reason, rule)


def _is_about(finding: Finding, key: str) -> bool:
    """Check if a finding is about a key, or about a key in that block."""
    return any(old == key or old.startswith(f"{key}.") for old in finding.old_keys)


def _translate_block(
    token: Override, *, program: Program, new_keys: tuple[str, ...]
) -> TokenReport:
    """Report a block that was set or deleted as a value, by the rules of the keys in it."""
    if token.is_no_block:
        return _made(
            token,
            "unmapped",
            "one value in the place of a block of keys: a fork's own. Nothing was guessed.",
            None,
        )
    leaves = flatten(token.value, f"{token.key}.") if isinstance(token.value, dict) else {}
    result = [find_rule(program, key) for key in leaves]
    if leaves and any(rule is None for rule in result):
        return _made(
            token,
            "unmapped",
            "a block with keys of no release: a fork's own. They were not guessed.",
            None,
            new_keys=new_keys,
        )
    if new_keys:
        names = ", ".join(dict.fromkeys(rule.id for rule in result if rule is not None))
        return _made(
            token,
            "mapped",
            f"A block given as a whole, by the rules {names}.",
            result[0] if result else None,
            new_keys=new_keys,
        )
    what = (
        "given as a whole; none of its keys has an effect here"
        if leaves
        else "taken away as a whole: its keys had no value"
    )
    return _made(token, "dropped", f"A block {what}.", result[0] if result else None)


def _find_drop_reason(draft: Draft, key: str) -> str | None:
    if key in draft.drop_reasons:
        return draft.drop_reasons[key]
    return next(
        (reason for name, reason in draft.drop_reasons.items() if key.startswith(f"{name}.")), None
    )


def _no_override(token: Override) -> TokenReport:
    reasons = {
        "flag": "an option of Hydra's own: it chose the tree that was composed on.",
        "rest": "the shell's remaining arguments: what is given there must be in the new spelling.",
        "unreadable": f"not an override: {token.complaint}.",
    }
    disposition: Disposition = "unmapped" if token.kind == "unreadable" else "passed on"
    return TokenReport(
        index=token.index,
        text=token.text,
        key="",
        disposition=disposition,
        new_keys=(),
        rule="",
        reason=reasons[token.kind],
    )


def _made(
    token: Override,
    disposition: Disposition,
    reason: str,
    rule: Rule | None,
    *,
    new_keys: tuple[str, ...] = (),
) -> TokenReport:
    return TokenReport(
        index=token.index,
        text=token.text,
        key=token.key,
        disposition=disposition,
        new_keys=new_keys,
        rule="" if rule is None else rule.id,
        reason=reason,
        prs="" if rule is None else rule.prs,
        hazard="" if rule is None else rule.hazard,
    )
