"""Makes the writers of old files importable here, and compares names without importing torch again.

Names are compared in a process of their own, whose imports take longer than most tests. Here it is
forked from a process that has done them. The tests of the command line start the real one.
"""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from temper_legacy_shim.checkpoints.huggingface import names

sys.path.insert(0, str(Path(__file__).parent))

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch", "transformers.core_model_loading", "transformers.models.qwen2.modeling_qwen2"]
)


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


def _fork(*arguments: str, answer: Path, errors: Path) -> _Forked:
    process = _SERVER.Process(target=_compare, args=(arguments, answer, errors), daemon=True)
    process.start()
    return _Forked(process)


def _compare(arguments: tuple[str, ...], answer: Path, errors: Path) -> None:
    for file, descriptor in ((answer, 1), (errors, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["-c", *arguments]
    exec(names._PROGRAM, {"__name__": "__main__"})


@pytest.fixture(autouse=True)
def fork_comparing_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(names, "_start", _fork)
