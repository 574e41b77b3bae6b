"""Test that cases are stored, continued at the same commit, and shown in a table."""

from pathlib import Path

from packages.trainer.tests.loops.faults_for_tests import BACKENDS, KINDS, draw_case
from tools.fault_campaign import (
    EARLIER,
    FIRST_ASYNC_VLLM_SEED,
    FIRST_LOOP_SEED,
    FIRST_VLLM_SEED,
    Record,
    Row,
    write_report,
)

PASSED: Row = {
    "seed": 3,
    "fault": "SIGKILL",
    "when": "step 1 + 0.20 s",
    "starts": 2,
    "repeated": 1,
    "equal": True,
    "leftovers": [],
    "problems": [],
}
FAILED: Row = {
    **PASSED,
    "seed": 1,
    "equal": False,
    "leftovers": ["run.lock"],
    "problems": ["the numbers differ"],
}


def test_recorded_seeds_draw_the_same_cases_again() -> None:
    cases = {seed: draw_case(seed) for seed in (500, 10001, 20003, 30001, 30002)}
    assert {seed: (case.loop, case.faults[0].kind) for seed, case in cases.items()} == {
        500: ("sync", "SIGKILL"),
        10001: ("sync", "Ray actor killed"),
        20003: ("sync", "vLLM server stopped"),
        30001: ("one_step_off", "SIGTERM"),
        30002: ("async", "damaged checkpoint"),
    }
    assert cases[30001].faults[1].when == "step 3 + 0.21 s"


def test_loop_async_is_drawn_with_every_kind_of_fault() -> None:
    first = FIRST_LOOP_SEED
    cases = [draw_case(seed) for seed in range(first, first + 40)]
    ahead = [case for case in cases if case.loop == "async"]
    assert {fault.kind for case in ahead for fault in case.faults} == set(KINDS)
    first = FIRST_ASYNC_VLLM_SEED
    on_vllm = [draw_case(seed) for seed in range(first, first + 4)]
    assert {case.loop for case in on_vllm} == {"async"}
    assert {case.faults[0].kind for case in on_vllm} == set(BACKENDS[0].kinds)


def test_a_stored_record_continues_at_the_same_commit_only(tmp_path: Path) -> None:
    record = Record(commit="abc", rows={3: PASSED, 1: FAILED})
    record.save(tmp_path / "state.json")
    assert Record.load(tmp_path / "state.json", commit="abc") == record
    assert Record.load(tmp_path / "state.json", commit="def") == Record(commit="def")


def test_table_lists_cases_by_seed_and_counts_failures() -> None:
    lines = Record(commit="abc", rows={3: PASSED, 1: FAILED}).table().splitlines()
    (summary,) = (line for line in lines if line.startswith("2 cases, 1 failed."))
    assert "All ran at commit `abc`." in summary
    assert "None ran on vLLM: it was neither installed nor named" in summary
    assert lines[-2:] == [
        "| 1 | 1 | SIGKILL | step 1 + 0.20 s | 2 | 1 | no | run.lock | the numbers differ |",
        "| 2 | 3 | SIGKILL | step 1 + 0.20 s | 2 | 1 | yes | none | passed |",
    ]


def test_report_keeps_what_it_says_of_earlier_campaigns(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_text(f"an old table\n\n{EARLIER}\n\n## Earlier\n")
    on_vllm = {**PASSED, "seed": FIRST_VLLM_SEED}
    for rows in ({3: PASSED}, {3: PASSED, FIRST_VLLM_SEED: on_vllm}):
        write_report(Record(commit="abc", rows=rows), report)
    text = report.read_text()
    assert text.endswith(f"passed |\n\n{EARLIER}\n\n## Earlier\n")
    assert text.startswith("# Training runs under random faults")
    assert "None ran on vLLM" not in text
