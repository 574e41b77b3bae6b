"""Real old checkpoints and traces, where this machine has them."""

import os
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# golden_traces and forked_processes are shared by the folders below, and this package's own folder
# is no Python name.
sys.path.insert(0, str(Path(__file__).parent))

from forked_processes import start_program

LEGACY = Path(os.environ["TEMPER_TEST_DATA"]) / "legacy"

# Ray's workers yield to every other process (niceness 15) unless told otherwise, and tests share
# their two cores with others.
os.environ.setdefault("RAY_worker_niceness", "0")

# Shared machines make wall time noise, and a pull request's result must depend on its code alone.
# Without the phase that explains failures, which traces every line and takes most of the time.
settings.register_profile(
    "shim",
    deadline=None,
    derandomize=True,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("shim")


@pytest.fixture
def samples() -> Path:
    """Return the folder of sample checkpoints."""
    folder = LEGACY / "checkpoints"
    if not folder.is_dir():
        pytest.skip(f"needs real old checkpoints in {folder}: set TEMPER_TEST_DATA")
    return folder


class _Forked:
    """A forked process with the methods of a subprocess.Popen that a comparison calls."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.kill = process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("the comparison of names", timeout)
        return self._process.exitcode


@pytest.fixture
def fork_comparing_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that compare names from one that has imported torch.

    The tests of the command line start the real ones.
    """
    from temper_legacy_shim.checkpoints.huggingface import names

    def fork(*arguments: str, answer: Path, errors: Path) -> _Forked:
        return _Forked(start_program(names._PROGRAM, *arguments, output=answer, errors=errors))

    monkeypatch.setattr(names, "_start", fork)
