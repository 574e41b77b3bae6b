"""Execute ``data/rows.tsv``, the table that maps old keys to new settings.

Each row sets one new key, reports one finding, or explains why an old key is dropped. Rows belong
to steps, which builders apply in their order: ``apply_rows(draft, "clip")``.

Columns:
    step: the step.
    rule: the row of rules.tsv that it belongs to, which reports show.
    new: the new key; ``-`` for a finding or a reason, unless its message shows ``{new}``.
    old: the old key. ``A or B``: the first that has a value. ``A and B``: B is a further source.
        ``x.{a,b}``: each in turn. Empty: the value depends on no key.
    how: a converter, or ``find NAME`` and ``drop NAME`` for a message of messages.tsv. With
        ``last`` before it, or ``last`` alone, no later row of the step is applied.
    when: conditions with commas between them; all have to hold.
    why: the function of verl, or the reason, behind a row that is not obvious.

Converters:
    number, any: the value as it is, which keeps its spelling in a script.
    integer, size: a whole number; size is 1 instead of none or 0. Both keep the spelling.
        ``integer times NAME`` multiplies it by a fact.
    path: a file or folder, in which ``~/`` becomes the home folder.
    list: a list; another value counts as none.
    text, float, switch, natural (0 if negative), count (0 or 1), frequency (0 if unset or never):
        a value of that type, which keeps its spelling after ``verbatim``.
    value X, group X: a constant; the choice of a configuration group.
    fact NAME: the result of a fact.
    words a=b unset=u else=z: a word for a word; ``words NAME: a=b else=z`` for that of a fact.
        ``else=?MESSAGE`` reports other words as ``{word}``, and the known ones as ``{names}``;
        ``else=z?MESSAGE`` sets z as well. ``else=!MESSAGE`` ends the step.

``or X`` after a converter is the value for a key without one. Without it such a row sets nothing.
For number, any and switch it only counts in a release without the key.

Conditions, which ``not`` negates:
    since V, before V: the release is V or later, or an older one.
    set, has, given: the user set the key; it is in the tree; its value is a text other than null.
    on, is A|B: the value is true, or one of these texts.
    differs KEY: the two keys have different values.
    > N, <= N: it is above N, or up to N: its whole part, or the number if N has a point (0.0).
    KEY before any of these words: compare that key and not the row's. For ``is`` it may also be a
        new key, which comes before an old one of the same name, or a fact.
    NAME: the fact is true.

Facts are functions of the draft that ``@fact`` registers, and those of the draft and a role that
``@role_fact`` does. Names in braces, in keys and conditions, are facts or values that the builder
passes. Messages may show these, and ``{key}``, ``{value}`` (of the old key), ``{old[KEY]}`` and
``{settings[KEY]}``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeVar, cast

from temper_legacy_shim.configs.mapping.builder import Draft, messages, read_table
from temper_legacy_shim.configs.reading.config_values import Plain, from_home, parse_value
from temper_legacy_shim.configs.reading.trees import versions

Result = TypeVar("Result")
Role = TypeVar("Role")
FACTS: dict[str, Callable[..., object]] = {}
"""Functions of the draft, by the name that rows use."""
_ROLE_FACTS: set[str] = set()
"""Names of the facts that take a role as well as the draft."""
_MAY_BE_NONE = ("integer", "text", "float", "switch", "path", "list")
CONVERTERS = (
    *("number", "any", "size", "natural", "count", "frequency", "value", "group", "fact", "words"),
    *_MAY_BE_NONE,
)
_KEY_WORDS = ("set", "has", "given", "on")
_CONDITION = re.compile(
    r"(?P<not>not )?(?:(?P<key>\S+) )?"
    rf"(?:(?P<plain>{'|'.join(_KEY_WORDS)})"
    r"|(?P<word>since|before|is|differs|>|<=) (?P<argument>\S+))"
)

_REPORTED = re.compile(r"(?P<value>[^?!]*)(?P<mark>[?!])(?P<message>.+)")
"""New word of ``words`` with a report: the word, ``?`` or ``!``, and the name of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    is_negated: bool
    word: str
    """One of the words, or the name of a fact."""
    key: str = ""
    """Key before the word; empty for that of the row."""
    argument: str = ""

    @property
    def is_of_key(self) -> bool:
        """True if it depends on the old key of the row."""
        return not self.key and self.word in (*_KEY_WORDS, "is", "differs", ">", "<=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    rule: str
    new: str
    old: str
    converter: str
    """A converter, find or drop; empty if the row only ends the step."""
    argument: str
    """Text after it: the name of a message or fact, or ``or X``."""
    default: Plain
    """X of ``or X``, and of ``value X`` and ``group X``."""
    words: Mapping[str, str]
    factor: str
    """Fact that a whole number is multiplied by."""
    is_verbatim: bool
    is_last: bool
    """True if no later row of the step is applied."""
    when: tuple[Condition, ...]
    """Conditions that are the same for each old key of the row."""
    when_key: tuple[Condition, ...]
    """Conditions on an old key."""

    @property
    def sets(self) -> bool:
        """True if it sets its new key."""
        return self.converter not in ("find", "drop", "")


def fact(function: Callable[[Draft], Result]) -> Callable[[Draft], Result]:
    """Let rows use a function of the draft by its name: in conditions, keys and messages."""
    FACTS[function.__name__] = function
    return function


def role_fact(function: Callable[[Draft, Role], Result]) -> Callable[[Draft, Role], Result]:
    """Let the rows of a role use a function of the draft and the role by its name."""
    FACTS[function.__name__] = function
    _ROLE_FACTS.add(function.__name__)
    return function


@cache
def steps() -> Mapping[str, list[Row]]:
    """Return the rows of each step, in their order."""
    return parse_rows(read_table("rows.tsv"))


def parse_rows(table: list[list[str]]) -> Mapping[str, list[Row]]:
    """Return the rows of a table by step.

    Raises:
        ValueError: a row is faulty; the message has its line.
    """
    result: dict[str, list[Row]] = {}
    for line, cells in enumerate(table, start=2):
        try:
            result.setdefault(cells[0], []).append(_parse_row(cells))
        except ValueError as error:
            raise ValueError(f"rows.tsv, line {line}: {error}") from error
    return result


def _parse_row(cells: list[str]) -> Row:
    if len(cells) != 7:
        raise ValueError(
            f"{len(cells)} columns, but 7 are expected: step, rule, new, old, how, when and why "
            "with tabs between them."
        )
    _, rule, new, old, how, when, _ = cells
    is_last = how.partition(" ")[0] == "last"
    how = how.removeprefix("last").lstrip() if is_last else how
    converter, _, rest = how.removeprefix("verbatim ").partition(" ")
    argument, factor = ("", rest[6:]) if rest.startswith("times ") else (rest, "")
    default: Plain = None
    words: dict[str, str] = {}
    if converter in ("find", "drop"):
        _check_message(rest, is_reason=converter == "drop")
    elif converter == "words":
        argument, _, pairs = rest.rpartition(": ")
        words = _parse_words(pairs)
    elif (converter not in CONVERTERS and how) or (factor and converter != "integer"):
        raise ValueError(f"unknown converter {how!r}. Choose one of {', '.join(CONVERTERS)}.")
    elif converter != "fact":
        default = parse_value(rest.removeprefix("or "))[0]
    conditions = [_parse_condition(text) for text in filter(None, when.split(", "))]
    return Row(
        rule=rule,
        new=new,
        old=old,
        converter=converter,
        argument=argument,
        default=default,
        words=words,
        factor=factor,
        # A script may only keep the spelling of the one key that is the value.
        is_verbatim=(how.startswith("verbatim ") or converter in ("integer", "size", "path"))
        and " and " not in old,
        is_last=is_last,
        when=tuple(each for each in conditions if not each.is_of_key),
        when_key=tuple(each for each in conditions if each.is_of_key),
    )


def _check_message(name: str, *, is_reason: bool) -> None:
    if name not in messages():
        raise ValueError(f"messages.tsv has no message {name!r}.")
    if (messages()[name][0] == "dropped") != is_reason:
        raise ValueError(f"{name} is of level {messages()[name][0]}: drop takes dropped alone.")


def _parse_words(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split()]
    words = {old: new for old, _, new in pairs if new}
    if "else" not in words or len(words) < len(pairs):
        raise ValueError(f"words are pairs such as a=b, and else=z, but not {text!r}.")
    for new in words.values():
        if match := _REPORTED.fullmatch(new):
            _check_message(match["message"], is_reason=False)
    return words


def _parse_condition(text: str) -> Condition:
    if match := _CONDITION.fullmatch(text):
        if match["word"] in ("since", "before") and match["argument"] not in versions():
            raise ValueError(f"{match['argument']} in {text!r} is no release.")
        return Condition(
            is_negated=bool(match["not"]),
            word=match["plain"] or match["word"],
            key=match["key"] or "",
            argument=match["argument"] or "",
        )
    name = text.removeprefix("not ")
    if not name.isidentifier():
        raise ValueError(f"{text!r} is no condition, and no name of a fact.")
    return Condition(is_negated=name != text, word=name)


def rows_of(rule: str) -> list[Row]:
    """Return the executable rows of a rule, in all steps."""
    return [row for rows in steps().values() for row in rows if row.rule == rule]


class _Names(dict[str, object]):
    """Values that keys, conditions and messages show: those of a step, else facts of the draft."""

    def __init__(self, draft: Draft, given: Mapping[str, object]) -> None:
        super().__init__(given, version=draft.old.version, family=draft.old.family)
        self.draft = draft

    def __missing__(self, name: str) -> object:
        if name not in FACTS:
            raise LookupError(
                f"rows.tsv or messages.tsv use {name!r}, which is no fact and was not passed to "
                f"apply_rows. Write a function {name}(draft) with @fact, or pass a value."
            )
        if name in _ROLE_FACTS:
            return FACTS[name](self.draft, self["role"])
        return FACTS[name](self.draft)

    def fill(self, text: str) -> str:
        """Replace names in braces; alternatives such as ``{a,b}`` stay as they are."""
        if "{" not in text:
            return text
        parts = list(_split_names(text))
        parts[1::2] = [str(self[name]) for name in parts[1::2]]
        return "".join(parts)


@lru_cache(maxsize=1024)
def _split_names(text: str) -> list[str]:
    """Return texts, and the names in braces between them."""
    return re.split(r"\{(\w+)\}", text)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Values by key, as format strings index them."""

    get: Callable[[str], Plain]

    def __getitem__(self, key: str) -> Plain:
        return self.get(key)


def apply_rows(draft: Draft, step: str, **given: object) -> bool:
    """Apply the rows of a step to the draft, in their order; return False if a row ended it.

    Args:
        draft: the translation; changed in place.
        step: the first column of the table.
        given: blocks of a role, and values for messages, next to facts.
    """
    names = _Names(draft, given)
    for row in steps()[step]:
        if not _all_hold(draft, row.when, "", names):
            continue
        for keys in _key_lists(names.fill(row.old)):
            if " or " in keys[0]:
                choices = keys[0].split(" or ")
                keys = (next(filter(draft.text, choices), choices[0]), *keys[1:])
            if _all_hold(draft, row.when_key, keys[0], names):
                is_end = _apply(draft, row, keys, names)
                if is_end or row.is_last:
                    return False
    return True


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


def _all_hold(draft: Draft, conditions: tuple[Condition, ...], key: str, names: _Names) -> bool:
    # A loop is faster than all() of a generator, and runs for each row.
    for each in conditions:  # noqa: SIM110
        if not _holds(draft, each, key, names):
            return False
    return True


def _holds(draft: Draft, condition: Condition, key: str, names: _Names) -> bool:
    """Check a condition on the old key of a row, or on the one that it names."""
    compared, argument = condition.key or key, condition.argument
    if "{" in compared or "{" in argument:
        compared, argument = names.fill(compared), names.fill(argument)
    match condition.word:
        case "since":
            result = draft.since(argument)
        case "before":
            result = not draft.since(argument)
        case "set":
            result = draft.old.is_set(compared)
        case "has":
            result = draft.old.has(compared)
        case "given":
            # Shells pass null as text.
            result = draft.text(compared).lower() not in ("", "null", "none")
        case "on":
            result = draft.switch(compared)
        case "differs":
            result = draft.old.get(compared) != draft.old.get(argument)
        case "is":
            result = _text_of(draft, compared, names) in argument.split("|")
        case ">" | "<=":
            read = draft.number if "." in argument else draft.integer
            number = read(compared)
            is_above = number is not None and number > float(argument)
            result = is_above if condition.word == ">" else number is not None and not is_above
        case name:
            result = bool(names[name])
    return result != condition.is_negated


def _text_of(draft: Draft, compared: str, names: _Names) -> str:
    """Return a fact, a new setting or its default, or an old value."""
    if compared in names or compared in FACTS:
        return str(names[compared])
    value = draft.value(compared)
    return draft.text(compared) if value is None else str(value)


def _apply(draft: Draft, row: Row, keys: tuple[str, ...], names: _Names) -> bool:
    """Do what a row says; return True if an unknown word ends the step."""
    if not row.sets:
        if row.converter:
            _report(draft, row, keys, names)
        return False
    old, new = keys[0], names.fill(row.new)
    if row.converter in ("number", "any"):
        is_number = row.converter == "number"
        draft.copy(new, old, rule=row.rule, expected="number" if is_number else "any")
        if row.argument and not draft.old.has(old):
            draft.put(new, row.default, rule=row.rule)
        return False
    value, is_end = _value_of(draft, row, old, names), False
    if row.converter == "words" and (match := _REPORTED.fullmatch(str(value))):
        word = str(names[row.argument]) if row.argument else draft.text(old)
        known = ", ".join(each for each in row.words if each not in ("unset", "else"))
        draft.find(match["message"], old, word=word, names=known)
        is_end = match["mark"] == "!"
        if not match["value"]:
            return is_end
        value = match["value"]
    if value is not None or row.converter not in _MAY_BE_NONE or row.argument:
        is_other = row.factor or row.converter in ("path", "fact")
        is_changed = is_other and value != draft.old.get(old)
        draft.put(
            new,
            row.default if value is None else value,
            rule=row.rule,
            old=keys if old else [],
            verbatim=row.is_verbatim and not is_changed,
            group=row.converter == "group",
        )
    return is_end


def _report(draft: Draft, row: Row, keys: tuple[str, ...], names: _Names) -> None:
    """Report the finding of a row, or explain why its key is dropped."""
    level, template = messages()[row.argument]
    shown: dict[str, object] = {
        "key": keys[0],
        "new": names.fill(row.new),
        "old": _Lookup(draft.text),
        "settings": _Lookup(draft.value),
    }
    # A reason may be about a block, whose value takes long to compose.
    if "{value" in template and "value" not in names:
        shown["value"] = draft.old.get(keys[0])
    text = template.format_map(_Names(draft, {**names, **shown}))
    if level == "dropped":
        draft.explain_drop(keys[0], text)
    else:
        draft.report(level, row.argument.partition(".")[0], text, *filter(None, keys))


def _value_of(draft: Draft, row: Row, old: str, names: _Names) -> Plain:
    """Return the value of a converter for one key; None if the key has none."""
    match row.converter:
        case "value" | "group":
            return row.default
        case "fact":
            return cast("Plain", names[row.argument])
        case "words":
            word = str(names[row.argument]) if row.argument else draft.text(old)
            # An empty text counts as unset: verl took the default for both.
            return row.words.get(word or "unset", row.words["else"])
        case "text":
            return draft.text(old) or None
        case "path":
            return from_home(draft.text(old)) or None
        case "list":
            value = draft.old.get(old)
            return value if isinstance(value, list) else None
        case "switch":
            return draft.switch(old) if draft.old.has(old) else None
        case "count":
            return int(draft.switch(old))
        case "frequency":
            return max(0, draft.frequency(old))
        case "float":
            number = draft.number(old)
            return None if number is None else float(number)
    integer = draft.integer(old)
    match row.converter:
        case "size":
            return integer or cast("int | None", row.default) or 1
        case "natural":
            return max(0, integer or 0)
    return integer * cast("int", names[row.factor]) if integer and row.factor else integer
