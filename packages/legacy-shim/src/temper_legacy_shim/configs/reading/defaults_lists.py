"""Hydra's defaults list of a user's own file.

Which files it builds on, in which order, and below which block each of them lands.

A file comes in; one tree of values comes out, with the old package's own file that lies below them
all. What the list names and no folder
holds is said: nothing is left out silently.
"""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from temper_legacy_shim.configs.reading.config_values import Plain
from temper_legacy_shim.errors import DamagedFileError

_HEADER = re.compile(r"\A(?:\s*#\s*@(?!package).*\n)*\s*#\s*@package\s+(\S+)")
_NAME = re.compile(r"\$\{(\w+)\}")
_ENGINE_GROUPS = ("model_engine", "engine", "optim")
_OLD_GROUPS = frozenset(
    (
        *(
            *_ENGINE_GROUPS,
            "actor",
            "algorithm",
            "critic",
            "data",
            "distillation",
            "model",
            "npu_profile",
            "profiler",
            "ref",
        ),
        *("reward", "reward_manager", "reward_model", "rollout", "trainer"),
    )
)
"""Groups of the old package, which the default trees of the releases contain."""
_MAX_LEVELS_UP = 6


@dataclass(slots=True, kw_only=True)
class Composed:
    values: dict[str, Plain] = field(default_factory=dict)
    base: str = ""
    """Name of the old package's file at the bottom, as far as one is named."""
    groups: dict[str, str] = field(default_factory=dict)
    parts: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Entries that could not be followed, a sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    folder: str
    """The group it lies in; empty for the top."""
    package: str
    """The block that its values land in; empty for the top."""
    seen: tuple[Path, ...]
    """Files that led here."""


def compose_file(
    path: Path, *, load: Callable[[Path], dict[str, Plain]], bases: Mapping[str, str]
) -> Composed:
    """Compose a file by its defaults list as Hydra does.

    Args:
        path: the file.
        load: reads one mapping from a YAML file.
        bases: files of the old package.

    Raises:
        DamagedFileError: a file builds on itself, or can't be read.
    """
    return _Composer(path, load, bases).composed()


