"""Run programs in processes that are forked from one that has imported what they import.

Importing torch, transformers and the engine takes seconds, which is longer than most programs run.
"""

import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "temper_legacy_shim.cli",
        "temper_legacy_shim.workers.ppo_actor",
        "temper_legacy_shim.workers.ppo_critic",
        "torch._dynamo",
        "transformers.core_model_loading",
        "transformers.models.qwen2.modeling_qwen2",
    ]
)


def start_program(
    code: str,
    *arguments: str,
    output: Path,
    errors: Path,
    entered: Path = Path(os.devnull),
    variables: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start `python -c CODE ARGUMENT...`.

    Args:
        code: The program.
        *arguments: Its arguments.
        output: File for its standard output.
        errors: File for its standard error.
        entered: File that is its standard input.
        variables: Environment variables in addition to those of this process. Imported modules do
            not see them.
    """
    process = _SERVER.Process(
        target=_run,
        args=(code, arguments, (entered, output, errors), {**os.environ, **(variables or {})}),
        kwargs={"directory": os.getcwd()},
        daemon=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        # The first call starts the server, whose imports read this.
        patch.setenv("HF_HUB_OFFLINE", "1")
        process.start()
    return process


def run_program(
    code: str, *arguments: str, entered: str = "", variables: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Start a program as `start_program` does, and wait for its end.

    `entered` is the text of its standard input.
    """
    with tempfile.TemporaryDirectory() as folder:
        stdin, stdout, stderr = (Path(folder) / name for name in ("stdin", "stdout", "stderr"))
        stdin.write_text(entered)
        process = start_program(
            code, *arguments, output=stdout, errors=stderr, entered=stdin, variables=variables
        )
        process.join(300)
        assert process.exitcode is not None, "the program did not end within 300 s"
        return subprocess.CompletedProcess(
            ["-c", *arguments], process.exitcode, stdout.read_text(), stderr.read_text()
        )


def _run(
    code: str,
    arguments: tuple[str, ...],
    files: tuple[Path, Path, Path],
    environment: dict[str, str],
    *,
    directory: str,
) -> None:
    # Engines look for garbage when they are closed, but not among the modules.
    gc.freeze()
    for descriptor, file in enumerate(files):
        mode = os.O_WRONLY | os.O_CREAT if descriptor else os.O_RDONLY
        os.dup2(os.open(file, mode), descriptor)
    sys.stdin = os.fdopen(0)  # multiprocessing has replaced it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
