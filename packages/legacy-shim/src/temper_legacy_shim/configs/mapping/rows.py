"""Execute ``data/rows.tsv``, the table that maps old keys to new settings.

Each row sets one new key, reports one finding, or explains why an old key is dropped. Rows belong
to steps, which builders apply in their order: ``apply_rows(draft, "clip")``. Columns:

``rule``: the row of rules.tsv that it belongs to, which reports show.
``new``: the new key; ``-`` for a finding or a reason.
``old``: the old key. ``A and B``: B is a further source. ``x.{a,b}``: each in turn. Empty: the
    value depends on no key.
``how``: the converter, see ``_convert``; or ``find NAME`` and ``drop NAME`` for a message of
    messages.tsv.
``when``: conditions separated by commas, see ``_holds``.
``why``: the function of verl, or the reason, behind a row that is not obvious.

A name in braces is a block that the builder passes or a fact (see ``fact``). Messages may show
facts too, and ``{key}``, ``{value}`` (of the old key), ``{old[KEY]}`` and ``{settings[KEY]}``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeVar, cast

from temper_legacy_shim.configs.mapping.builder import Draft, messages, read_table
from temper_legacy_shim.configs.reading.config_values import Plain, parse_value

Result = TypeVar("Result")
FACTS: dict[str, Callable[[Draft], object]] = {}
_CONDITION = re.compile(
    r"(?:(?P<key>\S+) )?(?P<word>since|before|set|has|given|on|is|>|<=)(?: (?P<argument>\S+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    rule: str
    new: str
    old: str
    how: str
    when: tuple[str, ...]

    @property
    def sets(self) -> bool:
        """True if it sets its new key."""
        return not self.how.startswith(("find ", "drop "))


def fact(function: Callable[[Draft], Result]) -> Callable[[Draft], Result]:
    """Let rows use a function of the draft by its name: in conditions, keys and messages."""
    FACTS[function.__name__] = function
    return function


@cache
def steps() -> Mapping[str, list[Row]]:
    """Return the rows of each step, in their order."""
    result: dict[str, list[Row]] = {}
    for step, rule, new, old, how, when, _ in read_table("rows.tsv"):
        row = Row(rule=rule, new=new, old=old, how=how, when=tuple(filter(None, when.split(", "))))
        result.setdefault(step, []).append(row)
    return result


def rows_of(rule: str) -> list[Row]:
    """Return the executable rows of a rule, in all steps."""
    return [row for rows in steps().values() for row in rows if row.rule == rule]


class _Names(dict[str, object]):
    """Values that keys, conditions and messages show: those of a step, else facts of the draft."""

    def __init__(self, draft: Draft, given: Mapping[str, object]) -> None:
        super().__init__(given, version=draft.old.version, family=draft.old.family)
        self.draft = draft

    def __missing__(self, name: str) -> object:
        return FACTS[name](self.draft)

    def fill(self, text: str) -> str:
        """Replace names in braces; alternatives such as ``{a,b}`` stay as they are."""
        if "{" not in text:
            return text
        return re.sub(r"\{(\w+)\}", lambda match: str(self[match[1]]), text)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Values by key, as format strings index them."""

    get: Callable[[str], Plain]

    def __getitem__(self, key: str) -> Plain:
        return self.get(key)


def apply_rows(draft: Draft, step: str, **given: object) -> None:
    """Apply the rows of a step to the draft, in their order.

    Args:
        draft: the translation; changed in place.
        step: the first column of the table.
        given: blocks of a role, and values for messages, next to facts.
    """
    names = _Names(draft, given)
    for row in steps()[step]:
        for keys in _key_lists(names.fill(row.old)):
            if all(_holds(draft, names.fill(each), keys[0], names) for each in row.when):
                is_last = _apply(draft, row, keys, names)
                if is_last:
                    return


