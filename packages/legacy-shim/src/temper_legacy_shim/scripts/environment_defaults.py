"""Variables of the environment, and arguments, that a script has defaults for, where the new script holds fixed what followed them.

The old script is read again with another value; what then launches otherwise, and stands in the new command as a plain number or word,
is named. Nothing is executed.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from temper_legacy_shim.errors import ScriptError
from temper_legacy_shim.scripts.launch_translation import Options, TranslatedLaunch, translate_launch
from temper_legacy_shim.scripts.launches import Launch, find_launches
from temper_legacy_shim.scripts.script_reading import ScriptReading, reread

_OPPOSITE = {"true": "False", "false": "True"}
_OTHER = "37"
"""A value that no default is: a number, since sizes are computed from numbers, and a name as good as any other."""
_MOST_VALUES = 4
_ARGUMENT = re.compile(r"\$\{([1-9])(?::?[-=])")


def kept_fixed(
    reading: ScriptReading, launches: Sequence[TranslatedLaunch], settings: dict[str, str], *, options: Options, folder: Path | None
) -> list[str]:
    """Return one sentence for each variable with a default that a written value was computed from, or that switches nothing on.

    Args:
        reading: of the old script.
        launches: its launches with their translations.
        settings: variables that the user said; they are what they are.
        options: of the translation.
        folder: of the script.
    """
    names = {name for name, is_bare in reading.free.items() if not is_bare} | set(_ARGUMENT.findall(reading.text))
    out = []
    for name in sorted(names - settings.keys()):
        keys: dict[str, None] = {}
        missing: dict[str, str] = {}
        for value in _values(reading.text, name):
            for launch, each in zip(_launched(reading, {**settings, name: value}), launches, strict=False):
                keys.update(dict.fromkeys(_fixed(launch, each, value)))
                if _has_dropped_switch(launch, each):
                    result = translate_launch(launch, options, folder=folder).translation.settings
                    written = {setting.key for setting in each.translation.settings}
                    missing |= {setting.key: value for setting in result if setting.key not in written | missing.keys() | keys.keys()}
        if missing and not keys:
            shown, value = ", ".join(list(missing)[:6]) + (", ..." if len(missing) > 6 else ""), next(iter(missing.values()))
            out.append(
                f"{name} switches nothing on by its default, so the new command does not have it: {name}={value} would set {shown}; "
                f"translate again with --set {name}=VALUE to use it."
            )
        if keys:
            what = f"argument {name}" if name.isdigit() else name
            shown = ", ".join(list(keys)[:6]) + (", ..." if len(keys) > 6 else "")
            out.append(
                f"{what} has a default in the script, from which {shown} came: with another value they would stay as they are written; "
                f"translate again with --set {name}=VALUE."
            )
    return out


def _values(text: str, name: str) -> list[str]:
    """Return another value, and those that the script compares the variable with."""
    default = re.search(rf"\$\{{{name}:?[-=]([^}}]*)\}}", text)
    other = _OPPOSITE.get(default[1].strip("\"'").lower(), _OTHER) if default else _OTHER
    spelled = rf"\$\{{?{name}\b[^}}\s]*\}}?"
    result = re.findall(rf"{spelled}\"?\s*(?:==?|!=|-eq|-ne|-gt|-ge|-lt|-le)\s*[\"']?([\w.-]+)", text)
    for body in re.findall(rf"\bcase\s+\"?{spelled}\"?\s+in\b(.*?)\besac\b", text, re.DOTALL):
        result += re.findall(r"^\s*\(?[\"']?([\w.-]+)[^)\n]*\)", body, re.MULTILINE)
    return [other, *dict.fromkeys(result)][: 1 + _MOST_VALUES]


def _launched(reading: ScriptReading, settings: dict[str, str]) -> list[Launch]:
    try:
        return find_launches(reread(reading.text, reading, settings))
    except ScriptError:
        return []


def _has_dropped_switch(launch: Launch, each: TranslatedLaunch) -> bool:
    """Return whether a launch with another value of a variable differs in a setting that has no successor with the default."""
    before = {override.key: override.text.shown() for override in each.launch.overrides if override.key}
    after = {override.key: override.text.shown() for override in launch.overrides if override.key}
    changed = [key for key, shown in after.items() if before.get(key, shown) != shown]
    return any(not any(key in setting.old_keys for setting in each.translation.settings) for key in changed)


def _fixed(launch: Launch, each: TranslatedLaunch, value: str) -> Iterator[str]:
    """Yield the new keys that a launch with another value of the variable would have otherwise, and that are written as they are."""
    before = {override.key: override.text.shown() for override in each.launch.overrides if override.key}
    after = {override.key: override.text.shown() for override in launch.overrides if override.key and override.text.shown() != value}
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    numbers = {number for number, override in enumerate(each.launch.overrides) if override.key in changed}
    for argument, setting in zip(each.arguments, each.translation.settings, strict=True):
        follows = any(piece.source is not None for piece in argument.text.pieces)
        is_of_a_path = argument.key.endswith(".kind") and argument.key.startswith("data.")  # the loader would say so
        if not follows and not is_of_a_path and numbers & set(setting.sources):
            yield argument.key
    yield from sorted(
        key for key in after.keys() - before.keys() if not any(key in setting.old_keys for setting in each.translation.settings)
    )
