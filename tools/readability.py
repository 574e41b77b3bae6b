"""Count the files of our packages that a reader opens to follow one operation of a training run.

`python tools/readability.py` runs two steps of the quickstart under a profiler and prints, for each
operation, how many files and functions of our packages were executed. It also counts the statements
of each package. `--root FOLDER` measures another checkout with this checkout's environment.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent

SHORT_RUN = (
    "experiment=quickstart",
    "run.num_threads=1",
    "run.total_steps=2",
    "warm_start.total_steps=2",
    "data.eval.max_rows=4",
)
"""Overrides of `temper-train`: the second step already has cached state, as a usual step has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A function whose call is measured with everything that it calls, in all threads."""

    title: str
    function: str
    """Pattern of qualified names; several versions of this repository use different names."""
    call: int
    """Number of the measured call, counted from 1."""


OPERATIONS = (
    Operation(
        title="one GRPO step (the second)",
        function=r"rl_step|(SyncLoop|StepLoop)\.run_step",
        call=2,
    ),
    Operation(title="one SFT update", function=r"TrainingWorker\.update", call=1),
    Operation(title="one optimizer step", function=r"BaseEngine\.optimizer_step", call=1),
    Operation(
        title="one checkpoint write (one rank's files)",
        function=r"TrainingWorker\.(write_part|write_checkpoint)",
        call=1,
    ),
)


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Profile function that collects the code executed during each operation."""

    source_root: str
    calls: dict[str, int] = field(default_factory=dict)
    executed: dict[str, set[CodeType]] = field(default_factory=dict)
    active: dict[str, FrameType] = field(default_factory=dict)
    """The frame of the operation that is being measured, by title."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Handle one event of `sys.setprofile`."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self.source_root):
            return
        if event == "return":
            for title in [title for title, start in self.active.items() if start is frame]:
                del self.active[title]
            return
        for operation in OPERATIONS:
            if re.fullmatch(operation.function, code.co_qualname):
                number = self.calls.get(operation.title, 0) + 1
                self.calls[operation.title] = number
                if number == operation.call:
                    self.active[operation.title] = frame
        for title in self.active:
            self.executed.setdefault(title, set()).add(code)

    def save(self, file: Path) -> None:
        """Write the executed functions of each operation as `[file, qualified name]`."""
        functions = {
            title: sorted({(code.co_filename, code.co_qualname) for code in codes})
            for title, codes in self.executed.items()
        }
        file.write_text(json.dumps(functions))


def profile_quickstart(root: Path) -> dict[str, list[tuple[str, str]]]:
    """Run the quickstart of a checkout in a new process; return what each operation executed.

    Returns:
        By title of the operation, the file and qualified name of every function of our packages.
    """
    sources = sorted(root.glob("packages/*/src"))
    with tempfile.TemporaryDirectory(prefix="temper-readability-") as folder:
        output = Path(folder) / "executed.json"
        subprocess.run(
            [sys.executable, __file__, "--record", str(output), "--root", str(root)],
            cwd=folder,
            check=True,
            stdout=sys.stderr,
            # Before the editable installs of this environment, so that `root` is measured.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))},
        )
        return {
            title: [(file, name) for file, name in executed]
            for title, executed in json.loads(output.read_text()).items()
        }


def record_quickstart(root: Path, output: Path) -> None:
    """Run the quickstart in this process, and write what each operation executed."""
    recorder = Recorder(source_root=str(root / "packages") + os.sep)
    sys.argv = ["temper-train", *SHORT_RUN, f"run.dir={Path.cwd() / 'run'}"]
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        runpy.run_module("temper_trainer", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    recorder.save(output)


def count_statements(folder: Path) -> int:
    """Count the statements below a folder, without docstrings and other bare strings."""
    return sum(
        isinstance(node, ast.stmt) and not _is_string(node)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    )


def operation_table(executed: Mapping[str, Sequence[tuple[str, str]]], root: Path) -> str:
    """Return a Markdown table of the files and functions of each operation."""
    packages = [folder.parent.name for folder in sorted(root.glob("packages/*/src"))]
    rows = [f"| operation | files | functions | {' | '.join(packages)} |"]
    rows.append("|---" * (3 + len(packages)) + "|")
    for operation in OPERATIONS:
        functions = executed[operation.title]
        files = {Path(file) for file, _ in functions}
        counts = [
            sum(file.is_relative_to(root / "packages" / name) for file in files)
            for name in packages
        ]
        cells = [operation.title, len(files), len(functions), *counts]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def size_table(root: Path) -> str:
    """Return a Markdown table of the files and statements of each package."""
    rows = ["| package | files | statements |", "|---|---|---|"]
    totals = [0, 0]
    for name, files, statements in _sizes(root):
        totals = [totals[0] + files, totals[1] + statements]
        rows.append(f"| {name} | {files} | {statements:,} |")
    return "\n".join([*rows, f"| all | {totals[0]} | {totals[1]:,} |"])


def _sizes(root: Path) -> Iterator[tuple[str, int, int]]:
    for folder in sorted(root.glob("packages/*/src")):
        yield folder.parent.name, len(list(folder.rglob("*.py"))), count_statements(folder)


def _is_string(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="tools/readability.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument(
        "--files", action="store_true", help="also list the files of each operation"
    )
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    root = chosen.root.resolve()
    if chosen.record:
        record_quickstart(root, chosen.record)
        return 0
    executed = profile_quickstart(root)
    missing = [each for each in OPERATIONS if each.title not in executed]
    if missing:
        for each in missing:
            print(
                f"readability: no function that matches {each.function!r} was called {each.call} "
                "times. If it was renamed, add its new name to OPERATIONS.",
                file=sys.stderr,
            )
        return 1
    print(operation_table(executed, root), size_table(root), sep="\n\n")
    if chosen.files:
        for title, functions in executed.items():
            print(f"\n{title}")
            print("\n".join(sorted({f"  {Path(file).relative_to(root)}" for file, _ in functions})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
