"""Plain values of old configurations, and the tokens that set them in Hydra's grammar."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Plain = str | int | float | bool | None | list["Plain"] | dict[str, "Plain"]

_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)\Z")
_FLOAT = re.compile(
    r"[+-]?(([0-9]+(_[0-9]+)*\.[0-9_]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+|inf|nan)\Z",
    re.IGNORECASE,
)
_BARE = re.compile(r"[A-Za-z_./~][A-Za-z0-9_./~@%+-]*\Z")


BARE_COMMA = "a bare comma gives several values (a sweep): write [a,b], or quote the text"


def parse_value(text: str) -> tuple[Plain, str | None]:
    """Parse the value of an override, and return Hydra's complaint if it has one.

    Text that is no value of Hydra's grammar (an open quote, ``<placeholder>``) is taken as a
    string, because the meaning is clear.
    """
    reader = _Reader(text)
    try:
        value = reader.full()
    except _NotHydraError as error:
        return _unquoted(text.strip()), str(error)
    return value, None


class _NotHydraError(ValueError):
    """Text outside the grammar; the message says where."""


class _Reader:
    """Parse one value by recursive descent, to a depth that hostile text cannot exceed."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def full(self) -> Plain:
        self._space()
        if self.at == len(self.text):
            return ""
        value = self._value(closers="")
        self._space()
        if self.at < len(self.text):
            raise _NotHydraError(
                f"Hydra cannot read {self.text[self.at :]!r} at the end of the value"
            )
        return value

    def _space(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1

    def _value(self, *, closers: str) -> Plain:
        self._space()
        first = self.text[self.at : self.at + 1]
        if first == "[":
            return self._list()
        if first == "{":
            return self._mapping()
        if first in ("'", '"') and first:
            quoted = self._quoted(first)
            self._space()
            if self.at == len(self.text) or self.text[self.at] in closers:
                return quoted
            raise _NotHydraError(f"Hydra expects the value to end after the quoted text {quoted!r}")
        return self._primitive(closers)

    def _enter(self) -> None:
        self.at += 1
        self.depth += 1
        if self.depth > 50:
            raise _NotHydraError("the value is nested more than 50 deep")

    def _list(self) -> Plain:
        self._enter()
        items: list[Plain] = []
        self._space()
        while self.text[self.at : self.at + 1] != "]":
            items.append(self._value(closers=",]"))
            if not self._separator("]"):
                break
        self._close("]")
        return items

    def _mapping(self) -> Plain:
        self._enter()
        items: dict[str, Plain] = {}
        self._space()
        while self.text[self.at : self.at + 1] != "}":
            key = self._key()
            items[key] = self._value(closers=",}")
            if not self._separator("}"):
                break
        self._close("}")
        return items

    def _key(self) -> str:
        self._space()
        first = self.text[self.at : self.at + 1]
        if first in ("'", '"') and first:
            key = self._quoted(first)
        else:
            end = self.text.find(":", self.at)
            if end < 0:
                raise _NotHydraError("a mapping needs KEY:VALUE")
            key, self.at = self.text[self.at : end].strip(), end
        self._space()
        if self.text[self.at : self.at + 1] != ":":
            raise _NotHydraError("a mapping needs KEY:VALUE")
        self.at += 1
        return key

    def _separator(self, closer: str) -> bool:
        self._space()
        if self.text[self.at : self.at + 1] == ",":
            self.at += 1
            self._space()
            if self.text[self.at : self.at + 1] == closer:
                raise _NotHydraError(f"Hydra takes no comma before {closer}")
            return True
        return False

    def _close(self, closer: str) -> None:
        self._space()
        if self.text[self.at : self.at + 1] != closer:
            raise _NotHydraError(f"a {closer} is missing")
        self.at += 1
        self.depth -= 1

    def _quoted(self, quote: str) -> str:
        parts, at = [], self.at + 1
        while at < len(self.text):
            # Hydra takes a backslash away before a quote or a backslash alone.
            if self.text[at] == "\\" and self.text[at + 1 : at + 2] in (quote, "\\"):
                parts.append(self.text[at + 1])
                at += 2
            elif self.text[at] == quote:
                self.at = at + 1
                return "".join(parts)
            else:
                parts.append(self.text[at])
                at += 1
        raise _NotHydraError(f"the quote {quote} is never closed")

    def _primitive(self, closers: str) -> Plain:
        start = self.at
        while self.at < len(self.text):
            character = self.text[self.at]
            if self.text.startswith("${", self.at):
                self._interpolation()
                continue
            if character in closers:
                break
            if character in "[]{}<>'\"=" and not closers:
                raise _NotHydraError(f"Hydra takes no bare {character} in a value: quote it")
            if character in "[]{}'\"" and closers:
                raise _NotHydraError(f"Hydra takes no bare {character} in a value: quote it")
            if character == "," and not closers:
                raise _NotHydraError(BARE_COMMA)
            self.at += 2 if character == "\\" and self.at + 1 < len(self.text) else 1
        text = self.text[start : self.at].strip()
        if not text:
            raise _NotHydraError("a value is missing")
        return scalar(text)

    def _interpolation(self) -> None:
        depth = 0
        while self.at < len(self.text):
            if self.text.startswith("${", self.at):
                depth += 1
                self.at += 2
                continue
            if self.text[self.at] == "}":
                depth -= 1
            self.at += 1
            if depth == 0:
                return
        raise _NotHydraError("a ${ is never closed")


def scalar(text: str) -> Plain:
    """Return a bare word as Hydra reads it: null, boolean, whole number, number, else text."""
    lowered = text.lower()
    if lowered == "null":
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    # int() refuses more than 4,300 digits.
    if _INTEGER.match(text) and len(text) < 4000:
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    return re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", text)


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def flatten(tree: Mapping[str, Plain], prefix: str = "") -> dict[str, Plain]:
    """Return the leaves by dotted key; an empty mapping is a leaf."""
    leaves: dict[str, Plain] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            leaves.update(flatten(value, f"{key}."))
        else:
            leaves[key] = value
    return leaves


def hydra_text(value: Plain) -> str:
    """Write a value as an override of Hydra, before the shell's quoting."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, list):
        return "[" + ",".join(hydra_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{hydra_text(item)}" for name, item in value.items()) + "}"
    is_plain = _BARE.match(value) and isinstance(scalar(value), str)
    return value if is_plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def yaml_text(value: Plain) -> str:
    """Return a value on one line of YAML, which reads back as the same value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_text(value)
    if isinstance(value, list):
        return "[" + ", ".join(yaml_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{yaml_text(name)}: {yaml_text(item)}" for name, item in value.items())
            + "}"
        )
    if isinstance(value, str):
        is_plain = (
            _BARE.match(value)
            and isinstance(scalar(value), str)
            and value.lower() not in _YAML_WORDS
            and value != "~"
        )
        return value if is_plain else json.dumps(value, ensure_ascii=True)
    return "null" if value is None else "true" if value else "false"


SHELL_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)\}|(?P<bare>[A-Za-z_]\w*))")
"""A variable that only the shell knows, with or without braces."""