@lru_cache(maxsize=4096)
def _key_lists(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the old keys of a row once for each alternative; the first key gives the value."""
    return tuple(tuple(filter(None, each.split(" and "))) or ("",) for each in alternatives(text))


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
    return [
        text[:start] + inner + after
        for part in parts
        for inner in alternatives(part)
        for after in rest
    ]


def _holds(draft: Draft, condition: str, key: str, names: _Names) -> bool:
    """Check a condition.

    ``since V`` and ``before V`` are about the release. ``set`` (by the user), ``has`` (the tree),
    ``given`` (a text), ``on``, ``> N``, ``<= N`` and ``is A|B`` are about the old key of the row,
    or about the one before the word. ``is`` may also compare a fact or a new key. Any other word is
    a fact. ``not`` before any of them negates it.
    """
    text, match = _parse_condition(condition)
    is_true = bool(names[text]) if match is None else _is_true(draft, match, key, names)
    return is_true != condition.startswith("not ")


@lru_cache(maxsize=4096)
def _parse_condition(condition: str) -> tuple[str, re.Match[str] | None]:
    text = condition.removeprefix("not ")
    return text, _CONDITION.fullmatch(text)


def _is_true(draft: Draft, match: re.Match[str], key: str, names: _Names) -> bool:
    compared, argument = match["key"] or key, match["argument"]
    match match["word"]:
        case "since":
            return draft.since(argument)
        case "before":
            return not draft.since(argument)
        case "set":
            return draft.old.is_set(compared)
        case "has":
            return draft.old.has(compared)
        case "given":
            # Shells pass null as text.
            return draft.text(compared).lower() not in ("", "null", "none")
        case "on":
            return draft.switch(compared)
        case "is":
            return _text_of(draft, compared, names) in argument.split("|")
    number = draft.number(compared)
    is_above = number is not None and number > float(argument)
    return is_above if match["word"] == ">" else number is not None and not is_above


def _text_of(draft: Draft, compared: str, names: _Names) -> str:
    """Return a fact, a new setting or its default, or an old value."""
    if compared in names or compared in FACTS:
        return str(names[compared])
    value = draft.value(compared)
    return draft.text(compared) if value is None else str(value)


def _apply(draft: Draft, row: Row, keys: tuple[str, ...], names: _Names) -> bool:
    """Do what a row says; return True if it ends the step."""
    verb, _, name = row.how.partition(" ")
    if verb in ("find", "drop"):
        level, template = messages()[name]
        shown = {
            "key": keys[0],
            "value": draft.old.get(keys[0]),
            "new": names.fill(row.new),
            "old": _Lookup(draft.text),
            "settings": _Lookup(draft.value),
        }
        text = template.format_map(_Names(draft, {**names, **shown}))
        if verb == "find":
            assert level != "dropped"
            draft.report(level, name.partition(".")[0], text, *filter(None, keys))
        else:
            draft.explain_drop(keys[0], text)
        return False
    return _convert(draft, row, keys, names)


def _convert(draft: Draft, row: Row, keys: tuple[str, ...], names: _Names) -> bool:
    """Set the new key of a row; return True if an unknown word ends the step.

    ``number``, ``any``, ``integer`` and ``size`` (1 if unset) keep the spelling of the value;
    ``text``, ``float``, ``natural`` (0 if negative), ``frequency``, ``switch`` and ``count`` (0 or
    1) do so after ``verbatim``. ``or X`` after them is the value of a release without the key, or
    of a key without a value. ``value X`` is a constant, ``group X`` one of a configuration group,
    ``fact NAME`` that of a fact. ``words a=b unset=u else=z`` translates words, and ``words NAME:
    a=b`` those of a fact. ``else=?MESSAGE`` reports other words, and ``else=!MESSAGE`` ends the
    step as well.
    """
    old, new = keys[0], names.fill(row.new)
    how = row.how.removeprefix("verbatim ")
    kind, _, rest = how.partition(" ")
    default = parse_value(rest.removeprefix("or "))[0]
    if kind in ("number", "any"):
        draft.copy(new, old, rule=row.rule, expected="number" if kind == "number" else "any")
        if rest and not draft.old.has(old):
            draft.put(new, default, rule=row.rule)
        return False
    value: Plain
    if kind == "words":
        value, is_last = _translate_word(draft, rest, old, names)
        if value is None:
            return is_last
    elif kind == "size":
        value = draft.integer(old) or default or 1
    elif kind in ("value", "group", "fact"):
        value = cast("Plain", names[rest]) if kind == "fact" else default
    else:
        value = _value_of(draft, old, kind)
        if value is None:
            if not rest:
                return False
            value = default
    draft.put(
        new,
        value,
        rule=row.rule,
        old=keys if old else [],
        verbatim=how != row.how or kind in ("integer", "size"),
        group=kind == "group",
    )
    return False


def _value_of(draft: Draft, old: str, kind: str) -> Plain:
    """Return the value of a converter for one key; None if the key has none."""
    match kind:
        case "text":
            return draft.text(old) or None
        case "switch":
            return draft.switch(old) if draft.old.has(old) else None
        case "count":
            return int(draft.switch(old))
        case "frequency":
            return max(0, draft.frequency(old))
        case "float":
            number = draft.number(old)
            return None if number is None else float(number)
    number = draft.integer(old)
    match kind:
        case "natural":
            return max(0, number or 0)
    assert kind == "integer"
    return number


def _translate_word(draft: Draft, text: str, old: str, names: _Names) -> tuple[Plain, bool]:
    """Return the new word, or None and True if the step ends."""
    name, is_fact, pairs = text.rpartition(": ")
    words = dict(pair.split("=") for pair in pairs.split())
    word = str(names[name]) if is_fact else draft.text(old)
    # An empty text counts as unset: verl took the default for both.
    result = words.get(word or "unset", words["else"])
    if result[0] not in "?!":
        return result, False
    known = ", ".join(each for each in words if each not in ("unset", "else"))
    draft.find(result[1:], old, old=word, names=known)
    return None, result[0] == "!"
