"""Apply overrides to a release's default tree by Hydra's rules."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from temper_legacy_shim.configs.reading.config_values import Override, Plain, flatten, parse_value

_ONE_KEY = re.compile(r"\$\{(?:oc\.select:)?[\w.]+(?:,[^{}]*)?\}")
_MAX_DEPTH = 20
_MAX_LENGTH = 100_000


class Unresolved:
    """Result of an interpolation that leads nowhere."""


UNRESOLVED = Unresolved()


def resolve(value: Plain, key: str, tree: Mapping[str, Plain], depth: int = 0) -> Plain:
    """Return the value a node has.

    Text with an interpolation that leads nowhere (a shell's variable, say) stays as it is.

    Args:
        value: the text in the file.
        key: where it stands; relative interpolations begin there.
        tree: leaves by dotted key.
        depth: interpolations followed so far; a circle of them stops at the limit.
    """
    if isinstance(value, list):
        return [resolve(item, key, tree, depth) for item in value]
    if isinstance(value, dict):
        return {name: resolve(item, f"{key}.{name}", tree, depth) for name, item in value.items()}
    if not isinstance(value, str) or "${" not in value or depth > _MAX_DEPTH:
        return value
    return _text(value, key, tree, depth)


def _text(value: str, key: str, tree: Mapping[str, Plain], depth: int) -> Plain:
    """Return a text with its interpolations, outermost first, and defaults if needed."""
    parts: list[str] = []
    at = 0
    while (begin := value.find("${", at)) >= 0:
        end = _closing(value, begin)
        if end < 0:
            break
        result = _lookup(value[begin + 2 : end], key, tree, depth)
        if begin == 0 and end == len(value) - 1 and not isinstance(result, Unresolved):
            return result
        text = (
            value[begin : end + 1]
            if isinstance(result, Unresolved)
            else "null"
            if result is None
            else str(result)
        )
        parts += [value[at:begin], text]
        at = end + 1
        if sum(map(len, parts)) > _MAX_LENGTH:
            break
    return "".join([*parts, value[at:]])


def _closing(value: str, begin: int) -> int:
    """Return the index of the closing brace; -1 without one."""
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
        result = _node(_name(target, key, tree, depth), key, tree, depth)
        if result is not UNRESOLVED and result is not None:
            return result
        if not comma:
            return None
        return (
            resolve(default.strip(), key, tree, depth + 1)
            if "${" in default
            else parse_value(default.strip())[0]
        )
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
    below = {
        name.removeprefix(f"{target}."): value
        for name, value in tree.items()
        if name.startswith(f"{target}.")
    }
    if not below:
        return UNRESOLVED
    return {
        name: resolve(value, f"{target}.{name}", tree, depth + 1) for name, value in below.items()
    }


@dataclass(slots=True, kw_only=True)
class OldConfig:
    """A configuration as the old system had it before it began to train."""

    version: str
    family: str
    entry: str
    """The Python module that was started, or the type of program."""
    tree: dict[str, Plain]
    """Leaves by dotted key, interpolations unresolved; defaults included."""
    defaults: dict[str, Plain]
    """The same before anybody said anything."""
    origin: dict[str, int]
    """Index of the token that set a leaf, ``FROM_FILE`` for a file; absent for defaults."""
    refused: dict[int, str] = field(default_factory=dict)
    """Reason why the old system would not have started, by token."""
    superseded: dict[int, int] = field(default_factory=dict)
    """Later token that set the same key, by token."""
    blocks: dict[str, int] = field(default_factory=dict)
    """Every block of the tree, with the number of its leaves."""

    def get(self, key: str, default: Plain = None) -> Plain:
        """Return the value that took effect; a block comes as a mapping."""
        if key in self.tree:
            return resolve(self.tree[key], key, self.tree)
        below: Plain = {
            name[len(key) + 1 :]: resolve(self.tree[name], name, self.tree)
            for name in self.below(key)
        }
        return below or self._find_in_block(key, default)

    def _find_in_block(self, key: str, default: Plain) -> Plain:
        """Return a leaf of a block whose value is an interpolation of another block."""
        outer = key
        while "." in outer:
            outer = outer.rpartition(".")[0]
            if isinstance(self.tree.get(outer), str):
                block = resolve(self.tree[outer], outer, self.tree)
                inner = key[len(outer) + 1 :]
                return block.get(inner, default) if isinstance(block, dict) else default
        return default

    def below(self, key: str) -> list[str]:
        return (
            [name for name in self.tree if name.startswith(f"{key}.")] if key in self.blocks else []
        )

    def has(self, key: str) -> bool:
        """Check if the tree contains the key, as a leaf or a block."""
        return key in self.tree or key in self.blocks

    def write(self, key: str, value: Plain, index: int) -> None:
        if key not in self.tree:
            count_leaf(self.blocks, key, 1)
        self.tree[key] = value
        self.origin[key] = index

    def remove(self, key: str) -> None:
        """Take one leaf away."""
        del self.tree[key]
        self.origin.pop(key, None)
        count_leaf(self.blocks, key, -1)

    def is_set(self, *keys: str) -> bool:
        """Check if the user set any of the keys."""
        return any(self.sources(key) for key in keys)

    def is_complete(self, key: str) -> bool:
        """Check that the value stands alone, not in a text such as ``checkpoints/${x}``."""
        value = self.tree.get(key)
        return (
            key in self.origin
            or not isinstance(value, str)
            or "${" not in value
            or _ONE_KEY.fullmatch(value) is not None
        )

    def sources(self, *keys: str) -> tuple[int, ...]:
        """Return the tokens that set these keys, following at most one interpolation."""
        result: list[int] = []
        for key in keys:
            if key in self.blocks:
                result += [
                    index for name, index in self.origin.items() if name.startswith(f"{key}.")
                ]
            elif key in self.origin:
                result.append(self.origin[key])
            else:
                result += self._follow_interpolation(key)
        return tuple(dict.fromkeys(result))

    def _follow_interpolation(self, key: str) -> list[int]:
        value = self.tree.get(key)
        if not isinstance(value, str):
            return []
        targets = re.findall(r"\$\{(?:oc\.select:)?([A-Za-z_.0-9]+)", value)
        parent = key.rpartition(".")[0]
        names = [f"{parent}{target}" if target.startswith(".") else target for target in targets]
        return [self.origin[name] for name in names if name in self.origin]


def compose(old: OldConfig, overrides: Sequence[Override]) -> None:
    """Apply overrides in order, and record those that Hydra would have rejected."""
    last: dict[str, int] = {}
    for override in overrides:
        if override.kind != "set":
            continue
        if override.complaint is not None:
            old.refused[override.index] = override.complaint
        if override.prefix == "~":
            _delete(old, override)
            continue
        key = override.key
        # Hydra applies overrides in order, so the last one wins without a warning.
        if key in last and override.index != last[key]:
            old.superseded[last[key]] = override.index
        last[key] = override.index
        complaint = _complaint(old, override)
        if complaint is not None:
            old.refused.setdefault(override.index, complaint)
        if not (
            key in old.blocks and override.is_no_block
        ):  # a fork's own: the release's keys stay what they are
            assign(old, key, override.value, override.index)


def assign(old: OldConfig, key: str, value: Plain, index: int) -> None:
    """Set a key: a mapping is merged with the existing value, other values replace it."""
    if isinstance(value, dict) and value:
        for name, item in flatten(value).items():
            assign(old, f"{key}.{name}", item, index)
        return
    # A block that is replaced by one value loses its leaves.
    if not isinstance(value, dict):
        for name in old.below(key):
            old.remove(name)
    parts = key.split(".")
    for count in range(1, len(parts)):  # a leaf that becomes a block
        if ".".join(parts[:count]) in old.tree:
            old.remove(".".join(parts[:count]))
    old.write(key, value, index)


def forget_defaults(old: OldConfig) -> None:
    """Drop values of a file that equal the release's defaults: a dump repeats them.

    They stay what they are, so that a value which the dump had resolved does not follow another key
    again; but no one asked for them.
    """
    for key in [key for key, index in old.origin.items() if index < 0]:
        if any(_is_same(old.tree[key], default) for default in _defaults_of(old, key)):
            del old.origin[key]


def _defaults_of(old: OldConfig, key: str) -> Iterator[Plain | Unresolved]:
    """Yield the release's values of a key: as written, resolved, or in a referenced block."""
    if key in old.defaults:
        yield old.defaults[key]
        yield resolve(old.defaults[key], key, old.tree)
    outer = key
    while "." in outer:
        outer = outer.rpartition(".")[0]
        block = resolve(old.defaults[outer], outer, old.tree) if outer in old.defaults else None
        if isinstance(block, dict):
            yield flatten(block).get(key[len(outer) + 1 :], UNRESOLVED)


def _is_same(one: Plain, other: Plain | Unresolved) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def count_leaf(blocks: dict[str, int], key: str, change: int) -> None:
    """Count one leaf more or less in every block around it."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        block = ".".join(parts[:count])
        blocks[block] = blocks.get(block, 0) + change
        if not blocks[block]:
            del blocks[block]


def _delete(old: OldConfig, override: Override) -> None:
    names = [override.key] if override.key in old.tree else old.below(override.key)
    if not names:
        old.refused.setdefault(override.index, f"there is no {override.key} to delete")
    for name in names:
        old.remove(name)


def _complaint(old: OldConfig, override: Override) -> str | None:
    """Return why Hydra's struct mode refuses an override; None if it does not."""
    key = override.key
    # Hydra accepts these in every tree: a forced value, config groups, and its own settings.
    if override.prefix == "++" or "@" in key or "/" in key or key.startswith("hydra."):
        return None
    is_there = old.has(key)
    if override.prefix == "+":
        # Hydra lets + replace a null, and merge a mapping into a block.
        if is_there and old.tree.get(key, "") is not None and not isinstance(override.value, dict):
            return f"{old.version} has {key} already, and + only adds: drop the +"
        return None
    if is_there or isinstance(override.value, dict):
        return None
    return f"{old.version} has no key {key}"


def old_config(
    *, version: str, family: str, entry: str, defaults: Mapping[str, Plain]
) -> OldConfig:
    """Return the release's defaults as a tree to compose overrides on."""
    blocks = dict(_counted(tuple(defaults)))
    return OldConfig(
        version=version,
        family=family,
        entry=entry,
        tree=dict(defaults),
        defaults=dict(defaults),
        origin={},
        blocks=blocks,
    )


@lru_cache(maxsize=64)
def _counted(keys: tuple[str, ...]) -> Mapping[str, int]:
    """Return every block of a tree with the number of its leaves."""
    blocks: dict[str, int] = {}
    for key in keys:
        count_leaf(blocks, key, 1)
    return blocks
