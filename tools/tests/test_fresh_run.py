"""Test that `dev.py train` never reuses the folder of an earlier run."""

from pathlib import Path

from tools.dev import fresh_run


def test_every_quickstart_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    assert fresh_run(tmp_path) == "run.dir=runs/quickstart"
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    assert fresh_run(tmp_path) == "run.dir=runs/quickstart-2"
    (tmp_path / "runs" / "quickstart-2").mkdir()
    assert fresh_run(tmp_path) == "run.dir=runs/quickstart-3"
