"""Every layout of one or more engines held to the conformance kit, several at once, and one report of all.

    python -m tools.conformance_report --engines fsdp,megatron --ranks-at-once 16 --out FOLDER [--only fsdp:1-rank,megatron:tp2]
        [--gpus 0,1,2,3] [--compute bf16] [--limit 540] [--continues FOLDER] [-- KIT...]

Writes what each run printed and found into FOLDER as soon as it ends, and `report.md` last. Arguments after -- go to every run of the kit.
Each rank computes on one thread. With --gpus ranks compute there, those of a run each on a GPU of its own, which other runs may share; and
the laws of a layout are divided over several runs, because there it is start-up that takes time. After --limit seconds runs are
interrupted, and the report says that it is partial; --continues takes what held in such a run at the same commit from its folder, and runs
the rest.
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
from tools.held_before import held_in

PLAIN_SIZES = {"fsdp": (1, 2, 4), "megatron": (1, 2)}
"""World sizes of an engine's own defaults; (1, 2) for an engine that is not named here."""
PARTS = (
    "gradient",
    "logprob",
    "adapter,expert_adapter",
    "weights",
    "checkpoint",
    "batch,update,value",
)
"""Groups that are runs of their own where a layout is divided; the rest is one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One layout of one engine."""

    engine: str
    layout: Layout
    is_plain: bool
    """Whether it is asked for by world size rather than by name."""
    groups: str = ""
    """Of laws, with commas; empty is all."""
    gpus: tuple[str, ...] = ()
    """One a rank; none is the CPU."""
    before: tuple[Path, ...] = ()
    """Findings of an earlier run, whose laws that held are not run again."""

    @property
    def name(self) -> str:
        """Of its files."""
        return "-".join(
            filter(None, (self.engine, self.layout.name, self.groups.replace(",", "-")))
        )

    def command(self, results: Path, extra: Sequence[str]) -> list[str]:
        """The kit's command line."""
        where = (
            ["--world-sizes", str(self.layout.world_size)]
            if self.is_plain
            else ["--layouts", self.layout.name]
        )
        where += ["--groups", self.groups] if self.groups else []
        where += ["--device", "cuda"] if self.gpus else []
        where += (
            ["-p", "tools.held_before", "--held-before", ",".join(map(str, self.before))]
            if self.before
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
            *where,
            "--results",
            str(results),
            "-p",
            "no:cacheprovider",
            *extra,
        ]

    def environment(self) -> dict[str, str]:
        """One thread a rank; on GPUs those of this run, and kernels in the order of their launch where Megatron asks for it."""
        found = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        # For the plugin tools.held_before, which pytest must find from any working directory.
        root = str(Path(__file__).resolve().parent.parent)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        if self.gpus:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
            if "tp2" in self.layout.name:
                found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        return found


