"""Test that several runs of the kit are merged into one report."""

from dataclasses import replace
from pathlib import Path

import pytest

from temper_engine_api.conformance.results import (
    GROUPS,
    ConformanceResult,
    ConformanceRun,
    Outcome,
    collect_versions,
    from_json,
    to_json,
)
from tools.conformance_report import assign_gpus, list_runs, main, merge_parts, sort_runs


def test_each_group_runs_once_and_each_rank_has_its_own_gpu() -> None:
    (run,) = [run for run in list_runs("fsdp") if run.layout.name == "2-ranks"]
    parts = assign_gpus([run], ["0", "1", "2"])
    assert sorted(group for part in parts for group in part.groups.split(",")) == sorted(GROUPS)
    assert all(len(set(part.gpus)) == 2 for part in parts)
    assert {gpu for part in parts for gpu in part.gpus} == {"0", "1", "2"}
    assert parts[0].environment()["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "cuda" in parts[0].command(Path("f.json"), ())


def test_layout_with_more_ranks_than_gpus_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(
            [
                "--engines",
                "fsdp",
                "--only",
                "fsdp:4-ranks",
                "--gpus",
                "0,1",
                "--out",
                str(tmp_path / "report"),
            ]
        )
    assert caught.value.code == 2
    assert "4-ranks need more than 2 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("num_waiting", [0, 2])
def test_parts_of_a_layout_are_one_run_in_the_report(tmp_path: Path, num_waiting: int) -> None:
    (run,) = [run for run in list_runs("fsdp") if run.layout.name == "1-rank"]
    parts = [replace(run, groups=group) for group in ("gradient", "update")]
    for part in parts:
        test = ConformanceResult(
            test=f"test_{part.groups}", group=part.groups, layout="1-rank", outcome=Outcome.PASSED
        )
        done = ConformanceRun(
            engine="fsdp",
            layouts=("1-rank",),
            versions={},
            results=[test],
            num_deselected=7,
            num_waiting=num_waiting if part is parts[1] else 0,
        )
        (tmp_path / f"{part.name}.json").write_text(to_json(done))
    (path,) = merge_parts(tmp_path, parts, is_complete=True)
    joined = from_json(path.read_text())
    assert [result.test for result in joined.results] == ["test_gradient", "test_update"]
    assert (joined.num_deselected, joined.num_waiting) == (0, num_waiting)


# Nightly: the kit's own tests interrupt and continue a run.
@pytest.mark.nightly
def test_interrupted_run_is_continued(tmp_path: Path) -> None:
    # As a run that was stopped after its first test leaves them; the kit's tests stop a real one.
    passed = ConformanceResult(
        test="test_rfc_loop::test_rfc_predictions_are_detached",
        group="rfc_loop",
        layout="1-rank",
        outcome=Outcome.PASSED,
    )
    stopped = ConformanceRun(
        engine="fsdp",
        layouts=("1-rank",),
        versions=collect_versions("temper_engine_fsdp"),
        results=[passed],
        num_waiting=3,
    )
    path = tmp_path / "fsdp-1-rank.json"
    path.write_text(to_json(stopped))
    run = ["--engines", "fsdp", "--only", "fsdp:1-rank", "--out", str(tmp_path), "--resume"]
    assert main([*run, "--", "--groups", "rfc_loop"]) == 0
    results = from_json(path.read_text()).results
    assert results[0] == passed
    assert len({result.test for result in results}) == len(results) > 1
    assert f"{len(results) - 1} passed" in (tmp_path / "fsdp-1-rank.log").read_text()


def test_layouts_that_passed_are_left_out_and_those_that_failed_come_last(tmp_path: Path) -> None:
    runs = {run.layout.name: run for run in list_runs("fsdp")}
    waiting, failed = {"num_waiting": 1}, {"results": [_failure()]}
    for name, changes in (
        ("1-rank", waiting),
        ("2-ranks", {}),
        ("4-ranks", failed),
        ("sp2.2", {"num_deselected": 1}),
        ("fsdp1.4", waiting),
    ):
        done = ConformanceRun(engine="fsdp", layouts=(name,), versions={})
        (tmp_path / f"fsdp-{name}.json").write_text(to_json(replace(done, **changes)))
    names = ("1-rank", "2-ranks", "4-ranks", "sp2.2", "fsdp1.2", "fsdp1.4")
    order = sort_runs([runs[name] for name in names], tmp_path)
    assert [run.layout.name for run in order] == [
        "fsdp1.4",
        "fsdp1.2",
        "1-rank",
        "4-ranks",
        "sp2.2",
    ]


def test_no_run_is_started_after_the_time_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--engines", "fsdp", "--only", "fsdp:1-rank", "--out", str(tmp_path)]
    assert main([*run, "--limit", "1"]) == 1
    assert not list(tmp_path.iterdir())


def test_folder_with_results_is_refused_without_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fsdp-1-rank.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    assert "continue with --resume" in capsys.readouterr().err


def _failure() -> ConformanceResult:
    return ConformanceResult(test="test_a", group="update", layout="1-rank", outcome=Outcome.FAILED)
