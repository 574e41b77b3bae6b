"""Check that public names stay as the last release promised them.

`packages/PACKAGE/api.txt` has one line for each public name, parameter and default. Editing it
takes no promise back, because the lines of the last release are read from that release's git tree.

A line that is missing or differs breaks users, and so does a new parameter, field or abstract
method without a default. Such a change needs a fragment of kind `changed` or `removed` in
packages/PACKAGE/changes that names it in backticks. A removed name needs `removed`, and must have
been deprecated in the last release. Additions need nothing: `tools/release.py` writes the file, and
`python tools/api.py --update PACKAGE` updates it between releases.

griffe reads the sources; no module is imported.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.deprecations import Promise, find_deprecations
from tools.releases import git, has_object, published

ROOT = Path(__file__).resolve().parent.parent

LOCK = "api.txt"

PUBLIC = {
    "engine-fsdp": ("config", "engine", "layouts"),
    "engine-megatron": ("config", "engine", "layouts"),
    "legacy-shim": ("errors", "old_paths", "workers"),
    "trainer": ("algorithms", "config", "config_loading", "loops", "reward", "types"),
}
"""Public modules by package; for other packages, modules without underscore except PRIVATE."""

PRIVATE = ("conformance", "__main__", "cli", "conf")
"""Modules that are used through a command, such as the conformance kit through pytest."""

OVERRIDABLE_CLASSES = ("temper_engine_api.backend.EngineBackend",)
"""Classes whose underscored methods engine authors override, so that these are public too."""

REQUIRED = "required"
_GONE = " is gone"

DEPRECATED = re.compile(
    r"deprecated (?P<what>.+): since (?P<since>\S+), removed in (?P<removed_in>\S+)"
)
"""Line of api.txt that records a deprecation."""


def api(package: Path) -> list[str]:
    """Return one line for each public name of a package, with its signature, sorted."""
    name = "temper_" + package.name.replace("-", "_")
    top = griffe.load(name, search_paths=[package / "src"], allow_inspection=False)
    assert isinstance(top, griffe.Module)
    return sorted(
        {line for module in public_modules(top, package.name) for line in _members(module)}
    )


def breaks(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """Return what breaks code that uses the old names: one sentence by qualified name."""
    before, after = _by_name(old), _by_name(new)
    found = {}
    for name, line in before.items():
        if name not in after:
            found[name] = f"{name}{_GONE}"
        elif after[name] != line:
            found[name] = f"{name} was {_signature(line)!r} and is {_signature(after[name])!r}"
    for name, line in after.items():
        if (
            name not in before
            and _owner(name) in before
            and _signature(line).split(", ")[-1] == REQUIRED
        ):
            found[name] = f"{name} is new and must be given"
    return {
        name: sentence
        for name, sentence in found.items()
        if _owner(name) not in found or _owner(name) in after
    }


def promised_lines(package: Path) -> list[str]:
    """Return the lines of api.txt; for names of the last release, the lines of that release."""
    lines = (package / LOCK).read_text().splitlines() if (package / LOCK).exists() else []
    released = _released_lock(package)
    deprecations = {line for line in [*lines, *released] if DEPRECATED.fullmatch(line)}
    return [*(_by_name(lines) | _by_name(released)).values(), *sorted(deprecations)]


def removed_names(package: Path) -> dict[str, list[Promise]]:
    """Return the promised names that no longer exist, each with its deprecations."""
    lines = promised_lines(package)
    deprecations = [
        Promise(location=LOCK, **found.groupdict())
        for line in lines
        if (found := DEPRECATED.fullmatch(line))
    ]
    return {
        name: [promise for promise in deprecations if _covers(promise.what, name)]
        for name, sentence in breaks(lines, api(package)).items()
        if sentence.endswith(_GONE)
    }


def complaints(package: Path) -> list[str]:
    """Report broken promises that no changelog fragment names, and removals without a deprecation.

    A package without api.txt and without a release has no promises.
    """
    lines = promised_lines(package)
    if not lines:
        return []
    fragments = {
        kind: "\n".join(path.read_text() for path in sorted(package.glob(f"changes/*.{kind}.md")))
        for kind in ("changed", "removed")
    }
    lost, found = removed_names(package), []
    for name, sentence in breaks(lines, api(package)).items():
        kinds = ("removed",) if name in lost else ("changed", "removed")
        if not any(_is_named(_last_word(name), fragments[kind]) for kind in kinds):
            files = " or ".join(f"{package.name}/changes/<slug>.{kind}.md" for kind in kinds)
            found.append(
                f"{package.name}: {sentence}. Bring it back, or tell users: name it, in backticks, in {files}"
            )
        elif name in lost and not lost[name]:
            found.append(
                f"{package.name}: {sentence}, and no release has deprecated it: bring it back and deprecate it, for two minor versions "
                "(CONTRIBUTING.md)"
            )
    return found


def write_lock(package: Path) -> int:
    """Write the public names of a package into api.txt; return their number."""
    lines = api(package)
    deprecations = sorted(
        {
            f"deprecated {each.what}: since {each.since}, removed in {each.removed_in}"
            for each in find_deprecations(package)
        }
    )
    (package / LOCK).write_text("\n".join([*lines, *deprecations]) + "\n")
    return len(lines)


def public_modules(module: griffe.Module, package: str) -> Iterator[griffe.Module]:
    """Yield the public modules, starting with the package itself."""
    yield module
    for name, child in sorted(module.members.items()):
        if (
            not isinstance(child, griffe.Module) or name.startswith("_") or name in PRIVATE
        ):  # an imported module is an Alias
            continue
        if (
            module.is_package
            and module.parent is None
            and package in PUBLIC
            and name not in PUBLIC[package]
        ):
            continue
        yield from public_modules(child, package)


def _members(owner: griffe.Module | griffe.Class) -> Iterator[str]:
    """Yield the lines of names that an owner defines, inherits, or lists in `__all__`."""
    members: Mapping[str, object] = (
        owner.all_members if isinstance(owner, griffe.Class) else owner.members
    )
    for name, member in members.items():
        if isinstance(member, griffe.Alias) and member.inherited:
            member = member.final_target
        path = f"{owner.path}.{name}"
        if isinstance(member, griffe.Function) and (_is_public(name) or _is_hook(owner, member)):
            yield from _function(path, member)
        elif isinstance(member, griffe.Attribute) and _is_public(name):
            yield _attribute(path, member)
        elif isinstance(member, griffe.Class) and _is_public(name):
            bases = ", ".join(str(base) for base in member.bases)
            yield f"{path}: class({bases})"
            yield from _members(member)
        elif (
            isinstance(member, griffe.Alias)
            and isinstance(owner, griffe.Module)
            and name in (owner.exports or ())
        ):
            yield f"{path}: {member.target_path}"


def _released_lock(package: Path) -> list[str]:
    """Return api.txt of the last release; empty if there is none or this clone lacks its tree."""
    root = package.parents[1]
    trees = [record.tree for record in published(root, package.name)]
    if not trees or not has_object(root, f"{trees[-1]}:{LOCK}"):
        return []
    return git(root, "show", f"{trees[-1]}:{LOCK}").splitlines()


def _function(path: str, function: griffe.Function) -> Iterator[str]:
    kind = next(
        (label for label in ("classmethod", "staticmethod") if label in function.labels), "function"
    )
    required = f", {REQUIRED}" if "abstractmethod" in function.labels else ""
    yield f"{path}: {kind} -> {function.returns}{required}"
    index = 0
    for parameter in function.parameters:
        if parameter.name in ("self", "cls") and isinstance(function.parent, griffe.Class):
            continue
        assert parameter.kind is not None
        order = f" {index}" if parameter.kind.value.startswith("positional") else ""
        index += 1
        default = REQUIRED if parameter.required else f"= {parameter.default}"
        yield f"{path}({parameter.name}): {parameter.annotation}, {parameter.kind.value}{order}, {default}"


def _attribute(path: str, attribute: griffe.Attribute) -> str:
    if "property" in attribute.labels:
        return f"{path}: property -> {attribute.annotation}"
    is_member = isinstance(attribute.parent, griffe.Class) and any(
        str(base).endswith("Enum") for base in attribute.parent.bases
    )
    return (
        f"{path}: {attribute.value}" if is_member else f"{path}: {attribute.annotation or 'value'}"
    )


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


def _is_hook(owner: griffe.Module | griffe.Class, member: griffe.Function) -> bool:
    return owner.path in OVERRIDABLE_CLASSES and not member.name.startswith("__")


def _by_name(lines: Sequence[str]) -> dict[str, str]:
    return {
        line.partition(": ")[0]: line for line in lines if line and not DEPRECATED.fullmatch(line)
    }


def _is_named(word: str, text: str) -> bool:
    """Return True if a word is in a code span of the text, as opposed to its prose."""
    return any(
        re.search(rf"\b{re.escape(word)}\b", span) for span in re.findall(r"`([^`]+)`", text)
    )


def _covers(what: str, name: str) -> bool:
    """Return True if a deprecation names this name, or the class or module that contains it."""
    words = what.partition("(")[0]
    return bool(re.search(rf"\b{re.escape(_last_word(name))}\b", what)) or name.startswith(
        (f"{words}.", f"{words}(")
    )


def _signature(line: str) -> str:
    return line.partition(": ")[2]


def _owner(name: str) -> str:
    """Return the function of a parameter, or the class or module of another name."""
    return name.partition("(")[0] if "(" in name else name.rpartition(".")[0]


def _last_word(name: str) -> str:
    """Return the word that a changelog fragment must contain; the class for a constructor."""
    return name.removesuffix(".__init__").rstrip(")").replace("(", ".").rpartition(".")[2]


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Run the command line; return the exit status."""
    packages = {
        path.parent.name: path.parent for path in sorted(root.glob("packages/*/pyproject.toml"))
    }
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="tools/api.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--update",
        metavar="PACKAGE",
        choices=packages,
        help="write api.txt of one package, if every broken promise is in its changelog",
    )
    chosen = parser.parse_args(arguments)
    wanted = [packages[chosen.update]] if chosen.update else list(packages.values())
    found = [sentence for package in wanted for sentence in complaints(package)]
    if found:
        print("\n".join(found))
        return 1
    if chosen.update:
        print(
            f"api: {write_lock(packages[chosen.update])} names in packages/{chosen.update}/{LOCK}"
        )
    else:
        locked = [name for name, package in packages.items() if (package / LOCK).exists()]
        print(f"api: {', '.join(locked) or 'no package'} has promises, and all are kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
