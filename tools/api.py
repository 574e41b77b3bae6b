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

from tools.deprecations import Deprecation, find_deprecations
from tools.release_records import git, has_object, list_published

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

OVERRIDABLE_CLASSES = ("temper_engine_api.engine.BaseEngine",)
"""Classes whose documented underscored methods engine authors override: these are public too."""

REQUIRED = "required"
_GONE = " is gone"

DEPRECATED = re.compile(
    r"deprecated (?P<what>.+): since (?P<since>\S+), removed in (?P<removed_in>\S+)"
)
"""Line of api.txt that records a deprecation."""


def list_public_names(package: Path) -> list[str]:
    """Return one line for each public name of a package, with its signature, sorted."""
    name = "temper_" + package.name.replace("-", "_")
    top = griffe.load(name, search_paths=[package / "src"], allow_inspection=False)
    assert isinstance(top, griffe.Module)
    return sorted(
        {line for module in public_modules(top, package.name) for line in _describe_members(module)}
    )


def find_breaking_changes(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """Return what breaks code that uses the old names: one sentence by qualified name."""
    old_lines, new_lines = _index_by_name(old), _index_by_name(new)
    changes = {}
    for name, line in old_lines.items():
        if name not in new_lines:
            changes[name] = f"{name}{_GONE}"
        elif new_lines[name] != line:
            changes[name] = (
                f"{name} was {_get_signature(line)!r} and is {_get_signature(new_lines[name])!r}"
            )
    for name, line in new_lines.items():
        if (
            name not in old_lines
            and _find_owner(name) in old_lines
            and _get_signature(line).split(", ")[-1] == REQUIRED
        ):
            changes[name] = f"{name} is new and must be given"
    return {
        name: sentence
        for name, sentence in changes.items()
        if _find_owner(name) not in changes or _find_owner(name) in new_lines
    }


def read_promised_lines(package: Path) -> list[str]:
    """Return the lines of api.txt; for names of the last release, the lines of that release."""
    lines = (package / LOCK).read_text().splitlines() if (package / LOCK).exists() else []
    released = _read_released_lock(package)
    deprecations = {line for line in [*lines, *released] if DEPRECATED.fullmatch(line)}
    return [*(_index_by_name(lines) | _index_by_name(released)).values(), *sorted(deprecations)]


def find_removed_names(package: Path) -> dict[str, list[Deprecation]]:
    """Return the promised names that no longer exist, each with its deprecations."""
    lines = read_promised_lines(package)
    deprecations = [
        Deprecation(location=LOCK, **match.groupdict())
        for line in lines
        if (match := DEPRECATED.fullmatch(line))
    ]
    return {
        name: [deprecation for deprecation in deprecations if _covers(deprecation.what, name)]
        for name, sentence in find_breaking_changes(lines, list_public_names(package)).items()
        if sentence.endswith(_GONE)
    }


def find_broken_promises(package: Path) -> list[str]:
    """Report broken promises that no changelog fragment names, and removals without a deprecation.

    A package without api.txt and without a release has no promises.
    """
    lines = read_promised_lines(package)
    if not lines:
        return []
    fragments = {
        kind: "\n".join(path.read_text() for path in sorted(package.glob(f"changes/*.{kind}.md")))
        for kind in ("changed", "removed")
    }
    removed, faults = find_removed_names(package), []
    for name, sentence in find_breaking_changes(lines, list_public_names(package)).items():
        kinds = ("removed",) if name in removed else ("changed", "removed")
        if not any(_is_named(_get_last_word(name), fragments[kind]) for kind in kinds):
            files = " or ".join(f"{package.name}/changes/<slug>.{kind}.md" for kind in kinds)
            faults.append(
                f"{package.name}: {sentence}. Restore it, or announce the change: "
                f"name it in backticks in {files}"
            )
        elif name in removed and not removed[name]:
            faults.append(
                f"{package.name}: {sentence}, and no release has deprecated it. "
                "Restore it and deprecate it for two minor versions (CONTRIBUTING.md)"
            )
    return faults


def write_lock(package: Path) -> int:
    """Write the public names of a package into api.txt; return their number."""
    lines = list_public_names(package)
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
        # An imported module is an Alias, not a Module.
        if not isinstance(child, griffe.Module) or name.startswith("_") or name in PRIVATE:
            continue
        if (
            module.is_package
            and module.parent is None
            and package in PUBLIC
            and name not in PUBLIC[package]
        ):
            continue
        yield from public_modules(child, package)


def _describe_members(owner: griffe.Module | griffe.Class) -> Iterator[str]:
    """Yield the lines of names that an owner defines, inherits, or lists in `__all__`."""
    members: Mapping[str, object] = (
        owner.all_members if isinstance(owner, griffe.Class) else owner.members
    )
    for name, member in members.items():
        if isinstance(member, griffe.Alias) and member.inherited:
            member = member.final_target
        path = f"{owner.path}.{name}"
        if isinstance(member, griffe.Function) and (_is_public(name) or _is_hook(owner, member)):
            yield from _describe_function(path, member)
        elif isinstance(member, griffe.Attribute) and _is_public(name):
            yield _describe_attribute(path, member)
        elif isinstance(member, griffe.Class) and _is_public(name):
            bases = ", ".join(str(base) for base in member.bases)
            yield f"{path}: class({bases})"
            yield from _describe_members(member)
        elif (
            isinstance(member, griffe.Alias)
            and isinstance(owner, griffe.Module)
            and name in (owner.exports or ())
        ):
            yield f"{path}: {member.target_path}"


def _read_released_lock(package: Path) -> list[str]:
    """Return api.txt of the last release; empty if there is none or this clone lacks its tree."""
    root = package.parents[1]
    trees = [record.tree for record in list_published(root, package.name)]
    if not trees or not has_object(root, f"{trees[-1]}:{LOCK}"):
        return []
    return git(root, "show", f"{trees[-1]}:{LOCK}").splitlines()


def _describe_function(path: str, function: griffe.Function) -> Iterator[str]:
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
        kind_and_order = f"{parameter.kind.value}{order}"
        yield f"{path}({parameter.name}): {parameter.annotation}, {kind_and_order}, {default}"


def _describe_attribute(path: str, attribute: griffe.Attribute) -> str:
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
    return (
        owner.path in OVERRIDABLE_CLASSES
        and member.has_docstring
        and not member.name.startswith("__")
    )


def _index_by_name(lines: Sequence[str]) -> dict[str, str]:
    return {
        line.partition(": ")[0]: line for line in lines if line and not DEPRECATED.fullmatch(line)
    }


def _is_named(word: str, text: str) -> bool:
    """Return True if a word is in a code span of the text, as opposed to its prose."""
    return any(
        re.search(rf"\b{re.escape(word)}\b", span) for span in re.findall(r"`([^`]+)`", text)
    )


def _covers(deprecated: str, name: str) -> bool:
    """Return True if a deprecation names this name, or the class or module that contains it."""
    words = deprecated.partition("(")[0]
    return bool(
        re.search(rf"\b{re.escape(_get_last_word(name))}\b", deprecated)
    ) or name.startswith((f"{words}.", f"{words}("))


def _get_signature(line: str) -> str:
    return line.partition(": ")[2]


def _find_owner(name: str) -> str:
    """Return the function of a parameter, or the class or module of another name."""
    return name.partition("(")[0] if "(" in name else name.rpartition(".")[0]


def _get_last_word(name: str) -> str:
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
    checked = [packages[chosen.update]] if chosen.update else list(packages.values())
    faults = [sentence for package in checked for sentence in find_broken_promises(package)]
    if faults:
        print("\n".join(faults))
        return 1
    if chosen.update:
        print(
            f"api: {write_lock(packages[chosen.update])} names in packages/{chosen.update}/{LOCK}"
        )
    else:
        locked = [name for name, package in packages.items() if (package / LOCK).exists()]
        names = f"the public names of {', '.join(locked)} are as promised"
        print(f"api: {names if locked else 'no package has promised names yet'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
