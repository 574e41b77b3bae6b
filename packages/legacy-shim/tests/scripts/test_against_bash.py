"""Compare the reader with bash, which runs the scripts with stubs for all commands."""

import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bash_itself import is_bash
from comparison import compare, wrong_in_new
from corpus import drawn_scripts, public_scripts

logger = logging.getLogger(__name__)

SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.sh"))

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None, reason="needs bash, which every machine with a shell script has"
)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_our_samples_launch_what_bash_launches(path: Path) -> None:
    comparison = compare(path.read_text())
    assert not comparison.was_stopped
    assert comparison.run, "the sample launches nothing, so it shows nothing"
    assert comparison.wrong_keys() == []
    assert comparison.wrong_values() == []


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_the_new_script_of_a_sample_does_in_bash_what_was_meant(path: Path) -> None:
    assert wrong_in_new(path.read_text()) in (None, [])


def test_the_new_script_of_most_samples_is_compared() -> None:
    assert sum(wrong_in_new(path.read_text()) is not None for path in SAMPLES[:5]) >= 3


def _drawn_paths() -> list[Path]:
    return [path for _, path in drawn_scripts()]


def test_number_of_the_process_is_no_difference() -> None:
    launch = "python3 -m verl.trainer.main_ppo data.train_batch_size=8 trainer.nnodes=1\n"
    assert wrong_in_new("mkdir -p /tmp/run_$$\n" + launch) == []


def test_folder_of_the_stubs_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = "python3 -m verl.trainer.main_ppo data.train_batch_size=8 trainer.nnodes=1\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # scripts run as another user
        monkeypatch.setattr(tempfile, "tempdir", folder)
        assert wrong_in_new('mkdir -p "$PWD/pipeline"\n' + launch) == []


PUBLIC = pytest.mark.parametrize("get_paths", [public_scripts, _drawn_paths])


# Nightly: runs hundreds of public scripts in bash. Our samples are compared above every day.
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@PUBLIC
def test_new_scripts_of_public_ones_do_in_bash_what_was_meant(
    get_paths: Callable[[], list[Path]],
) -> None:
    result: Counter[str] = Counter()
    for path in get_paths():
        text = path.read_text(errors="replace")
        wrong = wrong_in_new(text) if is_bash(text) else None
        result["not compared" if wrong is None else "wrong" if wrong else "right"] += 1
        if wrong:
            logger.warning("%s: %s", path.name, "; ".join(wrong)[:500])
    logger.warning("%s", dict(result))
    assert result["wrong"] == 0
    assert result["right"] >= result["not compared"]


# Nightly: runs hundreds of public scripts in bash. Our samples are compared above every day.
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@PUBLIC
def test_public_scripts_launch_what_bash_launches(get_paths: Callable[[], list[Path]]) -> None:
    paths = get_paths()
    result: Counter[str] = Counter(scripts=len(paths))
    for path in paths:
        result += count_one(path)
    logger.warning("%s", dict(result))
    assert result["keys right"] >= 0.995 * (result["keys right"] + result["keys wrong"])
    assert result["values right"] >= 0.99 * (result["values right"] + result["values wrong"])


def count_one(path: Path) -> Counter[str]:
    """Count one script: its list of keys, and each value if that list is right."""
    text = path.read_text(errors="replace")
    if not is_bash(text):
        return Counter({"refused by bash": 1})
    comparison = compare(text)
    if comparison.was_stopped or not comparison.run:
        return Counter(
            {"stopped under stubs" if comparison.was_stopped else "launches nothing under stubs": 1}
        )
    if wrong := comparison.wrong_keys():
        logger.warning("%s: %s", path.name, "; ".join(wrong)[:500])
        return Counter({"keys wrong": 1})
    wrong = comparison.wrong_values()
    if wrong:
        logger.warning("%s: %s", path.name, "; ".join(wrong)[:500])
    right = len(comparison.values()) - len(wrong)
    full = "scripts with all values right" if not wrong else "scripts with wrong values"
    return Counter({"keys right": 1, full: 1, "values right": right, "values wrong": len(wrong)})
