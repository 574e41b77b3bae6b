"""Tests that the records of the migration name as evidence exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RECORDS = sorted(ROOT.glob("docs/records/migration*.md"))
_TEST = re.compile(r"(?<![\w/.])(test_\w+)(\.\.\.|\.py)?")


def known_tests() -> set[str]:
    """Return every test's name, and the names of their files."""
    files = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tools/tests/test_*.py")]
    names = {path.stem for path in files}
    for path in files:
        names |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    return names


@pytest.mark.skipif(not RECORDS, reason="needs the records of a checkout, which wheels lack")
def test_tests_that_the_records_name_exist() -> None:
    known = known_tests()
    missing = [
        f"{path.name}: {name}"
        for path in RECORDS
        for name, ending in _TEST.findall(path.read_text())
        if not any(each.startswith(name) if ending == "..." else each == name for each in known)
    ]
    assert missing == []
