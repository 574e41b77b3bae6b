"""Test the command line of tools/dev.py."""

import subprocess
import sys
from pathlib import Path

from tools.dev import choose_run_dir

ROOT = Path(__file__).resolve().parents[2]


def test_each_quickstart_gets_a_new_run_folder(tmp_path: Path) -> None:
    assert choose_run_dir(tmp_path) == "run.dir=runs/quickstart"
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    assert choose_run_dir(tmp_path) == "run.dir=runs/quickstart-2"
    (tmp_path / "runs" / "quickstart-2").mkdir()
    assert choose_run_dir(tmp_path) == "run.dir=runs/quickstart-3"


def test_old_python_is_refused_with_a_message() -> None:
    # Run the real file with a higher minimum version, as if the interpreter were too old.
    source = (
        (ROOT / "tools" / "dev.py")
        .read_text()
        .replace("OLDEST_PYTHON = (3, 11)", "OLDEST_PYTHON = (9, 0)")
    )
    done = subprocess.run(
        [sys.executable, "-c", source, "test"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Temper needs Python 9.0 or newer, and this is Python 3.")


def test_version_check_parses_on_old_pythons() -> None:
    source = (ROOT / "tools" / "dev.py").read_text()
    head = source[: source.index("\nimport argparse")]
    assert 'f"' not in head
    assert ":=" not in head


def test_unknown_step_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, str(ROOT / "tools" / "dev.py"), "test", "--only", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "engine-fsdp" in done.stderr
