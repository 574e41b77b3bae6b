"""OmegaConf's interpolations over a flat tree: ``${a.b}``, ``${.sibling}``, ``${oc.select:a.b,default}``, ``${oc.env:NAME,default}``."""

from collections.abc import Mapping

from temper_legacy_shim.configs.values import Plain, parse_value

_MAX_DEPTH = 20
_MAX_LENGTH = 100_000


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
    """A text with its interpolations, outermost first: a default is looked at only where it is needed."""
    parts: list[str] = []
    at = 0
    while (begin := value.find("${", at)) >= 0:
        end = _closing(value, begin)
        if end < 0:
            break
        found = _lookup(value[begin + 2 : end], key, tree, depth)
        if begin == 0 and end == len(value) - 1 and not isinstance(found, Unresolved):
            return found
        text = value[begin : end + 1] if isinstance(found, Unresolved) else "null" if found is None else str(found)
        parts += [value[at:begin], text]
        at = end + 1
        if sum(map(len, parts)) > _MAX_LENGTH:
            break
    return "".join([*parts, value[at:]])


def _closing(value: str, begin: int) -> int:
    """Where the brace closes that opens at begin; -1 where none does."""
    depth = 0
    for at in range(begin, len(value)):
        depth += (value[at] == "{") - (value[at] == "}")
        if depth == 0 and value[at] == "}":
            return at
    return -1


def _lookup(inner: str, key: str, tree: Mapping[str, Plain], depth: int) -> "Plain | Unresolved":
    name, colon, rest = inner.partition(":")
    if not colon:
        return _node(_name(inner, key, tree, depth), key, tree, depth)
    target, comma, default = rest.partition(",")
    if name.strip() == "oc.select":
        found = _node(_name(target, key, tree, depth), key, tree, depth)
        if found is not UNRESOLVED and found is not None:
            return found
        if not comma:
            return None
        return resolve(default.strip(), key, tree, depth + 1) if "${" in default else parse_value(default.strip())[0]
    return UNRESOLVED


def _name(text: str, key: str, tree: Mapping[str, Plain], depth: int) -> str:
    return str(resolve(text.strip(), key, tree, depth + 1))


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
