"""Test that repetitions are counted, stored, and shown in a table."""

import os
from pathlib import Path

from tools.repeat_bitwise import Outcomes, Record, repeat_tests, split_repetitions

COUNTING_TEST = """
import pytest
from pathlib import Path

@pytest.fixture(scope="module")
def number():
    log = Path(__file__).with_name("log")
    number = log.stat().st_size if log.exists() else 0
    log.write_text("x" * (number + 1))
    return number

@pytest.mark.bitwise
def test_of_a_module_fixture(number):
    assert number != 1

def test_without_the_mark():
    pass
"""
REPORT = """<testsuites><testsuite>
<testcase classname="a.test_b" name="test_same"/>
<testcase classname="a.test_b" name="test_other"><failure message="no"/></testcase>
<testcase classname="a.test_b" name="test_gpu"><skipped/></testcase>
</testsuite></testsuites>"""


def test_stored_record_continues(tmp_path: Path) -> None:
    assert Record.load(tmp_path / "state.json") == Record()
    record = Record(commits=["abc", "def"], done={"trainer": 2})
    record.add(REPORT, group="g", condition="idle")
    record.add(REPORT, group="g", condition="idle")
    record.save(tmp_path / "state.json")
    again = Record.load(tmp_path / "state.json")
    assert again == record
    assert again.tests["g: a.test_b::test_same"] == {"idle": Outcomes(passed=2)}


def test_table_counts_by_condition_and_names_what_never_ran() -> None:
    record = Record(commits=["abc"])
    record.add(REPORT, group="g", condition="idle")
    record.add(REPORT, group="g", condition="under load")
    record.add(REPORT, group="g", condition="under load")
    lines = record.table().splitlines()
    assert "| `g: a.test_b::test_same` | 1 | 0 | 2 | 0 |" in lines
    assert "| `g: a.test_b::test_other` | 0 | 1 | 0 | 2 |" in lines
    assert lines[-1] == "Always skipped on this machine: `g: a.test_b::test_gpu`."


def test_record_of_another_host_is_added() -> None:
    record = Record(commits=["abc"], done={"g, idle, all tests": 2}, hosts=["A, 2 cores"])
    record.add(REPORT, group="g", condition="idle")
    other = Record(commits=["abc", "def"], done={"g, idle, all tests": 3}, hosts=["B, 16 cores"])
    other.add(REPORT, group="g", condition="idle")
    other.add(REPORT, group="g", condition="under load")
    record.merge(other)
    assert record.done == {"g, idle, all tests": 5}
    assert record.commits == ["abc", "def"]
    assert record.tests["g: a.test_b::test_same"] == {
        "idle": Outcomes(passed=2),
        "under load": Outcomes(passed=1),
    }
    lines = record.table().splitlines()
    assert "Host: A, 2 cores." in lines
    assert "Host: B, 16 cores." in lines


def test_each_repetition_of_one_process_has_its_own_module_fixtures(tmp_path: Path) -> None:
    tests = tmp_path / "test_counting.py"
    tests.write_text(COUNTING_TEST)
    junit_xml = repeat_tests(
        (str(tests),),
        condition="idle",
        expression="",
        times=3,
        processors=os.sched_getaffinity(0),
        limit_s=300,
    )
    record = Record()
    record.add(junit_xml or "", group="g", condition="idle")
    # The fixture returns 0, 1 and 2.
    assert list(record.tests.values()) == [{"idle": Outcomes(passed=2, failed=1)}]


def test_missing_repetitions_are_divided_into_processes() -> None:
    assert split_repetitions(0, 20, per_process=5) == [(0, 5), (5, 5), (10, 5), (15, 5)]
    assert split_repetitions(2, 10, per_process=5) == [(2, 5), (7, 3)]
    assert split_repetitions(20, 20, per_process=5) == []
