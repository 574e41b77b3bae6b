"""Test named layouts: selection, usage errors, and reports."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import staged_oracle

from temper_engine_api.conformance.harness.engine_lookup import load_layouts
from temper_engine_api.conformance.results import from_json, merge_runs
from temper_engine_api.errors import ConfigError, EngineNotFoundError
from temper_engine_api.layout import Layout

ORACLE = "temper_engine_api.conformance.oracle:OracleEngine"
STAGED = "staged_oracle:StagedOracle"
TEST = "test_capability::test_topologies_are_consistent"


def usage_error(kit, capsys, *arguments, engine=STAGED, **options):
    kit.run(engine, *arguments, tests=[TEST], status=pytest.ExitCode.USAGE_ERROR, **options)
    return capsys.readouterr().err


def test_a_test_runs_in_every_requested_layout(kit):
    outcomes = kit.run(STAGED, tests=[TEST], layouts="all", status=pytest.ExitCode.OK)
    assert outcomes.passed == [
        f"test_topologies_are_consistent[{name}]"
        for name in ("stages1", "on-device1", "stages2", "contexts2")
    ]
    outcomes = kit.run(
        STAGED, "--world-sizes", "2", tests=[TEST], layouts="stages2", status=pytest.ExitCode.OK
    )
    assert sorted(outcomes.passed) == [
        "test_topologies_are_consistent[2-ranks]",
        "test_topologies_are_consistent[stages2]",
    ]


def test_unknown_layouts_are_rejected(kit, capsys):
    assert (
        "names stages9, but engine 'staged_oracle:StagedOracle' offers stages2, contexts2"
        in usage_error(kit, capsys, layouts="stages9")
    )
    assert "offers no layouts" in usage_error(kit, capsys, engine=ORACLE, layouts="all")


def test_a_layout_with_an_unknown_setting_is_rejected(kit, capsys, monkeypatch):
    wrong = Layout(name="wrong", world_size=1, fields={"tensor_parallel": 2})
    monkeypatch.setattr(staged_oracle, "CONFORMANCE_LAYOUTS", (wrong,))
    assert "layout wrong sets ['tensor_parallel'], which StagedConfig does not have" in usage_error(
        kit, capsys, layouts="all"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "all", "world_size": 1},
        {"name": "two words", "world_size": 1},
        {"name": "x", "world_size": 0},
    ],
)
def test_a_layout_with_an_invalid_name_or_size_is_rejected(fields):
    with pytest.raises(ConfigError, match="layout"):
        Layout(**fields)


def test_layouts_are_found_by_entry_point(monkeypatch):
    def installed(*, group):
        points = [
            EntryPoint("mine", "staged_oracle:CONFORMANCE_LAYOUTS", group),
            EntryPoint("odd", "staged_oracle:StagedOracle", group),
        ]
        return points if group == "temper.conformance_layouts" else []

    monkeypatch.setattr("temper_engine_api.registry.entry_points", installed)
    assert [layout.name for layout in load_layouts("mine")] == [
        "stages2",
        "contexts2",
        "stages1",
        "on-device1",
    ]
    assert load_layouts("other") == ()
    with pytest.raises(EngineNotFoundError, match="not a tuple of Layout"):
        load_layouts("odd")


def test_duplicate_layouts_are_rejected(monkeypatch):
    monkeypatch.setattr(
        staged_oracle, "CONFORMANCE_LAYOUTS", (staged_oracle.CONFORMANCE_LAYOUTS[0],) * 2
    )
    with pytest.raises(EngineNotFoundError, match="repeated layout names"):
        load_layouts(STAGED)


def test_a_run_of_some_groups_is_partial(kit, capsys):
    outcomes = kit.run(
        STAGED,
        "--groups",
        "capability",
        tests=[TEST, "test_update::test_gradient_is_clipped"],
        status=pytest.ExitCode.OK,
    )
    assert outcomes.passed == ["test_topologies_are_consistent[1-rank]"]
    assert "was tested in part only" in capsys.readouterr().out
    assert "the groups are gradient, update" in usage_error(kit, capsys, "--groups", "colour")


def test_results_of_several_runs_make_one_report(kit, tmp_path):
    files = []
    for engine, layouts in ((ORACLE, None), (STAGED, "stages2")):
        files.append(str(tmp_path / f"{len(files)}.json"))
        kit.run(
            engine, "--results", files[-1], tests=[TEST], layouts=layouts, status=pytest.ExitCode.OK
        )
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "temper_engine_api.conformance.report"]
    subprocess.run([*command, *files, "--report", str(report)], check=True)
    text = report.read_text()
    assert f"# Conformance of `{ORACLE}` and `{STAGED}`" in text
    assert f"| group | about | {ORACLE} 1-rank | {STAGED} stages2 |" in text
    assert "| capability | what is not claimed is rejected | 1/1 | 1/1 |" in text
    assert text.count("version (") == 2
    other = tmp_path / "other.json"
    other.write_text("[]")
    ended = subprocess.run(
        [*command, str(other), "--report", str(report)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, "not the results of a run" in ended.stderr) == (2, True)


def test_runs_of_one_engine_in_different_layouts_are_merged(kit, tmp_path):
    files = [tmp_path / f"{layout}.json" for layout in ("stages2", "stages1")]
    for path in files:
        kit.run(
            STAGED,
            "--results",
            str(path),
            tests=[TEST],
            layouts=path.stem,
            status=pytest.ExitCode.OK,
        )
    (together,) = merge_runs(from_json(path.read_text()) for path in files)
    assert together.layouts == ("stages2", "stages1")
    assert len(together.results) == 2
    assert len(merge_runs([*merge_runs([together]), from_json(files[0].read_text())])) == 2


@pytest.mark.slow
def test_tests_pass_if_only_the_last_stage_has_outputs(kit):
    # Of the updates, those whose metrics and outputs are read; at night, every test runs.
    updates = ["three_updates_match_adamw", "fully_masked_mini_batch_changes_nothing"]
    tests = [f"test_update::test_{name}" for name in updates]
    tests += ["test_batch", "test_rfc_loop", "test_capability"]
    outcomes = kit.run(STAGED, tests=tests, layouts="stages2")
    assert not outcomes.failed
    assert len(outcomes.passed) > 20


# Nightly: the test above runs a part of them every day.
@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["stages2", "contexts2"])
def test_every_test_passes_if_several_ranks_form_a_replica(kit, layout):
    outcomes = kit.run(STAGED, layouts=layout, status=pytest.ExitCode.OK)
    assert len(outcomes.passed) > 150
