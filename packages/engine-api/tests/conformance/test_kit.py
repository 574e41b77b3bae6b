"""Test the kit as a command: usage errors, expected failures, reports, and the oracle itself."""

import subprocess
import sys

import pytest

from temper_engine_api.conformance import KIT
from temper_engine_api.conformance.oracle.oracle_engine import OracleEngine
from temper_engine_api.conformance.results import Outcome, from_json

ORACLE = "temper_engine_api.conformance.oracle:OracleEngine"
TEST = "test_update::test_gradient_is_clipped"
FAULTY = "faulty_state:IgnoresClip"


class ClaimsNothing(OracleEngine):
    capabilities = frozenset()


def usage_error(kit, capsys, *arguments, engine=ORACLE, **options):
    kit.run(engine, *arguments, tests=[TEST], status=pytest.ExitCode.USAGE_ERROR, **options)
    return capsys.readouterr().err


def expecting(tmp_path, **fields):
    path = tmp_path / "expected.toml"
    path.write_text(
        "[[expected]]\n" + "".join(f"{name} = {value!r}\n" for name, value in fields.items())
    )
    return "--expected-failures", str(path)


def test_a_run_without_an_engine_is_refused(kit, capsys):
    assert "needs --engine NAME" in usage_error(kit, capsys, engine="")


@pytest.mark.parametrize(
    "start",
    ["import pytest; pytest.main", "from temper_engine_api.conformance.__main__ import main; main"],
)
def test_a_missing_extra_is_reported_with_its_install_command(start):
    hide = "import sys; sys.modules.update(peft=None, transformers=None)"
    arguments = ["--pyargs", KIT, "--engine", ORACLE]
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}; {start}({arguments})"],
        capture_output=True,
        text=True,
        check=False,
    )
    message = (
        "the conformance kit needs peft, transformers, which are not installed: "
        "pip install './packages/engine-api[conformance]' in a clone of Temper (with its wheels in "
        "DIR: pip install --find-links DIR 'temper-engine-api[conformance]')."
    )
    assert done.stderr.strip() == f"ERROR: {message}"


def test_an_unknown_engine_is_refused(kit, capsys):
    assert "no engine is called 'nonesuch'" in usage_error(kit, capsys, engine="nonesuch")
    assert "cannot be imported" in usage_error(kit, capsys, engine="no_such_module:Engine")
    assert "derives from" in usage_error(kit, capsys, engine="collections:OrderedDict")


def test_world_sizes_that_are_not_claimed_are_refused(kit, capsys):
    assert "does not claim data_parallel" in usage_error(kit, capsys, world_sizes="1,2")
    assert "expected positive numbers" in usage_error(kit, capsys, world_sizes="two")


def test_a_failed_test_fails_the_run(kit):
    outcomes = kit.run(FAULTY, tests=[TEST], status=pytest.ExitCode.TESTS_FAILED)
    assert (len(outcomes.failed), len(outcomes.passed)) == (1, 0)


def test_an_expected_failure_passes_the_run(kit, tmp_path):
    expected = expecting(
        tmp_path,
        test="test_gradient_is_clipped",
        reason="clip is a dead key, issue 7",
        layouts=["1-rank"],
    )
    report = tmp_path / "report.md"
    kit.run(FAULTY, *expected, "--report", str(report), tests=[TEST], status=pytest.ExitCode.OK)
    assert "clip is a dead key, issue 7" in report.read_text()


def test_an_expected_failure_that_passes_fails_the_run(kit, tmp_path):
    expected = expecting(
        tmp_path, test="test_gradient_is_clipped", reason="clip is a dead key, issue 7"
    )
    outcomes = kit.run(ORACLE, *expected, tests=[TEST], status=pytest.ExitCode.TESTS_FAILED)
    assert len(outcomes.failed) == 1


def test_resumed_run_keeps_passed_tests_and_repeats_the_others(kit, tmp_path):
    results, passing = (
        tmp_path / "results.json",
        "test_capability::test_engine_claims_what_the_kit_needs",
    )
    options = ("--results", str(results), "--resume")
    first = kit.run(FAULTY, *options, tests=[TEST, passing], status=pytest.ExitCode.TESTS_FAILED)
    again = kit.run(FAULTY, *options, tests=[TEST, passing], status=pytest.ExitCode.TESTS_FAILED)
    assert (len(first.passed), len(first.failed)) == (1, 1)
    assert (again.passed, again.failed) == ([], first.failed)
    outcomes = [(row.test, row.outcome) for row in from_json(results.read_text()).results]
    assert outcomes == [
        (first.passed[0], Outcome.PASSED),
        (first.failed[0], Outcome.FAILED),
    ]


