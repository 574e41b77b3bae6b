"""What a translation says of itself: for machines as plain values of a documented form, for people as rows of a table."""

from collections.abc import Iterable, Sequence

from temper_legacy_shim.configs.translation import EXIT_CODES, Finding, Outcome, Translation
from temper_legacy_shim.configs.values import Plain

SCHEMA = "temper-migrate/config/1"
"""Name of the form below; it changes with the form. docs/migration/config.md describes it."""

OUTCOMES = {Outcome.CLEAN: "clean", Outcome.PINNED: "pinned", Outcome.PERSON: "needs a person"}


def plain_report(translation: Translation) -> dict[str, Plain]:
    """The whole report, ready for JSON."""
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
            {"level": item.level, "rule": item.rule, "message": item.message, "old_keys": list(item.old_keys)}
            for item in translation.findings
        ],
        "unmapped": dict(translation.unmapped),
    }


def summary_lines(translations: Sequence[Translation], *, next_step: str) -> list[str]:
    """Return what a user can act on: how much was translated, what differs, what to decide, the next command."""
    tokens = [token for each in translations for token in each.tokens]
    translated = sum(bool(token.new_keys) for token in tokens)
    dropped = sum(not token.new_keys and token.disposition not in ("unmapped", "needs a person", "conflict") for token in tokens)
    pinned = sum(setting.is_pinned for each in translations for setting in each.settings)
    findings = [finding for each in translations for finding in each.findings]
    unmapped = sum(finding.rule == "unmapped" for finding in findings)
    levels = [finding.level for finding in findings if finding.rule != "unmapped"]
    lines = [
        f"translated: {translated} of {len(tokens)} settings"
        + (f"; {dropped} have no effect here (--table gives the reasons)" * bool(dropped))
    ]
    lines += [f"written out: {pinned} default{'s' * (pinned != 1)} of the old release, because ours differ"] if pinned else []
    differ = levels.count("hazard")
    lines += [f"will behave differently: {differ} (hazards below)"] if differ else []
    lines += [f"unknown: {unmapped} key{'s' * (unmapped != 1)} that no release has (below)"] if unmapped else []
    decide = levels.count("person")
    lines += [f"to decide: {decide} (below)"] if decide else []
    return [*lines, f"next: {next_step}"]


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with those first that ask most of the reader."""
    return sorted(findings, key=lambda finding: _LEVELS.index(finding.level))


_LEVELS = ("person", "hazard", "refused", "note")


def unmapped_lines(translation: Translation) -> list[str]:
    """The section of keys that no release had: what to do about them, once, and then each."""
    messages = [finding.message for finding in translation.findings if finding.rule == "unmapped"]
    if not messages:
        return []
    head = f"unmapped: {len(messages)} of a fork's own, or slips; nothing was guessed: if they did something, say it in another way"
    return [head, *(f"  unmapped: {message}" for message in messages)]


COLUMNS = ("old", "new", "rule", "reason", "hazard")
"""Of ``table_rows``."""


def table_rows(translation: Translation) -> list[tuple[str, str, str, str, str]]:
    """(old, new, rule and what became of it, reason, hazard) of every token, then of every default that was pinned."""
    values = {setting.key: setting.override for setting in translation.settings}
    rows = []
    for token in translation.tokens:
        new = "\n".join(values.get(key, key) for key in token.new_keys) or "-"
        rows.append((token.text, new, f"{token.disposition}\n{token.rule}".strip(), token.reason, token.hazard))
    pinned = [setting for setting in translation.settings if setting.is_pinned]
    return rows + [("(default)", item.override, f"pinned\n{item.rule}", item.comment.partition(" [")[0], "") for item in pinned]
