"""Set new keys by the executable rows of the table of rules."""

from collections.abc import Mapping
from types import MappingProxyType

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rules import RuleSetting, rule_named
from temper_legacy_shim.configs.reading.config_values import Plain, parse_value

_NO_BLOCKS: Mapping[str, str] = MappingProxyType({})


def apply_rules(draft: Draft, *names: str, blocks: Mapping[str, str] = _NO_BLOCKS, old: str = "") -> None:
    """Set the new keys of these rows, in their order.

    Converters: ``number`` and ``any`` copy; ``number or X`` sets X if the release has no such key; ``switch`` is a boolean, ``count``
    the same as 0 or 1; ``size`` is 1 if unset; ``at least 0``, ``above 0`` (else nothing), ``integer`` (if set) and ``frequency`` are
    whole numbers; ``value X`` is constant; ``a=x b=y else=z`` translates words.

    Args:
        draft: read and written.
        names: ids of rows.
        blocks: blocks of one role, for rows that hold for several.
        old: the old key to read instead of the row's own.
    """
    for name in names:
        rule = rule_named(name)
        assert rule is not None
        for setting in rule.settings:
            key = old or setting.old.format_map(blocks)
            _apply(draft, setting.new.format_map(blocks), key, rule=name, setting=setting)


def _apply(draft: Draft, new: str, old: str, *, rule: str, setting: RuleSetting) -> None:
    converter, *options = setting.converter.split(", ")
    kind, _, argument = converter.partition(" ")
    if kind in ("number", "any"):
        draft.copy(new, old, rule=rule, expected="number" if kind == "number" else "any")
        if argument and not draft.old.has(old):
            draft.put(new, parse_value(argument.removeprefix("or "))[0], rule=rule)
        return
    value, is_set, is_verbatim = _convert(draft, old, converter, is_on="on by default" in options)
    if is_set:
        draft.put(new, value, rule=rule, old=[old] if old else [], verbatim=is_verbatim or "verbatim" in options)


def _convert(draft: Draft, old: str, converter: str, *, is_on: bool) -> tuple[Plain, bool, bool]:
    """Return the value, whether there is one, and whether it may keep the old value's spelling."""
    number = None
    if converter in ("size", "at least 0", "above 0", "integer"):
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
    if converter.startswith("value "):
        return parse_value(converter.removeprefix("value "))[0], True, False
    words = dict(pair.split("=") for pair in converter.split())
    return words.get(draft.text(old), words["else"]), True, False
