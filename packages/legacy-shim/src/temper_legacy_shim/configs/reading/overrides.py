"""Command-line tokens of the old systems, read by Hydra's grammar.

Each sets, adds or deletes a key.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from temper_legacy_shim.configs.reading.config_values import BARE_COMMA, Plain, parse_value

Prefix = Literal["", "+", "++", "~"]

_OVERRIDE = re.compile(r"(\+\+|\+|~)?\s*([A-Za-z_/@$][^\s=]*)\s*(?:=(.*))?\Z", re.DOTALL)
_FLAG = re.compile(
    r"--?(config-name|cn|config-path|cp|config-dir|cd|multirun|m|cfg|job|hydra-help|info|package)(?:=(.*))?\Z",
    re.DOTALL,
)
_TAKES_VALUE = ("config-name", "cn", "config-path", "cp", "config-dir", "cd", "cfg", "package")


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One token."""

    index: int
    """Its place among the tokens."""
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
    """Value after the sign."""
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
