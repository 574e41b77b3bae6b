"""Run the conformance kit on every layout of one or more engines, several at a time.

    python -m tools.conformance_report --engines fsdp,megatron --ranks-at-once 16 --out FOLDER
        [--only fsdp:1-rank,megatron:tp2] [--gpus 0,1,2,3] [--compute bf16] [--limit 540]
        [--resume] [-- KIT...]

Each run writes its log and results to FOLDER; `report.md` is written last. Arguments after -- are
passed to every run of the kit. Each rank computes on one thread.

With --gpus each rank of a run has its own GPU, which other runs may share. The tests of a layout
are then divided into several runs, because most of the time on a GPU is start-up. After --limit
seconds the runs are interrupted, and the report states that it is partial. --resume continues in
FOLDER at the same commit: it skips layouts that passed, and tests that passed in the others.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from temper_engine_api.conformance.results import GROUPS, Outcome, from_json, to_json
from temper_engine_api.layout import Layout, default_layout
from temper_engine_api.registry import load_conformance_layouts

PLAIN_SIZES = {"fsdp": (1, 2, 4), "megatron": (1, 2)}
"""World sizes of an engine's default layout; (1, 2) for engines not listed."""
PARTS = (
    "gradient",
    "logprob",
    "adapter,expert_adapter",
    "weights",
    "checkpoint,step_directory",
    "batch,update,value",
)
"""Groups that get a separate run if a layout is divided; all other groups form one more run."""
SHORTEST_RUN_S = 20.0
"""Seconds that must be left to start a run, which are needed for imports and the first results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of the kit on one layout of one engine."""

    engine: str
    layout: Layout
    is_plain: bool
    """True if the layout is selected by world size instead of by name."""
    groups: str = ""
    """Comma-separated groups of tests; empty means all."""
    gpus: tuple[str, ...] = ()
    """One GPU per rank; empty means the CPU."""

    @property
    def name(self) -> str:
        """Name of the run's files."""
        return "-".join(
            filter(None, (self.engine, self.layout.name, self.groups.replace(",", "-")))
        )

    def command(self, results: Path, extra: Sequence[str]) -> list[str]:
        """Return the kit's command line."""
        selection = (
            ["--world-sizes", str(self.layout.world_size)]
            if self.is_plain
            else ["--layouts", self.layout.name]
        )
        selection += ["--groups", self.groups] if self.groups else []
        selection += ["--device", "cuda"] if self.gpus else []
        kit = (
            "-m",
            "pytest",
            "-q",
            "--pyargs",
            "temper_engine_api.conformance",
            "--engine",
            self.engine,
        )
        return [
            sys.executable,
            *kit,
            *selection,
            "--results",
            str(results),
            # Without results it runs all tests.
            "--resume",
            "-p",
            "no:cacheprovider",
            *extra,
        ]

    def environment(self) -> dict[str, str]:
        """Return the environment: one thread per rank, and this run's GPUs.

        With tensor parallelism, Megatron needs kernels to run in launch order
        (CUDA_DEVICE_MAX_CONNECTIONS=1).
        """
        variables = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        # A run on the CPU sees no GPU, because Megatron would use it.
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if self.gpus and "tp2" in self.layout.name:
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        return variables


class RankLimiter:
    """Limits the number of ranks that run at the same time."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._free, self._changed = ranks, ranks, threading.Condition()

    def acquire(self, ranks: int) -> int:
        """Wait until this many ranks may run, at most the limit; return the number acquired."""
        requested = min(ranks, self._ranks)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= requested)
            self._free -= requested
        return requested

    def make_release(self, ranks: int) -> Callable[[object], None]:
        """Return a callback that gives acquired ranks back."""

        def release(_: object) -> None:
            with self._changed:
                self._free += ranks
                self._changed.notify_all()

        return release


def list_runs(engine: str) -> list[Run]:
    """Return one run per world size of the default layout and per named layout."""
    plain = [
        Run(engine=engine, layout=default_layout(size), is_plain=True)
        for size in PLAIN_SIZES.get(engine, (1, 2))
    ]
    return plain + [
        Run(engine=engine, layout=layout, is_plain=False)
        for layout in load_conformance_layouts(engine)
    ]


def assign_gpus(runs: Sequence[Run], gpus: Sequence[str]) -> list[Run]:
    """Divide each layout's tests into several runs, and give every rank a GPU.

    Raises:
        ValueError: A layout has more ranks than there are GPUs.
    """
    if too_wide := [run.name for run in runs if run.layout.world_size > len(gpus)]:
        raise ValueError(
            f"{', '.join(too_wide)} need more than {len(gpus)} GPUs, because NCCL needs one GPU "
            "per rank. Name more GPUs, or select smaller layouts with --only."
        )
    others = ",".join(name for name in GROUPS if name not in ",".join(PARTS).split(","))
    turn = itertools.cycle(range(len(gpus)))
    assigned = []
    for run, groups in itertools.product(runs, (*PARTS, others)):
        first = next(turn)
        rank_gpus = tuple(gpus[(first + rank) % len(gpus)] for rank in range(run.layout.world_size))
        assigned.append(replace(run, groups=groups, gpus=rank_gpus))
    return assigned


def run_kit(run: Run, *, folder: Path, extra: Sequence[str], deadline: float | None) -> int | None:
    """Run the kit on one layout until it ends or is interrupted.

    Returns:
        Exit status, or None if the deadline passed before the run could start.
    """
    started = time.monotonic()
    if deadline is not None and deadline - started < SHORTEST_RUN_S:
        return None
    with (folder / f"{run.name}.log").open("a") as log:
        process = subprocess.Popen(
            run.command(folder / f"{run.name}.json", extra),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=run.environment(),
            start_new_session=True,
        )
        try:
            code = process.wait(None if deadline is None else deadline - started)
        except subprocess.TimeoutExpired:
            code = _interrupt(process)
    last = (folder / f"{run.name}.log").read_text().rstrip().rpartition("\n")[2]
    print(f"{run.name}: exit {code}, {time.monotonic() - started:.0f} s, {last}", flush=True)
    return code


def _interrupt(process: subprocess.Popen[bytes]) -> int:
    """Interrupt pytest, which then writes its results, and kill the remaining processes."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} did not stop when interrupted; killing it", flush=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def sort_runs(runs: Sequence[Run], folder: Path) -> list[Run]:
    """Return the runs that have not passed: those that have ended last, wide layouts first.

    Runs with few ranks fill the cores at the end. Runs that ended with failures come last, because
    a failure that repeats must not take the time of tests that have not run.
    """
    keyed = []
    for run in runs:
        path = folder / f"{run.name}.json"
        results = from_json(path.read_text()) if path.exists() else None
        if (
            results is None
            or results.num_waiting
            or results.num_deselected
            or results.with_outcome(Outcome.FAILED)
        ):
            has_ended = results is not None and not results.num_waiting
            keyed.append((has_ended, -run.layout.world_size, run))
    return [run for *_, run in sorted(keyed, key=lambda entry: entry[:2])]


