"""Test that repetitions are counted, stored, and shown in a table."""

import os
from pathlib import Path

import pytest

from tools import repeat_bitwise
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
    record = Record(commits=["abc", "def"])
    record.add(REPORT, group="g", condition="idle")
    record.add(REPORT, group="g", condition="idle")
    record.save(tmp_path / "state.json")
    again = Record.load(tmp_path / "state.json")
    assert again == record
    assert again.tests["g: a.test_b::test_same"] == {"idle": Outcomes(passed=2)}
    names = [f"g: a.test_b::test_{name}" for name in ("same", "other", "gpu", "new")]
    assert [again.count(name, "idle") for name in names] == [2, 2, 2, 0]
    assert again.count(names[0], "under load") == 0
    again.tests[names[2]]["idle"].passed = 1
    assert again.count(names[2], "idle") == 1


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
    record = Record(commits=["abc"], hosts=["A, 2 cores"])
    record.add(REPORT, group="g", condition="idle")
    other = Record(commits=["abc", "def"], hosts=["B, 16 cores"])
    other.add(REPORT, group="g", condition="idle")
    other.add(REPORT, group="g", condition="under load")
    record.merge(other)
    assert record.commits == ["abc", "def"]
    assert record.tests["g: a.test_b::test_same"] == {
        "idle": Outcomes(passed=2),
        "under load": Outcomes(passed=1),
    }
    lines = record.table().splitlines()
    assert "Host: A, 2 cores." in lines
    assert "Host: B, 16 cores." in lines


def test_each_repetition_of_one_process_has_its_own_module_fixtures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "test_counting.py"
    tests.write_text(COUNTING_TEST)
    junit_xml = repeat_tests(
        (str(tests),),
        expression="",
        times=3,
        processors=os.sched_getaffinity(0),
        limit_s=300,
    )
    record = Record()
    record.add(junit_xml, group="g", condition="idle")
    # The fixture returns 0, 1 and 2.
    assert list(record.tests.values()) == [{"idle": Outcomes(passed=2, failed=1)}]
    assert "test_of_a_module_fixture: assert 1 != 1" in capsys.readouterr().out


def test_missing_repetitions_are_divided_into_processes() -> None:
    assert split_repetitions({"a": 20}, per_process=5) == 4 * [(("a",), 5)]
    assert split_repetitions({"a": 8, "b": 2, "c": 0}, per_process=5) == [
        (("a", "b"), 2),
        (("a",), 5),
        (("a",), 1),
    ]
    assert split_repetitions({"a": 0, "b": -3}, per_process=5) == []


def test_only_tests_with_fewer_repetitions_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tmp_path / "test_two.py"
    tests.write_text(
        "import pytest\npytestmark = pytest.mark.bitwise\n"
        "def test_a(): pass\ndef test_ab(): pass\ndef test_c(): pass\n"
    )
    monkeypatch.setattr(repeat_bitwise, "ROOT", tmp_path)
    monkeypatch.setattr(repeat_bitwise, "GROUPS", {"g": (".",)})
    monkeypatch.setenv("TEMPER_COMMIT", "abc")
    path = tmp_path / "record.json"
    done = {f"g: test_two::{name}": {"idle": Outcomes(passed=1)} for name in ("test_a", "test_c")}
    Record(tests=done).save(path)
    arguments = ["--group", "g", "--times", "1", "--condition", "idle", "--record", str(path)]
    assert repeat_bitwise.main(arguments) == 0
    stored = Record.load(path)
    # pytest cannot deselect test_a without test_ab, whose name begins like it.
    assert {name: stored.count(name, "idle") for name in stored.tests} == {
        "g: test_two::test_a": 2,
        "g: test_two::test_ab": 1,
        "g: test_two::test_c": 1,
    }


SHARING_TEST = """
import os
import time
from pathlib import Path

import pytest


def count_busy_programs():
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            pass
    return sum(os.environ["BUSY_PROGRAM"].encode() in line for line in lines)


@pytest.mark.bitwise
@pytest.mark.parametrize("number", [1, 2])
def test_competes(number):
    assert len(os.sched_getaffinity(0)) == int(os.environ["NUM_PROCESSORS"])
    until = time.monotonic() + 60
    # Those of the other processes, once none of them has a repetition left.
    while count_busy_programs() < 2 * (int(os.environ["NUM_PROCESSORS"]) - 1):
        assert time.monotonic() < until
        time.sleep(0.1)
"""


def test_repetitions_on_shared_processors_are_each_others_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_processors = len(os.sched_getaffinity(0))
    (tmp_path / "test_sharing.py").write_text(SHARING_TEST)
    monkeypatch.setattr(repeat_bitwise, "ROOT", tmp_path)
    monkeypatch.setattr(repeat_bitwise, "GROUPS", {"g": (".",)})
    monkeypatch.setattr(
        repeat_bitwise, "BUSY_PROGRAM", f"# {tmp_path}\n{repeat_bitwise.BUSY_PROGRAM}"
    )
    monkeypatch.setenv("TEMPER_COMMIT", "abc")
    monkeypatch.setenv("BUSY_PROGRAM", str(tmp_path))
    monkeypatch.setenv("NUM_PROCESSORS", str(num_processors))
    path = tmp_path / "record.json"
    arguments = ["--group", "g", "--times", "1", "--record", str(path), "--share-processors"]
    arguments += ["--apart", "--parallel", str(num_processors + 1)]
    with pytest.raises(SystemExit):
        repeat_bitwise.main(arguments)
    assert repeat_bitwise.main([*arguments, "--condition", "under load"]) == 0
    stored = Record.load(path)
    assert [stored.count(name, "under load") for name in stored.tests] == [1, 1]
    assert [stored.count(name, "idle") for name in stored.tests] == [0, 0]
    assert capsys.readouterr().out.count("test_sharing.py, under load: 1 more") == 2