def from_environment(value: Plain, *, is_number: bool) -> Plain:
    """Return a value for a file, whose variables OmegaConf reads from the environment."""
    if isinstance(value, list):
        return [from_environment(item, is_number=is_number) for item in value]
    if not isinstance(value, str):
        return value
    read = SHELL_VARIABLE.sub(
        lambda result: f"${{oc.env:{result['braced'] or result['bare']}}}", value
    )
    return f"${{oc.decode:{read}}}" if is_number and read != value else read


def from_home(path: str) -> str:
    """Return a path for Hydra's grammar, which has no ~ at the beginning of a value."""
    return "${oc.env:HOME}" + path[1:] if path.startswith("~/") else path


_YAML_WORDS = frozenset({"yes", "no", "on", "off", "y", "n", ".inf", "-.inf", ".nan"})


def number_text(value: float) -> str:
    """Return a number that YAML 1.1 and Hydra read alike: 1.0e-06, since 1e-06 is text."""
    if isinstance(value, int):
        return str(value)
    if math.isnan(value) or math.isinf(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}{exponent}{power}" if exponent else text


Prefix = Literal["", "+", "++", "~"]

_OVERRIDE = re.compile(r"(\+\+|\+|~)?\s*([A-Za-z_/@$][^\s=]*)\s*(?:=(.*))?\Z", re.DOTALL)
_FLAG = re.compile(
    r"--?(config-name|cn|config-path|cp|config-dir|cd|multirun|m|cfg|job|hydra-help|info|package)(?:=(.*))?\Z",
    re.DOTALL,
)
_TAKES_VALUE = ("config-name", "cn", "config-path", "cp", "config-dir", "cd", "cfg", "package")