def merge_parts(folder: Path, runs: Sequence[Run], *, is_complete: bool) -> list[Path]:
    """Merge the result files of each layout; skip layouts without results.

    Args:
        folder: Folder of the files.
        runs: All runs; those of one layout are next to each other.
        is_complete: True if runs deselected only tests of the other runs of their layout.
    """
    merged = []
    for name, group in itertools.groupby(
        runs, key=lambda run: replace(run, groups="", gpus=()).name
    ):
        parts = list(group)
        paths = [path for run in parts if (path := folder / f"{run.name}.json").exists()]
        if len(parts) > 1 and paths:
            first, *others = (from_json(path.read_text()) for path in paths)
            first.results += [result for other in others for result in other.results]
            first.num_waiting += sum(other.num_waiting for other in others)
            if is_complete and len(paths) == len(parts):
                # Each part deselected the tests of the others.
                first.num_deselected = 0
            paths = [folder / f"{name}.json"]
            paths[0].write_text(to_json(first))
        merged += paths
    return merged


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance_report", description=__doc__)
    parser.add_argument(
        "--engines",
        default="fsdp,megatron",
        help="names of the engines' entry points, comma-separated",
    )
    parser.add_argument("--only", default="", help="ENGINE:LAYOUT, comma-separated; default: all")
    parser.add_argument("--ranks-at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--gpus", default="", help="GPUs to use, such as 0,1,2,3; default: run on the CPU"
    )
    parser.add_argument("--limit", type=float, help="time limit in seconds; default: none")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the results; empty without --resume"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue an interrupted run in the folder of --out"
    )
    parser.add_argument(
        "--compute",
        choices=("fp32", "bf16"),
        default="fp32",
        help="compute precision of the engines; default: fp32",
    )
    parser.add_argument("kit", nargs="*", help="arguments of every run of the kit")
    return parser


def _select_runs(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Run]:
    """Return the runs that the arguments ask for; exits with a usage error if there are none."""
    requested = set(filter(None, chosen.only.split(",")))
    runs = [run for engine in chosen.engines.split(",") for run in list_runs(engine)]
    if unknown := requested - {f"{run.engine}:{run.layout.name}" for run in runs}:
        parser.error(f"--only names {', '.join(sorted(unknown))}, which the engines do not offer.")
    runs = [run for run in runs if not requested or f"{run.engine}:{run.layout.name}" in requested]
    if chosen.gpus:
        try:
            runs = assign_gpus(runs, chosen.gpus.split(","))
        except ValueError as error:
            parser.error(str(error))
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a run failed, else 0."""
    parser = _build_parser()
    chosen = parser.parse_args(arguments)
    if chosen.out.exists() and any(chosen.out.iterdir()) and not chosen.resume:
        parser.error(f"{chosen.out} is not empty: name a new folder, or continue with --resume.")
    chosen.out.mkdir(parents=True, exist_ok=True)
    runs = _select_runs(chosen, parser)
    deadline = None if chosen.limit is None else time.monotonic() + chosen.limit
    limiter = RankLimiter(chosen.ranks_at_once)
    order = sort_runs(runs, chosen.out)
    extra = ["--compute", chosen.compute, *chosen.kit]
    with ThreadPoolExecutor(max_workers=max(1, len(order))) as pool:
        futures = []
        for run in order:
            ranks = limiter.acquire(run.layout.world_size)
            future = pool.submit(run_kit, run, folder=chosen.out, extra=extra, deadline=deadline)
            future.add_done_callback(limiter.make_release(ranks))
            futures.append(future)
    codes = [future.result() for future in futures]
    result_files = merge_parts(chosen.out, runs, is_complete=not chosen.kit)
    report = [sys.executable, "-m", "temper_engine_api.conformance.report", *map(str, result_files)]
    if result_files:
        codes.append(
            subprocess.run(
                [*report, "--report", str(chosen.out / "report.md")], check=False
            ).returncode
        )
    # 5: no test was left to run
    return int(any(code not in (0, 5) for code in codes))


if __name__ == "__main__":
    sys.exit(main())
