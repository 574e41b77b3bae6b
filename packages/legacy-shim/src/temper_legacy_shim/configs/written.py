"""The new configuration as a YAML file: every value with its origin, the same bytes for the same input."""

from collections.abc import Mapping, Sequence

from temper_legacy_shim.configs.translation import Setting, Translation
from temper_legacy_shim.configs.values import Plain, from_environment, yaml_text


def yaml_of(translation: Translation) -> str:
    """A file for ``temper-train --config-dir DIR --config-name NAME``.

    Groups stand in its defaults list; every value has a comment with the old key it comes from, or the old default that it pins, and the
    rule in brackets. What a person has to decide stands at the top.
    """
    lines = [*_header(translation), "defaults:", "  - temper"]
    lines += [
        f"  - override /{item.key}: {yaml_text(item.value)}  # {printable(item.comment)}" for item in translation.settings if item.is_group
    ]
    lines += ["  - _self_", ""]
    lines += _block({item.key: item for item in translation.settings if not item.is_group})
    return "\n".join(lines) + "\n"


def _header(translation: Translation) -> list[str]:
    source = translation.source
    lines = [
        f"# Written by temper-migrate config from {source.entry or source.program} of {source.release}.",
        "# A comment names the old key, or the old default that is pinned, and the rule: temper-migrate explain KEY says more.",
    ]
    for finding in translation.findings:
        if finding.level in ("person", "hazard"):
            word = "DECIDE" if finding.level == "person" else "differs"
            lines.append(f"# {word}: {finding.message}")
    return [printable(line) for line in lines]


def printable(text: str) -> str:
    """On one line of a YAML file, in which control characters may not stand."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _in_file(setting: Setting) -> Plain:
    return from_environment(setting.value, is_number=setting.is_number)


def _block(settings: Mapping[str, Setting]) -> list[str]:
    """Nested blocks in the order in which their first value was put."""
    return _lines(sorted(settings.items(), key=lambda item: _place(item[0], settings)))


def _place(key: str, settings: Mapping[str, Setting]) -> tuple[int, ...]:
    """Position of each of the key's blocks among its siblings, so that a block stands together."""
    names = list(settings)
    parts = key.split(".")
    found = []
    for count in range(1, len(parts) + 1):
        prefix = ".".join(parts[:count])
        found.append(next(number for number, name in enumerate(names) if name == prefix or name.startswith(f"{prefix}.")))
    return tuple(found)


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
        lines.append(f"{'  ' * (len(parts) - 1)}{yaml_text(parts[-1])}: {yaml_text(_in_file(setting))}  # {printable(setting.comment)}")
    return lines
