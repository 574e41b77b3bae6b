"""Test the lock on public names.

A change that breaks users must be found and named in a changelog fragment; other changes pass.
"""

from pathlib import Path

import pytest

from tools.api import (
    LOCK,
    find_breaking_changes,
    find_broken_promises,
    list_public_names,
    main,
    write_lock,
)
from tools.release_checks import check_deprecation_period
from tools.release_records import ReleaseError, ReleaseRecord, git, write_records

BEFORE = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

LIMIT = 3

class Kind(StrEnum):
    NEAR = "near"

@dataclass(frozen=True, kw_only=True)
class Plan:
    steps: int
    limit: int = 2

class Engine(ABC):
    @abstractmethod
    def run(self, plan: Plan) -> int: ...
    def _inner(self) -> None: ...

def plan(lengths: list[int], *, cap: int, spread: float = 0.5) -> Plan:
    return Plan(steps=len(lengths))

def _helper() -> None: ...

__all__ = ["Plan", "Path", "plan"]
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a single module, locked with `BEFORE`."""
    folder = tmp_path / "packages" / "example"
    (folder / "src" / "temper_example").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (folder / "changes").mkdir()
    (folder / "src" / "temper_example" / "__init__.py").write_text(BEFORE)
    write_lock(folder)
    return folder


def _change(package: Path, old: str, new: str) -> None:
    assert BEFORE.count(old) == 1
    (package / "src" / "temper_example" / "__init__.py").write_text(BEFORE.replace(old, new))


def test_public_names_are_locked_with_their_signatures(package: Path) -> None:
    assert list_public_names(package) == [
        "temper_example.Engine.run(plan): Plan, positional or keyword 0, required",
        "temper_example.Engine.run: function -> int, required",
        "temper_example.Engine: class(ABC)",
        "temper_example.Kind.NEAR: 'near'",
        "temper_example.Kind: class(StrEnum)",
        "temper_example.LIMIT: value",
        "temper_example.Path: pathlib.Path",
        "temper_example.Plan.__init__(limit): int, keyword-only, = 2",
        "temper_example.Plan.__init__(steps): int, keyword-only, required",
        "temper_example.Plan.__init__: function -> None",
        "temper_example.Plan.limit: int",
        "temper_example.Plan.steps: int",
        "temper_example.Plan: class()",
        "temper_example.plan(cap): int, keyword-only, required",
        "temper_example.plan(lengths): list[int], positional or keyword 0, required",
        "temper_example.plan(spread): float, keyword-only, = 0.5",
        "temper_example.plan: function -> Plan",
    ]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("cap: int,", "", "plan(cap) is gone"),
        (
            "cap: int,",
            "cap: float,",
            "plan(cap) was 'int, keyword-only, required' and is 'float, keyword-only, required'",
        ),
        (
            "spread: float = 0.5",
            "spread: int = 0.5",
            "plan(spread) was 'float, keyword-only, = 0.5' and is 'int, keyword-only, = 0.5'",
        ),
        ("cap: int,", "cap: int, seed: int,", "plan(seed) is new and must be given"),
        (
            "steps: int\n",
            "steps: int\n    width: int\n",
            "Plan.__init__(width) is new and must be given",
        ),
        (
            "    def _inner",
            "    @abstractmethod\n    def stop(self) -> None: ...\n    def _inner",
            "Engine.stop is new and must be given",
        ),
        ('    NEAR = "near"', '    NEAR = "close"', "Kind.NEAR was \"'near'\" and is \"'close'\""),
        ('"Path", ', "", "Path is gone"),
        ("LIMIT = 3", "_LIMIT = 3", "LIMIT is gone"),
    ],
)
def test_breaking_changes_are_found(package: Path, old: str, new: str, sentence: str) -> None:
    _change(package, old, new)
    assert list(
        find_breaking_changes(
            (package / LOCK).read_text().splitlines(), list_public_names(package)
        ).values()
    ) == [f"temper_example.{sentence}"]


def test_imported_module_is_locked_only_where_it_is_defined(package: Path) -> None:
    (package / "src" / "temper_example" / "sizes.py").write_text(
        "import temper_example\nfrom temper_example import other\nSIZE = 1\n"
    )
    (package / "src" / "temper_example" / "other.py").write_text("WIDTH = 1\n")
    assert [line for line in list_public_names(package) if "sizes" in line or "other" in line] == [
        "temper_example.other.WIDTH: value",
        "temper_example.sizes.SIZE: value",
    ]


def test_removed_class_is_reported_once(package: Path) -> None:
    _change(package, "class Engine(ABC):", "class _Engine(ABC):")
    assert list(
        find_breaking_changes((package / LOCK).read_text().splitlines(), list_public_names(package))
    ) == ["temper_example.Engine"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cap: int,", "cap: int, seed: int = 0,"),
        ("limit: int = 2", "limit: int = 2\n    width: int = 1"),
        ("def _helper() -> None: ...", "def more(size: int) -> None: ..."),
        (
            "    def _inner(self)",
            "    def outer(self, size: int) -> None: ...\n    def _inner(self, size: int)",
        ),
    ],
)
def test_additions_break_no_promise(package: Path, old: str, new: str) -> None:
    _change(package, old, new)
    assert find_broken_promises(package) == []


def test_changelog_fragment_that_names_a_change_permits_it(package: Path) -> None:
    _change(package, "cap: int,", "cap: float,")
    (package / "changes" / "cap.changed.md").write_text("There is a cap on what `plan` takes.\n")
    assert len(find_broken_promises(package)) == 1
    (package / "changes" / "cap.changed.md").write_text("`cap` of `plan` may have a fraction.\n")
    assert find_broken_promises(package) == []


def _release(package: Path) -> None:
    """Record the current contents as release 0.1.0."""
    root = package.parents[1]
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    tree = git(root, "write-tree", "--prefix=packages/example/").strip()
    (root / "tools").mkdir()
    write_records(
        root, [ReleaseRecord(package="example", version="0.1.0", date="2020-01-01", tree=tree)]
    )


def test_editing_the_lock_does_not_revoke_a_promise(package: Path) -> None:
    _release(package)
    _change(package, "cap: int,", "cap: float,")
    write_lock(package)
    (sentence,) = find_broken_promises(package)
    assert (
        "temper_example.plan(cap) was 'int, keyword-only, required' "
        "and is 'float, keyword-only, required'"
    ) in sentence
    (package / LOCK).unlink()
    assert find_broken_promises(package) == [sentence]
    (package / "changes" / "cap.changed.md").write_text("`cap` of `plan` may have a fraction.\n")
    assert find_broken_promises(package) == []


def test_names_locked_after_the_release_are_promised_too(package: Path) -> None:
    _release(package)
    _change(package, "LIMIT = 3", "LIMIT = 3\nWIDTH = 1")
    write_lock(package)
    assert find_broken_promises(package) == []
    _change(package, "LIMIT = 3", "LIMIT = 3\nHEIGHT = 1")
    assert "temper_example.WIDTH is gone" in find_broken_promises(package)[0]


def _deprecate(package: Path, what: str, *, since: str, removed_in: str) -> None:
    """Lock a deprecation as if the sources of the last release contained it."""
    module = package / "src" / "temper_example" / "old.py"
    module.write_text(f'Deprecation(what="{what}", since="{since}", removed_in="{removed_in}")\n')
    write_lock(package)
    module.unlink()


def test_removal_needs_a_deprecation_in_a_release(package: Path) -> None:
    _change(package, "LIMIT = 3", "")
    (package / "changes" / "limit.changed.md").write_text("`LIMIT` is gone.\n")
    assert find_broken_promises(package) == [
        (
            "example: temper_example.LIMIT is gone. Restore it, or announce the change: "
            "name it in backticks in example/changes/<slug>.removed.md"
        )
    ]
    (package / "changes" / "limit.removed.md").write_text("`LIMIT` is gone.\n")
    (sentence,) = find_broken_promises(package)
    assert sentence.startswith(
        "example: temper_example.LIMIT is gone, and no release has deprecated it. "
        "Restore it and deprecate it"
    )


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("LIMIT = 3", "", "temper_example.LIMIT"),
        ("cap: int,", "", "temper_example.plan(cap=)"),
        ("    limit: int = 2", "", "temper_example.Plan"),
    ],
)
def test_deprecated_name_may_be_removed(package: Path, old: str, new: str, what: str) -> None:
    (package / "src" / "temper_example" / "__init__.py").write_text(BEFORE)
    _deprecate(package, what, since="0.1", removed_in="0.3")
    assert find_broken_promises(package) == []
    _change(package, old, new)
    (package / "changes" / "gone.removed.md").write_text("`LIMIT`, `cap` and `limit` are gone.\n")
    assert find_broken_promises(package) == []


@pytest.mark.parametrize(
    ("released", "version", "sentence"),
    [
        (("0.1.0", "0.2.0"), "0.3.0", ""),
        (("0.1.0", "0.2.0"), "0.2.1", "promised until 0.3"),
        (
            ("0.1.0", "0.1.1"),
            "0.3.0",
            "1 minor versions were released with the warning, and 2 must be",
        ),
        (
            ("0.0.9", "0.1.0"),
            "0.3.0",
            "1 minor versions were released with the warning, and 2 must be",
        ),
    ],
)
def test_deprecated_name_is_removed_after_two_minor_versions_at_the_earliest(
    package: Path, released: tuple[str, ...], version: str, sentence: str
) -> None:
    root = package.parent.parent
    (root / "tools").mkdir()
    write_records(
        root,
        [
            ReleaseRecord(package="example", version=each, date="2026-01-01", tree="")
            for each in released
        ],
    )
    _deprecate(package, "temper_example.LIMIT", since="0.1", removed_in="0.3")
    _change(package, "LIMIT = 3", "")
    if not sentence:
        check_deprecation_period(root, "example", version)
        return
    with pytest.raises(ReleaseError, match=sentence):
        check_deprecation_period(root, "example", version)


def test_update_refuses_unannounced_breaks_and_accepts_additions(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = package.parent.parent
    before = (package / LOCK).read_text()
    _change(package, "cap: int,", "")
    assert main(["--update", "example"], root=root) == 1
    assert (
        "temper_example.plan(cap) is gone. Restore it, or announce the change"
        in capsys.readouterr().out
    )
    assert (package / LOCK).read_text() == before
    _change(package, "cap: int,", "cap: int, seed: int = 0,")
    assert main(["--update", "example"], root=root) == 0
    assert "temper_example.plan(seed): int, keyword-only, = 0" in (package / LOCK).read_text()
    assert main([], root=root) == 0
