"""Test that every package follows the deprecation policy, and that violations are found."""

from pathlib import Path

import pytest

from tools.deprecations import Promise, faults, find_deprecations
from tools.release_checks import declared_version

ROOT = Path(__file__).resolve().parents[2]


def _package(root: Path, source: str) -> Path:
    folder = root / "example"
    (folder / "src" / "temper_example").mkdir(parents=True)
    (folder / "src" / "temper_example" / "old.py").write_text(source)
    return folder


@pytest.mark.parametrize(
    "package", sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
)
def test_every_package_keeps_the_policy(package: str) -> None:
    folder = ROOT / "packages" / package
    assert faults(folder, declared_version(folder)) == []


def test_the_deprecated_workers_are_among_them() -> None:
    assert len(list(find_deprecations(ROOT / "packages" / "legacy-shim"))) >= 10


def test_records_and_decorators_are_found_and_what_hands_on_is_not(tmp_path: Path) -> None:
    package = _package(
        tmp_path,
        'OLD = Deprecation(what="a", since="0.1", removed_in="0.3")\n'
        '@deprecated_class(since="0.2", removed_in="0.4.0")\n'
        "class B: ...\n"
        "def mark(since, removed_in):\n    return Deprecation(since=since, removed_in=removed_in)\n",
    )
    assert list(find_deprecations(package)) == [
        Promise(location="src/temper_example/old.py:1", what="a", since="0.1", removed_in="0.3"),
        Promise(location="src/temper_example/old.py:2", what="B", since="0.2", removed_in="0.4.0"),
    ]


def test_a_promise_is_overdue_from_its_release_on(tmp_path: Path) -> None:
    package = _package(tmp_path, 'OLD = Deprecation(since="0.1", removed_in="0.3")\n')
    assert faults(package, "0.2.9") == []
    assert faults(package, "0.3.0") == [
        "example/src/temper_example/old.py:1: promised to be gone in 0.3, and this is 0.3.0: delete it"
    ]


def test_one_minor_version_is_too_short(tmp_path: Path) -> None:
    package = _package(tmp_path, 'OLD = Deprecation(since="0.1.4", removed_in="0.2.0")\n')
    assert "leave at least 2 minor versions" in faults(package, "0.1.5")[0]


def test_a_version_that_is_computed_is_refused(tmp_path: Path) -> None:
    package = _package(tmp_path, 'OLD = Deprecation(since=VERSION, removed_in="0.3")\n')
    with pytest.raises(ValueError, match="written as literals, not VERSION"):
        list(find_deprecations(package))
