"""The draft of a translation: builders read old keys and put settings and findings."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Literal, cast

from temper_legacy_shim.configs.reading.composition import OldConfig
from temper_legacy_shim.configs.reading.config_values import SHELL_VARIABLE, Plain, parse_value
from temper_legacy_shim.configs.reading.trees import order
from temper_legacy_shim.configs.translation import Cluster, Finding, Setting

_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)\s*,\s*([^{}]*?)\s*\}")
Numerics = Literal["legacy", "temper"]
Level = Literal["person", "hazard", "refused", "note"]
MessageLevel = Level | Literal["dropped"]
"""A message of level dropped is the reason of an old key, not a finding."""
_NO_DEFAULT = object()


def read_table(name: str) -> list[list[str]]:
    """Return the rows of a file in configs/data, without its head."""
    file = resources.files("temper_legacy_shim.configs").joinpath("data", name)
    return [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()[1:]]


@cache
def messages() -> dict[str, tuple[MessageLevel, str]]:
    """Read the level and text of each finding from data/messages.tsv, by name."""
    rows = read_table("messages.tsv")
    return {name: (cast("MessageLevel", level), message) for name, level, message in rows}


@cache
def trainer_defaults(policy_loss: str = "ppo") -> dict[str, Plain]:
    """Return the trainer's default of every key that a translation can set, by dotted key.

    They stand in data/trainer_defaults.tsv, because a translation needs no trainer; a test compares
    them with the trainer's. ``KEY@LOSS`` is a default of one policy loss.
    """
    result: dict[str, Plain] = {}
    for text, value in read_table("trainer_defaults.tsv"):
        key, _, loss = text.partition("@")
        if loss in ("", policy_loss):
            group, _, rest = key.rpartition("}")
            roles = group.removeprefix("{").split(",")
            result |= {f"{role}{rest}": json.loads(value) for role in roles}
    return result


def is_our_default(key: str, value: Plain, *, policy_loss: Plain = "ppo") -> bool:
    """Check if the key can be left out without a change."""
    default = trainer_defaults(str(policy_loss)).get(key, _NO_DEFAULT)
    # True equals 1 in Python, but a switch is no number.
    return default == value and isinstance(value, bool) == isinstance(default, bool)


@dataclass(slots=True, kw_only=True)
class Draft:
    """State shared by the builders of one translation."""

    old: OldConfig
    """The configuration as the old system had it."""
    numerics: Numerics
    """Requested numerics: legacy keeps the old workers."""
    cluster: Cluster | None
    """Cluster for configurations that do not contain one."""
    config_name: str = ""
    """Hydra's config name, possibly a file of the user that was not given."""
    expanded: Mapping[str, str] = field(default_factory=dict)
    """Values the script puts into shell variables, by old key."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """Settings by new key, in order of creation."""
    findings: list[Finding] = field(default_factory=list)
    drop_reasons: dict[str, str] = field(default_factory=dict)
    """Reasons for old keys without a counterpart in this configuration."""

    def since(self, version: str) -> bool:
        """Check if the old release is this one or later."""
        return order(self.old.version) >= order(version)

    def value(self, key: str) -> Plain:
        """Return the value of a new key: its setting, or else the trainer's default."""
        setting = self.settings.get(key)
        return trainer_defaults().get(key) if setting is None else setting.value

    def put(
        self,
        key: str,
        value: Plain,
        *,
        rule: str,
        old: Sequence[str] = (),
        verbatim: bool = False,
        group: bool = False,
        number: bool = False,
    ) -> None:
        """Add a new setting, unless it was not set by the user and equals the trainer's default."""
        sources = self.old.sources(*old)
        is_requested = bool(sources)
        loss = self.settings.get("algorithm.policy_loss.name")
        if (
            not is_requested
            and not group
            and is_our_default(key, value, policy_loss="ppo" if loss is None else loss.value)
        ):
            return
        comment = self._comment(old, is_requested=is_requested, rule=rule)
        self.settings[key] = Setting(
            key=key,
            value=value,
            is_pinned=not is_requested and not group,
            rule=rule,
            old_keys=tuple(old),
            sources=tuple(index for index in sources if index >= 0),
            is_verbatim=verbatim
            and len(sources) == 1
            and all(self.old.is_complete(key) for key in old),
            comment=comment,
            is_group=group,
            is_number=number,
        )

    def _comment(self, old: Sequence[str], *, is_requested: bool, rule: str) -> str:
        keys = [key for key in dict.fromkeys(old) if self.old.is_set(key) or not is_requested]
        shown = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
        what = (
            shown
            if is_requested
            else f"default of {self.old.version}" + (f": {shown}" if shown else "")
        )
        return f"{what} [{rule}]"

    def find(self, name: str, /, *old: str, **values: object) -> None:
        """Add the finding of this name in data/messages.tsv.

        Args:
            name: the rule, and a part after a dot if the rule has several messages.
            old: keys it is about; the first one is the message's {key}.
            values: the message's other placeholders, except {version}, the old release.
        """
        level, template = messages()[name]
        assert level != "dropped"
        key = old[0] if old else ""
        text = template.format_map({"version": self.old.version, "key": key, **values})
        self.report(level, name.partition(".")[0], text, *old)

    def report(self, level: Level, rule: str, message: str, *old: str) -> None:
        """Add a finding; the same one is added once."""
        finding = Finding(level=level, rule=rule, message=message, old_keys=tuple(old))
        if finding not in self.findings:
            self.findings.append(finding)

    def explain_drop(self, key: str, reason: str) -> None:
        """Record why an old key has no counterpart in this configuration."""
        self.drop_reasons[key] = reason

    def copy(
        self,
        new: str,
        old: str,
        *,
        rule: str,
        expected: Literal["number", "text", "switch", "any"] = "any",
    ) -> None:
        """Copy a value; do nothing if the old tree has none."""
        value = self.old.get(old)
        if value is None:
            return
        if expected == "number":
            if isinstance(value, str) and SHELL_VARIABLE.fullmatch(value):
                self.put(new, value, rule=rule, old=[old], verbatim=True, number=True)
                self.find("value-unknown.passed-on", old, value=value)
                return
            result = self.number(old)
            if result is not None or _is_shell(value):
                self.put(
                    new, value if result is None else result, rule=rule, old=[old], verbatim=True
                )
            return
        self.put(new, value, rule=rule, old=[old], verbatim=True)

    def number(self, key: str) -> int | float | None:
        """Return a number of the old configuration; another value is a finding, and None."""
        value = self.old.get(key)
        if isinstance(value, str):
            value = parse_value(self._resolve_environment(key, value))[0]
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            self.find("value-unknown.number", key, value=self.old.get(key))
            return None
        return value

    def _resolve_environment(self, key: str, value: str) -> str:
        """Replace ``${oc.env:NAME,default}``, as ``${NAME:-default}`` is read, by its default."""
        match = _FROM_ENVIRONMENT.fullmatch(value.strip())
        if match is None:
            return value
        self.find("value-unknown.environment", key, value=value, detail=match[2], detail_2=match[1])
        return match[2]

    def integer(self, key: str) -> int | None:
        """Return a whole number of the old configuration, or None; see ``number``."""
        value = self.number(key)
        # Infinity and NaN are no whole numbers.
        return int(value) if value is not None and abs(value) < 1e18 and value == value else None

    def frequency(self, key: str) -> int:
        """Return an interval in steps: 0 if it is unset or unknown, and booleans as in Python."""
        value = self.old.get(key)
        return int(value) if isinstance(value, bool) else self.integer(key) or 0

    def switch(self, key: str) -> bool:
        """Return a boolean of the old configuration; None and absent keys are False."""
        value = self.old.get(key)
        if isinstance(value, str):
            value = parse_value(value)[0]
        if isinstance(value, str):
            if value.lower() in ("none", "off", "no", ""):
                return False
            if _is_shell(value):
                self.find("value-unknown.switch", key, value=value)
                return False
        return bool(value)

    def text(self, key: str) -> str:
        """Return a text of the old configuration; empty if there is none."""
        value = self.old.get(key)
        return "" if value is None else str(value)


def _is_shell(value: Plain) -> bool:
    return isinstance(value, str) and ("$" in value or "`" in value)
