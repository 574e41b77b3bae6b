"""An account of every token: which rule it fell under, what carries it on, or why nothing does."""

from collections.abc import Sequence

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rules import Rule, find_rule, is_block
from temper_legacy_shim.configs.reading.config_values import flatten
from temper_legacy_shim.configs.reading.entry_points import GROUPS, Program
from temper_legacy_shim.configs.reading.overrides import Override
from temper_legacy_shim.configs.translation import Disposition, Finding, TokenReport

_CARRYING = ("kept", "renamed", "moved", "mapped", "computed")


def report_tokens(draft: Draft, tokens: Sequence[Override], *, program: Program) -> tuple[TokenReport, ...]:
    """Return one report for each token, in order."""
    carried: dict[int, list[str]] = {}
    for setting in draft.settings.values():
        for index in setting.sources:
            carried.setdefault(index, []).append(setting.key)
    return tuple(_report(draft, token, program=program, new_keys=tuple(carried.get(token.index, ()))) for token in tokens)


def _report(draft: Draft, token: Override, *, program: Program, new_keys: tuple[str, ...]) -> TokenReport:
    if token.kind != "set":
        return _no_override(token)
    if token.index in draft.old.superseded:
        later = draft.old.superseded[token.index]
        return _made(token, "superseded", f"token {later + 1} sets the same key and wins.", find_rule(program, token.key))
    rule = find_rule(program, token.key)
    if token.key in GROUPS and rule is not None:
        return _made(token, rule.disposition, rule.reason, rule, new_keys=("model_engine",))
    if rule is None and (isinstance(token.value, dict) or is_block(token.key)):
        return _block(draft, token, program=program, new_keys=new_keys)
    if rule is None:
        return _made(token, "unmapped", "a key of no release: a fork's own, or a slip. Nothing was guessed.", None)
    requested = next((f for f in draft.findings if f.level == "person" and _is_about(f, token.key) and f.rule != "unmapped"), None)
    if requested is not None:
        disposition: Disposition = "conflict" if len(requested.old_keys) > 1 else "needs a person"
        return _made(token, disposition, requested.message, rule, new_keys=new_keys)
    if new_keys:
        disposition = rule.disposition if rule.disposition in _CARRYING else "mapped"
        return _made(token, disposition, rule.reason, rule, new_keys=new_keys)
    drop_reasons = _find_drop_reason(draft, token.key)
    if drop_reasons is not None:
        return _made(
            token, "ignored" if rule.disposition == "ignored" else "dropped", f"{drop_reasons[0].upper()}{drop_reasons[1:]}.", rule
        )
    if rule.disposition in _CARRYING:
        return _made(token, "dropped", f"No effect in this configuration. {rule.reason}", rule)
    return _made(token, rule.disposition, rule.reason, rule)


def _is_about(finding: Finding, key: str) -> bool:
    """Return whether a finding names a key, or one in the block that the key is."""
    return any(old == key or old.startswith(f"{key}.") for old in finding.old_keys)


def _block(draft: Draft, token: Override, *, program: Program, new_keys: tuple[str, ...]) -> TokenReport:
    """Return a block that was given, or taken away, as one value: by the rules of its keys."""
    if token.is_no_block:
        return _made(token, "unmapped", "one value in the place of a block of keys: a fork's own. Nothing was guessed.", None)
    leaves = flatten(token.value, f"{token.key}.") if isinstance(token.value, dict) else {}
    result = [find_rule(program, key) for key in leaves]
    if leaves and any(rule is None for rule in result):
        return _made(token, "unmapped", "a block with keys of no release: a fork's own. They were not guessed.", None, new_keys=new_keys)
    if new_keys:
        names = ", ".join(dict.fromkeys(rule.id for rule in result if rule is not None))
        return _made(token, "mapped", f"A block given as a whole, by the rules {names}.", result[0] if result else None, new_keys=new_keys)
    what = "given as a whole; none of its keys has an effect here" if leaves else "taken away as a whole: its keys had no value"
    return _made(token, "dropped", f"A block {what}.", result[0] if result else None)


def _find_drop_reason(draft: Draft, key: str) -> str | None:
    if key in draft.drop_reasons:
        return draft.drop_reasons[key]
    return next((reason for name, reason in draft.drop_reasons.items() if key.startswith(f"{name}.")), None)


def _no_override(token: Override) -> TokenReport:
    reasons = {
        "flag": "an option of Hydra's own: it chose the tree that was composed on.",
        "rest": "the shell's remaining arguments: what is given there must be in the new spelling.",
        "unreadable": f"not an override: {token.complaint}.",
    }
    disposition: Disposition = "unmapped" if token.kind == "unreadable" else "passed on"
    return TokenReport(
        index=token.index, text=token.text, key="", disposition=disposition, new_keys=(), rule="", reason=reasons[token.kind]
    )


def _made(token: Override, disposition: Disposition, reason: str, rule: Rule | None, *, new_keys: tuple[str, ...] = ()) -> TokenReport:
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
