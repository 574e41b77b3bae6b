"""Run the conformance kit on every layout of one or more engines, several at a time.

    python -m tools.conformance_report --engines fsdp,megatron --ranks-at-once 16 --out FOLDER
        [--only fsdp:1-rank,megatron:tp2] [--gpus 0,1,2,3] [--compute bf16] [--limit 540]
        [--continues FOLDER] [-- KIT...]

Each run writes its log and results to FOLDER when it ends; `report.md` is written last. Arguments
after -- are passed to every run of the kit. Each rank computes on one thread.

With --gpus each rank of a run has its own GPU, which other runs may share. The tests of a layout
are then divided into several runs, because most of the time on a GPU is start-up. After --limit
seconds the runs are interrupted, and the report states that it is partial. --continues reads passed
tests from the folder of an interrupted run at the same commit, and runs the others.
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
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from temper_engine_api.conformance.results import GROUPS, from_json, to_json
from temper_engine_api.layout import Layout, default_layout
from temper_engine_api.registry import load_conformance_layouts
from tools.skip_passed import read_passed

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
    earlier_results: tuple[Path, ...] = ()
    """Result files of an earlier run, whose passed tests are not run again."""

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
        selection += (
            ["-p", "tools.skip_passed", "--skip-passed", ",".join(map(str, self.earlier_results))]
            if self.earlier_results
            else []
        )
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
        # pytest must find the plugin tools.skip_passed from any working directory.
        root = str(Path(__file__).resolve().parent.parent)
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, (root, os.environ.get("PYTHONPATH")))
        )
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
            if "tp2" in self.layout.name:
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

    def release(self, ranks: int) -> None:
        """Give acquired ranks back."""
        with self._changed:
            self._free += ranks
            self._changed.notify_all()


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


def run_kit(
    run: Run, *, limiter: RankLimiter, folder: Path, extra: Sequence[str], deadline: float | None
) -> int:
    """Run the kit on one layout until it ends or is interrupted; return the exit status."""
    ranks = limiter.acquire(run.layout.world_size)
    try:
        started = time.monotonic()
        with (folder / f"{run.name}.log").open("w") as log:
            command = run.command(folder / f"{run.name}.json", extra)
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=run.environment(),
                start_new_session=True,
            )
            try:
                code = process.wait(None if deadline is None else max(0.1, deadline - started))
            except subprocess.TimeoutExpired:
                code = _interrupt(process)
    finally:
        limiter.release(ranks)
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


def continue_runs(folder: Path, runs: Sequence[Run]) -> list[Run]:
    """Attach the results of an earlier folder to the runs of the same layout."""
    seen = [(path, from_json(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return [
        replace(
            run,
            earlier_results=tuple(
                path
                for path, results in seen
                if (results.engine, results.layouts) == (run.engine, (run.layout.name,))
            ),
        )
        for run in runs
    ]


def merge_parts(folder: Path, runs: Sequence[Run], *, finished: Collection[str]) -> list[Path]:
    """Merge the result files of each layout; skip layouts without results.

    Args:
        folder: Folder of the files.
        runs: All runs; those of one layout are next to each other.
        finished: Names of runs that skipped only tests of other runs.

    Raises:
        ValueError: If an earlier run used other package versions.
    """
    merged = []
    for name, group in itertools.groupby(
        runs, key=lambda run: replace(run, groups="", gpus=()).name
    ):
        parts = list(group)
        is_complete = all(run.name in finished for run in parts)
        paths = [path for run in parts if (path := folder / f"{run.name}.json").exists()]
        if len(paths) > 1 or (paths and parts[0].earlier_results):
            first, *others = (from_json(path.read_text()) for path in paths)
            if other_versions := [
                path
                for path in parts[0].earlier_results
                if from_json(path.read_text()).versions != first.versions
            ]:
                raise ValueError(
                    f"{other_versions[0]} used other package versions than this run: "
                    "run without --continues."
                )
            first.results += [result for other in others for result in other.results]
            ran = {result.test for result in first.results}
            first.results += [
                result
                for test, result in read_passed(parts[0].earlier_results).items()
                if test not in ran
            ]
            # Each part deselected the tests of the others.
            first.num_deselected = 0 if is_complete else first.num_deselected
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
    parser.add_argument("--continues", type=Path, help="folder of an interrupted run to continue")
    parser.add_argument(
        "--out", type=Path, required=True, help="new or empty folder for the results"
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
    if chosen.continues:
        runs = continue_runs(chosen.continues, runs)
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a run failed, else 0."""
    parser = _build_parser()
    chosen = parser.parse_args(arguments)
    if chosen.out.exists() and any(chosen.out.iterdir()):
        parser.error(f"{chosen.out} is not empty: name a new folder.")
    chosen.out.mkdir(parents=True, exist_ok=True)
    runs = _select_runs(chosen, parser)
    deadline = None if chosen.limit is None else time.monotonic() + chosen.limit
    limiter = RankLimiter(chosen.ranks_at_once)
    # Start with the runs with the most ranks; at the end they would leave cores idle.
    order = sorted(runs, key=lambda run: -run.layout.world_size)
    with ThreadPoolExecutor(max_workers=len(order)) as pool:
        extra = ["--compute", chosen.compute, *chosen.kit]
        codes = list(
            pool.map(
                lambda run: run_kit(
                    run, limiter=limiter, folder=chosen.out, extra=extra, deadline=deadline
                ),
                order,
            )
        )
    # 5: no test was left to run
    ended = (
        ()
        if chosen.kit
        else (run.name for run, code in zip(order, codes, strict=True) if code in (0, 1, 5))
    )
    result_files = merge_parts(chosen.out, runs, finished=set(ended))
    report = [sys.executable, "-m", "temper_engine_api.conformance.report", *map(str, result_files)]
    if result_files:
        codes.append(
            subprocess.run(
                [*report, "--report", str(chosen.out / "report.md")], check=False
            ).returncode
        )
    return int(any(code not in (0, 5) for code in codes))


if __name__ == "__main__":
    sys.exit(main())