class _Composer:
    """Compose one file; its steps share the search folders, the chosen groups and the result."""

    def __init__(
        self, path: Path, load: Callable[[Path], dict[str, Plain]], bases: Mapping[str, str]
    ) -> None:
        self._path, self._load, self._bases = path, load, bases
        self._out = Composed()
        self._roots: list[Path] = [path.parent]
        self._overridden: dict[str, str] = {}

    def composed(self) -> Composed:
        tree = self._load(self._path)
        self._roots += _search_folders(tree, self._path)
        for entry in _entries(tree):
            if entry.is_override:
                self._overridden[entry.group.lstrip("/")] = entry.choice
        self._lay(self._path, tree, _Position(folder="", package="", seen=(self._path.resolve(),)))
        return self._out

    def _lay(self, path: Path, tree: dict[str, Plain], position: _Position) -> None:
        """Merge a file and the files in the defaults list into the tree."""
        entries = _entries(tree)
        own = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
        is_laid = False
        for entry in entries:
            if entry.is_self:
                self._out.values = merged(self._out.values, _nested(position.package, own))
                is_laid = True
            elif entry.is_override:
                self._note_group(entry, entry.choice, position)
            else:
                self._follow(path, entry, position, above_own=is_laid and bool(own))
        if not is_laid:
            self._out.values = merged(self._out.values, _nested(position.package, own))

    def _follow(self, path: Path, entry: "_Entry", position: _Position, *, above_own: bool) -> None:
        """Load one entry: a neighboring file, one of a search folder, or verl's own."""
        choice = (
            self._overridden.get(entry.group.lstrip("/"), entry.choice)
            if entry.group
            else entry.choice
        )
        choice = _NAME.sub(lambda match: self._out.groups.get(match[1], match[0]), choice)
        self._note_group(entry, choice, position)
        name = f"{entry.group}/{choice}" if entry.group else choice
        location = posixpath.normpath(
            name.lstrip("/") if name.startswith("/") else posixpath.join(position.folder, name)
        )
        last = location.rpartition("/")[2]
        result = next(
            (file for root in self._roots if (file := root / f"{location}.yaml").is_file()), None
        )
        is_base = not entry.group and last in self._bases
        if is_base and self._out.base == "":
            self._out.base = last
        if result is None or (is_base and result.parent != self._path.parent):
            self._not_there(path, entry, name, choice, is_base=is_base, above_own=above_own)
            return
        if result.resolve() in position.seen:
            raise DamagedFileError(
                f"{result} builds on itself through its defaults list: take one of the entries out."
            )
        self._out.parts.append(result)
        inner = self._load(result)
        package = _package(entry, header=_header(result), position=position)
        self._lay(
            result,
            inner,
            _Position(
                folder=posixpath.dirname(location),
                package=package,
                seen=(*position.seen, result.resolve()),
            ),
        )

    def _note_group(self, entry: "_Entry", choice: str, position: _Position) -> None:
        """Record the engine: groups choose it at the top level, not below another block."""
        name = entry.group.lstrip("/")
        if (
            name in _ENGINE_GROUPS
            and not position.folder
            and entry.package in (None, "_global_", name)
        ):
            self._out.groups[name] = choice

    def _not_there(
        self, path: Path, entry: "_Entry", name: str, choice: str, *, is_base: bool, above_own: bool
    ) -> None:
        """Record a missing file; files of the old package are in the default trees."""
        if is_base:
            if above_own:
                self._out.missing.append(
                    f"the defaults list of {path.name} has {name} after _self_, so that its "
                    "defaults won over the values of the file: "
                    "put _self_ last if the values were meant, or take out those that had no effect"
                )
        elif posixpath.normpath(entry.group.lstrip("/")).rpartition("/")[2] in _OLD_GROUPS:
            if choice.startswith("megatron"):
                self._out.groups.setdefault("model_engine", "megatron")
        elif not entry.is_optional:
            self._out.missing.append(
                f"the defaults list of {path.name} names {name}, which is neither next to it nor "
                "in a folder of its hydra.searchpath "
                "that was found: its values are missing; put the file there, and translate again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    group: str
    """Empty for a plain file."""
    choice: str
    package: str | None
    is_override: bool = False
    is_optional: bool = False

    @property
    def is_self(self) -> bool:
        return not self.group and self.choice == "_self_"


def _entries(tree: Mapping[str, Plain]) -> list[_Entry]:
    items = tree.get("defaults")
    return [entry for item in items for entry in _read(item)] if isinstance(items, list) else []


def _read(item: Plain) -> Iterator[_Entry]:
    """Yield the entries of a defaults list.

    An entry is ``name``, ``name@package``, or a mapping ``[override] [optional] group[@package]:
    choices``. The choice null chooses nothing.
    """
    if isinstance(item, Mapping) and len(item) == 1:
        ((given, chosen),) = item.items()
    else:
        given, chosen = "", item
    words = given.split()
    choices = chosen if isinstance(chosen, list) else [chosen]
    for choice in choices:
        if choice is None:
            continue
        text = str(choice)
        if words and words[-1] not in ("override", "optional"):
            group, _, package = words[-1].partition("@")
        else:
            group = ""
            text, _, package = text.partition("@")
        yield _Entry(
            group=group,
            choice=text.removesuffix(".yaml"),
            package=package or None,
            is_override="override" in words[:-1],
            is_optional="optional" in words,
        )


def _package(entry: _Entry, *, header: str | None, position: _Position) -> str:
    """Return the block of a file's values: the entry's, the header's, or the group."""
    group = (entry.group or posixpath.dirname(entry.choice)).lstrip("/").replace("/", ".")
    given = entry.package
    if given == "_here_":
        given = ""
    if given is None and header is not None:
        given = (
            f"_global_.{header.removeprefix('_global_').lstrip('.')}".rstrip(".")
            if header != "_group_"
            else group
        )
    package = group if given is None else given.replace("_group_", group)
    full = ".".join(part for part in (position.package, package) if part)
    return full.rpartition("_global_")[2].lstrip(".") if "_global_" in full else full


def _header(path: Path) -> str | None:
    match = _HEADER.match(path.read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else None


def _nested(package: str, values: dict[str, Plain]) -> dict[str, Plain]:
    for part in reversed(package.split(".") if package else []):
        values = {part: values}
    return values


def _search_folders(tree: Mapping[str, Plain], path: Path) -> list[Path]:
    """Return the folders of ``hydra.searchpath``, relative ones around the file."""
    hydra = tree.get("hydra")
    listed = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
    out: list[Path] = []
    for item in listed if isinstance(listed, list) else []:
        text = str(item).removeprefix("file:")
        if "://" in text:  # pkg://: inside an installed package
            continue
        text = text.removeprefix("//")
        bases = (
            [Path("/")]
            if text.startswith("/")
            else [path.parent, *path.resolve().parent.parents[:_MAX_LEVELS_UP]]
        )
        folder = next(
            (base / text for base in bases if "$" not in text and (base / text).is_dir()), None
        )
        out += [folder] if folder is not None else []
    return out


def merged(below: dict[str, Plain], above: dict[str, Plain]) -> dict[str, Plain]:
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return out
