"""OmegaConf's interpolations over a flat tree: ``${a.b}``, ``${.sibling}``, ``${oc.select:a.b,default}``, ``${oc.env:NAME,default}``."""

import re
from collections.abc import Mapping

from temper_legacy_shim.configs.values import Plain, parse_value

_MAX_DEPTH = 20
_INNERMOST = re.compile(r"\$\{((?:[^${}]|\{\})*)\}")


class Unresolved:
    """What an interpolation that leads nowhere becomes."""


UNRESOLVED = Unresolved()


def resolve(value: Plain, key: str, tree: Mapping[str, Plain], depth: int = 0) -> Plain:
    """The value that a node has; text with an interpolation that leads nowhere (a shell's variable, say) stays as it is.

    Args:
        value: as it was written.
        key: where it stands; relative interpolations begin there.
        tree: leaves by dotted key.
        depth: of the chain so far; a circle ends where it reaches the limit.
    """
    if isinstance(value, list):
        return [resolve(item, key, tree, depth) for item in value]
    if isinstance(value, dict):
        return {name: resolve(item, f"{key}.{name}", tree, depth) for name, item in value.items()}
    if not isinstance(value, str) or "${" not in value or depth > _MAX_DEPTH:
        return value
    return _text(value, key, tree, depth)


def _text(value: str, key: str, tree: Mapping[str, Plain], depth: int) -> Plain:
    match = _INNERMOST.search(value)
    while match is not None:
        found = _lookup(match[1], key, tree, depth)
        if found is UNRESOLVED:
            match = _INNERMOST.search(value, match.end())
            continue
        if match.span() == (0, len(value)):
            assert not isinstance(found, Unresolved)
            return found
        value = value[: match.start()] + str(found) + value[match.end() :]
        if len(value) > 100_000:
            return value
        match = _INNERMOST.search(value)
    return value


def _lookup(inner: str, key: str, tree: Mapping[str, Plain], depth: int) -> "Plain | Unresolved":
    name, colon, rest = inner.partition(":")
    if not colon:
        return _node(inner.strip(), key, tree, depth)
    target, comma, default = rest.partition(",")
    if name.strip() == "oc.select":
        found = _node(target.strip(), key, tree, depth)
        if found is UNRESOLVED or found is None:
            return parse_value(default.strip())[0] if comma else None
        return found
    return UNRESOLVED


def _node(target: str, key: str, tree: Mapping[str, Plain], depth: int) -> "Plain | Unresolved":
    if target.startswith("."):
        dots = len(target) - len(target.lstrip("."))
        parent = key.split(".")[: len(key.split(".")) - dots]
        target = ".".join([*parent, target.lstrip(".")])
    if target in tree:
        return resolve(tree[target], target, tree, depth + 1)
    below = {name.removeprefix(f"{target}."): value for name, value in tree.items() if name.startswith(f"{target}.")}
    if not below:
        return UNRESOLVED
    return {name: resolve(value, f"{target}.{name}", tree, depth + 1) for name, value in below.items()}
