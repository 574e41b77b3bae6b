"""Test that every release whose files outlive a run left golden files for later versions."""

from pathlib import Path

import pytest

from tools.golden.__main__ import WRITERS, write_golden_files
from tools.release_records import ReleaseError, last_release, list_published

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("package", WRITERS)
def test_every_published_release_has_golden_files(package: str) -> None:
    tests = ROOT / "packages" / package / "tests"
    missing = [
        tests / name / record.version
        for record in list_published(ROOT, package)
        if record.commit
        for name in WRITERS[package]
        if not any((tests / name / record.version).glob("*"))
    ]
    assert missing == []


def test_golden_files_are_not_written_twice_or_before_a_release() -> None:
    try:
        release = last_release(ROOT, "trainer")
    except ReleaseError as error:
        pytest.skip(f"a clone with its full history runs this: {error}")
    expected = "is not released yet" if release is None else "golden files are written once"
    with pytest.raises(ReleaseError, match=expected):
        write_golden_files("trainer")
