"""Test that several runs of the kit are merged into one report."""

from dataclasses import replace
from pathlib import Path

import pytest

from temper_engine_api.conformance.results import (
    GROUPS,
    ConformanceResult,
    ConformanceRun,
    Outcome,
    from_json,
    to_json,
)
from tools.conformance_report import assign_gpus, continue_runs, list_runs, main, merge_parts


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


@pytest.mark.parametrize("is_complete", [True, False])
def test_parts_of_a_layout_are_one_run_in_the_report(tmp_path: Path, is_complete: bool) -> None:
    (run,) = [run for run in list_runs("fsdp") if run.layout.name == "1-rank"]
    parts = [replace(run, groups=group) for group in ("gradient", "update")]
    for part in parts:
        test = ConformanceResult(
            test=f"test_{part.groups}", group=part.groups, layout="1-rank", outcome=Outcome.PASSED
        )
        done = ConformanceRun(
            engine="fsdp", layouts=("1-rank",), versions={}, results=[test], num_deselected=7
        )
        (tmp_path / f"{part.name}.json").write_text(to_json(done))
    finished = [part.name for part in parts]
    (path,) = merge_parts(tmp_path, parts, finished=finished if is_complete else finished[:1])
    joined = from_json(path.read_text())
    assert [result.test for result in joined.results] == ["test_gradient", "test_update"]
    assert (joined.num_deselected == 0) is is_complete


def test_interrupted_run_is_continued(tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    run, kit = (
        ["--engines", "fsdp", "--only", "fsdp:1-rank", "--out"],
        ["--", "--groups", "value,rfc_loop"],
    )
    assert main([*run, str(before), *kit, "-k", "rfc"]) == 0
    passed = {
        result.test for result in from_json((before / "fsdp-1-rank.json").read_text()).results
    }
    assert main(["--continues", str(before), *run, str(now), *kit]) == 0
    results = from_json((now / "fsdp-1-rank.json").read_text()).results
    assert set() < passed < {result.test for result in results}
    assert len(results) == len({result.test for result in results})
    assert f"{len(results) - len(passed)} passed" in (now / "fsdp-1-rank.log").read_text()


def test_run_with_other_package_versions_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    (run,) = [run for run in list_runs("fsdp") if run.layout.name == "1-rank"]
    for folder, version in ((tmp_path / "before", "1"), (tmp_path, "2")):
        done = ConformanceRun(engine="fsdp", layouts=("1-rank",), versions={"torch": version})
        (folder / "fsdp-1-rank.json").write_text(to_json(done))
    with pytest.raises(ValueError, match="other package versions"):
        merge_parts(tmp_path, continue_runs(tmp_path / "before", [run]), finished=[])