class Room:
    """So many ranks may run at once; a run takes its place before it starts."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._free, self._changed = ranks, ranks, threading.Condition()

    def take(self, ranks: int) -> int:
        """Wait for so many places, or for all of them where there are fewer; returns how many were taken."""
        wanted = min(ranks, self._ranks)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        return wanted

    def leave(self, ranks: int) -> None:
        """Give them back."""
        with self._changed:
            self._free += ranks
            self._changed.notify_all()


def runs_of(engine: str) -> list[Run]:
    """Defaults at each world size, then every named layout."""
    plain = [
        Run(engine=engine, layout=default_layout(size), is_plain=True)
        for size in PLAIN_SIZES.get(engine, (1, 2))
    ]
    return plain + [
        Run(engine=engine, layout=layout, is_plain=False)
        for layout in load_conformance_layouts(engine)
    ]


def on_gpus(runs: Sequence[Run], gpus: Sequence[str]) -> list[Run]:
    """Each layout's laws divided over several runs, and every rank with a GPU.

    Raises:
        ValueError: a layout has more ranks than there are GPUs.
    """
    if too_wide := [run.name for run in runs if run.layout.world_size > len(gpus)]:
        raise ValueError(
            f"{', '.join(too_wide)} need more than {len(gpus)} GPUs, and NCCL gives each rank one of its own."
        )
    others = ",".join(name for name in GROUPS if name not in ",".join(PARTS).split(","))
    turn = itertools.cycle(range(len(gpus)))
    divided = []
    for run, groups in itertools.product(runs, (*PARTS, others)):
        first = next(turn)
        own = tuple(gpus[(first + rank) % len(gpus)] for rank in range(run.layout.world_size))
        divided.append(replace(run, groups=groups, gpus=own))
    return divided


def hold(
    run: Run, *, room: Room, folder: Path, extra: Sequence[str], deadline: float | None
) -> int:
    """Run the kit on one layout until it ends, or is interrupted; returns its exit status."""
    ranks = room.take(run.layout.world_size)
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
                code = _interrupted(process)
    finally:
        room.leave(ranks)
    last = (folder / f"{run.name}.log").read_text().rstrip().rpartition("\n")[2]
    print(f"{run.name}: exit {code}, {time.monotonic() - started:.0f} s, {last}", flush=True)
    return code


def _interrupted(process: subprocess.Popen[bytes]) -> int:
    """Ask pytest to stop, which then still writes what it found; end whatever is left."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} did not stop when interrupted, and is ended", flush=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def begun_in(folder: Path, runs: Sequence[Run]) -> list[Run]:
    """The runs with what an earlier run in that folder found in their layout."""
    seen = [(path, from_json(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return [
        replace(
            run,
            before=tuple(
                path
                for path, found in seen
                if (found.engine, found.layouts) == (run.engine, (run.layout.name,))
            ),
        )
        for run in runs
    ]


def join_parts(folder: Path, runs: Sequence[Run], *, finished: Collection[str]) -> list[Path]:
    """What was found in each layout as one file, whether by one run or several; those of which nothing is known are left out.

    Args:
        folder: of their files.
        runs: the parts of a layout beside each other.
        finished: names of those that left out nothing but the laws of others.

    Raises:
        ValueError: an earlier run stood on other versions.
    """
    found = []
    for name, group in itertools.groupby(
        runs, key=lambda run: replace(run, groups="", gpus=()).name
    ):
        parts = list(group)
        is_whole = all(run.name in finished for run in parts)
        paths = [path for run in parts if (path := folder / f"{run.name}.json").exists()]
        if len(paths) > 1 or (paths and parts[0].before):
            first, *others = (from_json(path.read_text()) for path in paths)
            if foreign := [
                path
                for path in parts[0].before
                if from_json(path.read_text()).versions != first.versions
            ]:
                raise ValueError(
                    f"{foreign[0]} is of other versions than this run, so that nothing follows from both together."
                )
            first.results += [result for other in others for result in other.results]
            ran = {result.test for result in first.results}
            first.results += [
                result for test, result in held_in(parts[0].before).items() if test not in ran
            ]
            # Each part left out the others' laws.
            first.num_deselected = 0 if is_whole else first.num_deselected
            paths = [folder / f"{name}.json"]
            paths[0].write_text(to_json(first))
        found += paths
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 where a run failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance_report", description=__doc__)
    parser.add_argument("--engines", default="fsdp,megatron", help="by entry point, with commas")
    parser.add_argument("--only", default="", help="ENGINE:LAYOUT, with commas; default: all")
    parser.add_argument("--ranks-at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--gpus", default="", help="such as 0,1,2,3; default: on the CPU")
    parser.add_argument("--limit", type=float, help="seconds; default: none")
    parser.add_argument(
        "--continues", type=Path, help="the folder of an earlier run; default: none"
    )
    parser.add_argument("--out", type=Path, required=True, help="an empty or new folder")
    parser.add_argument(
        "--compute",
        choices=("fp32", "bf16"),
        default="fp32",
        help="what engines compute in; default fp32",
    )
    parser.add_argument("kit", nargs="*", help="for every run of the kit")
    chosen = parser.parse_args(arguments)
    if chosen.out.exists() and any(chosen.out.iterdir()):
        parser.error(f"{chosen.out} is not empty: nothing is overwritten, name a new folder.")
    chosen.out.mkdir(parents=True, exist_ok=True)
    wanted = set(filter(None, chosen.only.split(",")))
    runs = [run for engine in chosen.engines.split(",") for run in runs_of(engine)]
    if unknown := wanted - {f"{run.engine}:{run.layout.name}" for run in runs}:
        parser.error(f"--only names {', '.join(sorted(unknown))}, which the engines do not offer.")
    runs = [run for run in runs if not wanted or f"{run.engine}:{run.layout.name}" in wanted]
    if chosen.gpus:
        try:
            runs = on_gpus(runs, chosen.gpus.split(","))
        except ValueError as error:
            parser.error(str(error))
    if chosen.continues:
        runs = begun_in(chosen.continues, runs)
    deadline = None if chosen.limit is None else time.monotonic() + chosen.limit
    room = Room(chosen.ranks_at_once)
    # The widest first: otherwise a run of four ranks would wait at the end, alone.
    order = sorted(runs, key=lambda run: -run.layout.world_size)
    with ThreadPoolExecutor(max_workers=len(order)) as pool:
        extra = ["--compute", chosen.compute, *chosen.kit]
        codes = list(
            pool.map(
                lambda run: hold(run, room=room, folder=chosen.out, extra=extra, deadline=deadline),
                order,
            )
        )
    # 5: nothing was left to run.
    ended = (
        ()
        if chosen.kit
        else (run.name for run, code in zip(order, codes, strict=True) if code in (0, 1, 5))
    )
    found = join_parts(chosen.out, runs, finished=set(ended))
    report = [sys.executable, "-m", "temper_engine_api.conformance.report", *map(str, found)]
    if found:
        codes.append(
            subprocess.run(
                [*report, "--report", str(chosen.out / "report.md")], check=False
            ).returncode
        )
    return int(any(code not in (0, 5) for code in codes))


if __name__ == "__main__":
    sys.exit(main())
