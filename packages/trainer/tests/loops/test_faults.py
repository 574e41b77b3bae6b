"""Disturbed runs end by the same command alone with the numbers of an undisturbed one.

The first ten cases of the campaign (`nox -s faults`), one of each kind.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .faults_for_tests import KINDS, is_equal

PROGRAM = Path(__file__).with_name("faults_for_tests.py")
Row = dict[str, object]
NextRow = Callable[[], Row]

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc (Linux)")


@pytest.fixture(scope="module")
def next_row(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NextRow]:
    """Return a function that waits for the next case of one process, which imports torch once."""
    folder = tmp_path_factory.mktemp("faults")
    seeds = ",".join(map(str, range(len(KINDS))))
    command = [sys.executable, str(PROGRAM), "--folder", str(folder), "--seeds", seeds]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stdout is not None
        lines = process.stdout

        def wait() -> Row:
            row: Row = json.loads(lines.readline())
            return row

        yield wait
        # It ends by itself unless a test was left out.
        process.terminate()


@needs_linux
@pytest.mark.bitwise
@pytest.mark.parametrize("seed", range(len(KINDS)), ids=[kind.replace(" ", "_") for kind in KINDS])
def test_run_with_faults_resumes_with_equal_metrics_and_leaves_no_files(
    next_row: NextRow, seed: int
) -> None:
    while (row := next_row())["seed"] != seed:
        continue
    assert row["problems"] == [], row


def test_only_the_mismatch_with_a_sampler_may_differ_and_only_a_little() -> None:
    rows = [{"step": 1, "loss": 0.5, "mismatch/kl": 1e-7}]

    def is_accepted(**changes: float) -> bool:
        changed = [{**rows[0], **{key.replace("_", "/"): each for key, each in changes.items()}}]
        return is_equal(changed, rows, mismatch_tolerance=1e-6)

    assert is_accepted(mismatch_kl=2e-7)
    assert not is_accepted(mismatch_kl=2e-6)
    assert not is_accepted(loss=0.5 + 1e-9)
    assert not is_accepted(mismatch_max=0.0)
    assert not is_equal(rows * 2, rows, mismatch_tolerance=1e-6)