FROM_FILE = -1
"""Index of values that are in the user's own file and not among the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    index: int
    """Its place among the tokens; ``FROM_FILE`` for a value of the user's own file."""
    text: str
    kind: Literal["set", "flag", "rest", "unreadable"]
    """set: an override of Hydra; flag: an option of Hydra's own; rest: the shell's remaining
    arguments; unreadable: none of these.
    """
    prefix: Prefix = ""
    """+ adds a key, ++ adds or sets, ~ deletes."""
    key: str = ""
    """Dotted key or config group; for a flag, its name."""
    value: Plain = None
    complaint: str | None = None
    """Reason why Hydra would have rejected it."""

    @property
    def is_no_block(self) -> bool:
        """True if it sets one value, which cannot stand for a block of keys."""
        refers = isinstance(self.value, str) and "${" in self.value
        return (
            self.kind == "set"
            and self.prefix != "~"
            and self.value is not None
            and not isinstance(self.value, dict)
            and not refers
        )

    @property
    def is_sweep_switch(self) -> bool:
        """True if it makes Hydra start a run for each combination of values."""
        if self.kind == "flag":
            return self.key in ("multirun", "m")
        return self.key == "hydra.mode" and str(self.value).upper() == "MULTIRUN"

    @property
    def is_sweep(self) -> bool:
        """True if a sweep takes several values from it: a bare comma, choice or range."""
        value = self.text.partition("=")[2].strip()
        is_function = re.match(r"(choice|range|glob)\(", value) is not None
        return self.kind == "set" and (is_function or self.complaint == BARE_COMMA)

    @property
    def has_value(self) -> bool:
        """True if there is a sign; ``~key`` has none."""
        return "=" in self.text


def read_overrides(tokens: Sequence[str]) -> list[Override]:
    """Return every token, in order; none is lost, whatever stands in it."""
    result: list[Override] = []
    flag: str | None = None
    for index, token in enumerate(tokens):
        if flag is not None:
            result.append(
                Override(index=index, text=token, kind="flag", key=flag, value=token.strip("'\""))
            )
            flag = None
            continue
        override = _read(index, token)
        result.append(override)
        if override.kind == "flag" and override.key in _TAKES_VALUE and not override.has_value:
            flag = override.key
    return result


def _read(index: int, token: str) -> Override:
    """Read one token: an override, an option of Hydra's own, or the shell's remaining arguments."""
    text = token.strip()
    if text.strip("'\"") in ("$@", "${@}", "$*", "${*}", "${@:1}", "${@:2}", "${@:3}"):
        return Override(index=index, text=token, kind="rest")
    flag = _FLAG.match(text)
    if flag is not None:
        value = None if flag[2] is None else flag[2].strip("'\"")
        return Override(index=index, text=token, kind="flag", key=flag[1], value=value)
    match = _OVERRIDE.match(text)
    if match is None or (match[3] is None and match[1] != "~"):
        return Override(
            index=index,
            text=token,
            kind="unreadable",
            complaint="this is no override: KEY=VALUE is expected",
        )
    prefix: Prefix = match[1] or ""  # type: ignore[assignment]
    value, complaint = (None, None) if match[3] is None else parse_value(match[3])
    return Override(
        index=index,
        text=token,
        kind="set",
        prefix=prefix,
        key=match[2],
        value=value,
        complaint=complaint,
    )
