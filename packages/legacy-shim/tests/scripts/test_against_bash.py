"""The reader against bash itself, which runs the same scripts with stubs for every external command."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from comparison import compare

SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.sh"))
CORPUS = Path(__file__).resolve().parents[5] / "shared" / "legacy" / "scripts"
"""Public launch scripts, beside the repository where a machine has them; never in it."""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, which every machine with a shell script has")


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_our_samples_launch_what_bash_launches(path: Path) -> None:
    comparison = compare(path.read_text())
    assert not comparison.was_stopped
    assert comparison.run, "the sample launches nothing, so it shows nothing"
    assert comparison.wrong_keys() == []
    assert comparison.wrong_values() == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_public_scripts_launch_what_bash_launches() -> None:
    paths = sorted(CORPUS.rglob("*.sh")) if CORPUS.is_dir() else []
    if not paths:
        pytest.skip(f"needs public launch scripts in {CORPUS}: a machine that has ../shared/legacy/scripts beside the repository runs this")
    keys: list[bool] = []
    values: list[bool] = []
    for path in paths:
        comparison = compare(path.read_text(errors="replace"))
        if comparison.was_stopped or not comparison.run:
            continue
        keys.append(not comparison.wrong_keys())
        if keys[-1]:
            values += [not wrong for wrong in map(bool, comparison.wrong_values())]
            values += [True] * (len(comparison.values()) - len(comparison.wrong_values()))
    assert sum(keys) / len(keys) >= 0.995
    assert sum(values) / len(values) >= 0.99
