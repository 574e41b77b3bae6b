"""Test that every package follows the deprecation policy, and that violations are found."""

from pathlib import Path

import pytest

from tools.deprecations import Deprecation, check_deprecations, find_deprecations
from tools.release_checks import read_declared_version

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
    assert check_deprecations(folder, read_declared_version(folder)) == []


def test_deprecated_workers_are_found() -> None:
    assert len(list(find_deprecations(ROOT / "packages" / "legacy-shim"))) >= 10


def test_calls_that_only_pass_on_arguments_are_no_deprecations(tmp_path: Path) -> None:
    package = _package(
        tmp_path,
        'OLD = Deprecation(what="a", since="0.1", removed_in="0.3")\n'
        '@deprecated_class(since="0.2", removed_in="0.4.0")\n'
        "class B: ...\n"
        "def mark(since, removed_in):\n"
        "    return Deprecation(since=since, removed_in=removed_in)\n",
    )
    assert list(find_deprecations(package)) == [
        Deprecation(
            location="src/temper_example/old.py:1", what="a", since="0.1", removed_in="0.3"
        ),
        Deprecation(
            location="src/temper_example/old.py:2", what="B", since="0.2", removed_in="0.4.0"
        ),
    ]


def test_deprecated_name_is_overdue_from_its_removal_version_on(tmp_path: Path) -> None:
    package = _package(tmp_path, 'OLD = Deprecation(since="0.1", removed_in="0.3")\n')
    assert check_deprecations(package, "0.2.9") == []
    assert check_deprecations(package, "0.3.0") == [
        (
            "example/src/temper_example/old.py:1: should be removed in 0.3, and this is 0.3.0: "
            "delete it"
        )
    ]


def test_one_minor_version_is_too_short(tmp_path: Path) -> None:
    package = _package(tmp_path, 'OLD = Deprecation(since="0.1.4", removed_in="0.2.0")\n')
    assert "keep it for at least 2 minor versions" in check_deprecations(package, "0.1.5")[0]


def test_computed_version_is_refused(tmp_path: Path) -> None:
    package = _package(tmp_path, 'OLD = Deprecation(since=VERSION, removed_in="0.3")\n')
    with pytest.raises(ValueError, match="VERSION is not a string literal"):
        list(find_deprecations(package))
