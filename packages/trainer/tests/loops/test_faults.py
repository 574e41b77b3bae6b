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

from .faults_for_tests import KINDS

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