def test_results_of_a_stopped_run_count_the_tests_that_wait(kit, tmp_path):
    results, tests = (
        tmp_path / "results.json",
        ["test_capability::test_engine_claims_what_the_kit_needs", TEST],
    )
    options = ("--results", str(results), "--maxfail", "1")
    kit.run(FAULTY, *options, tests=tests[::-1], status=pytest.ExitCode.TESTS_FAILED)
    stopped = from_json(results.read_text())
    assert (len(stopped.results), stopped.num_waiting) == (1, 1)
    stopped.results.clear()
    assert "tested in part only" in stopped.verdict
    kit.run(ORACLE, "--results", str(results), tests=tests, status=pytest.ExitCode.OK)
    assert from_json(results.read_text()).num_waiting == 0


def test_resume_of_another_engine_is_refused(kit, capsys, tmp_path):
    results = tmp_path / "results.json"
    kit.run(ORACLE, "--results", str(results), tests=[TEST], status=pytest.ExitCode.OK)
    message = usage_error(kit, capsys, "--results", str(results), "--resume", engine=FAULTY)
    assert f"{results} has engine {ORACLE}" in message
    assert "--resume continues" in usage_error(kit, capsys, "--resume")


def test_failure_names_layout_model_and_seed(kit, capsys):
    kit.run(FAULTY, tests=[TEST], status=pytest.ExitCode.TESTS_FAILED)
    output = capsys.readouterr().out
    assert "What was computed" in output
    assert "layout 1-rank (1 rank); tiny model qwen2" in output
    assert "with seed 0" in output


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"test": "test_does_not_exist", "reason": "none"}, "no collected test matches"),
        ({"test": "test_gradient_is_clipped"}, "a reason is needed"),
        ({"test": "test_gradient_is_clipped", "reason": "x", "weather": "bad"}, "weather"),
    ],
)
def test_a_malformed_expected_failure_is_refused(kit, capsys, tmp_path, fields, sentence):
    assert sentence in usage_error(kit, capsys, *expecting(tmp_path, **fields))


def test_tests_of_unclaimed_capabilities_are_listed_in_the_report(kit, tmp_path):
    report = tmp_path / "report.md"
    tests = [
        "test_offload::test_offloaded_weights_give_the_same_logprobs",
        "test_offload::test_manual_moves_change_no_number",
    ]
    outcomes = kit.run(ORACLE, "--report", str(report), tests=tests, status=pytest.ExitCode.OK)
    assert [name.partition("[")[0] for name in outcomes.passed] == [
        "test_manual_moves_change_no_number"
    ]
    assert (
        "## Not claimed\n\n* `test_offloaded_weights_give_the_same_logprobs[1-rank]`"
        in report.read_text()
    )


def test_a_partial_run_does_not_show_conformance(kit, tmp_path, capsys):
    kit.run(ORACLE, tests=[TEST], status=pytest.ExitCode.OK)
    assert "was tested in part only" in capsys.readouterr().out


def test_a_skipped_test_of_a_mandatory_group_fails(kit, shared, monkeypatch):
    def skipping(*_, **__):
        pytest.skip("not enough memory")

    monkeypatch.setattr(shared.rank_pool, "run", skipping)
    outcomes = kit.run(ORACLE, tests=[TEST], status=pytest.ExitCode.TESTS_FAILED)
    assert len(outcomes.failed) == 1


def test_the_command_starts_where_warnings_are_errors(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = [
        sys.executable,
        "-m",
        "temper_engine_api.conformance",
        "--engine",
        ORACLE,
        "--collect-only",
        "-q",
    ]
    command += [
        "-p",
        "no:anyio",
    ]  # this plugin of transformers' HTTP client raises warnings
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "test_resume_is_bitwise[1-rank]" in ended.stdout


@pytest.mark.slow
# Nightly: the step kit-on-fsdp runs most of these tests on a healthy engine in every pull request.
@pytest.mark.nightly
def test_the_oracle_passes_every_test(kit, tmp_path):
    report = tmp_path / "report.md"
    outcomes = kit.run(ORACLE, "--report", str(report), status=pytest.ExitCode.OK)
    assert len(outcomes.passed) > 150
    assert "It conforms:" in report.read_text()


# Nightly: kit-on-fsdp runs most of them on one and two ranks in every pull request.
@pytest.mark.nightly
def test_the_data_parallel_oracle_passes_every_test(kit):
    outcomes = kit.run(
        "data_parallel_oracle:DataParallelOracle", world_sizes="1,2", status=pytest.ExitCode.OK
    )
    assert len(outcomes.passed) > 300


def test_slow_tests_run_only_if_the_run_is_thorough(kit):
    test = "test_sizes::test_sequence_longer_than_every_block_matches_oracle"
    outcomes = kit.run(ORACLE, tests=[test], status=pytest.ExitCode.NO_TESTS_COLLECTED)
    assert not outcomes.passed
    outcomes = kit.run(
        ORACLE, "--thorough", "--collect-only", tests=[test], status=pytest.ExitCode.OK
    )
    assert not outcomes.failed
