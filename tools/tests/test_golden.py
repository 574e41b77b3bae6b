"""Every release whose files outlive a run has left some, so that later versions are tried with them."""

from pathlib import Path

import pytest

from tools.golden.__main__ import WRITERS, write
from tools.releases import Record, ReleaseTrouble, last_release, read_records

ROOT = Path(__file__).resolve().parents[2]
RELEASED = [record for record in read_records(ROOT) if record.package in WRITERS and record.commit]


@pytest.mark.parametrize("record", RELEASED, ids=lambda record: record.tag)
def test_a_release_left_files_for_later_versions(record: Record) -> None:
    tests = ROOT / "packages" / record.package / "tests"
    assert [
        name
        for name in WRITERS[record.package]
        if not any((tests / name / record.version).glob("*"))
    ] == []


def test_files_of_a_release_are_written_once() -> None:
    try:
        last_release(ROOT, "trainer")
    except ReleaseTrouble as trouble:
        pytest.skip(f"a clone with its whole history runs this: {trouble}")
    with pytest.raises(ReleaseTrouble, match="golden files are written once"):
        write("trainer")
