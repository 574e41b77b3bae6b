"""Every layout of one or more engines held to the conformance kit, several at once, and one report of all.

    python -m tools.conformance_report --engines fsdp,megatron --ranks-at-once 16 --out FOLDER [--only fsdp:1-rank,megatron:tp2] [-- KIT...]

Writes what each run printed and found into FOLDER as soon as it ends, and `report.md` last. Arguments after -- go to every run of the kit.
Each rank computes on one thread.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from temper_engine_api.layout import Layout, plain_layout
from temper_engine_api.registry import conformance_layouts

PLAIN_SIZES = {"fsdp": (1, 2, 4), "megatron": (1, 2)}
"""World sizes of an engine's own defaults; (1, 2) for an engine that is not named here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One layout of one engine."""

    engine: str
    layout: Layout
    is_plain: bool
    """Whether it is asked for by world size rather than by name."""

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.engine}-{self.layout.name}"

    def command(self, findings: Path, extra: Sequence[str]) -> list[str]:
        """The kit's command line."""
        where = ("--world-sizes", str(self.layout.world_size)) if self.is_plain else ("--layouts", self.layout.name)
        kit = ("-m", "pytest", "-q", "--pyargs", "temper_engine_api.conformance", "--engine", self.engine)
        return [sys.executable, *kit, *where, "--findings", str(findings), "-p", "no:cacheprovider", *extra]


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
    plain = [Run(engine=engine, layout=plain_layout(size), is_plain=True) for size in PLAIN_SIZES.get(engine, (1, 2))]
    return plain + [Run(engine=engine, layout=layout, is_plain=False) for layout in conformance_layouts(engine)]


def hold(run: Run, *, room: Room, folder: Path, extra: Sequence[str]) -> int:
    """Run the kit on one layout; returns its exit status."""
    ranks = room.take(run.layout.world_size)
    try:
        started = time.monotonic()
        with (folder / f"{run.name}.log").open("w") as log:
            done = subprocess.run(
                run.command(folder / f"{run.name}.json", extra),
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
    finally:
        room.leave(ranks)
    last = (folder / f"{run.name}.log").read_text().rstrip().rpartition("\n")[2]
    print(f"{run.name}: exit {done.returncode}, {time.monotonic() - started:.0f} s, {last}", flush=True)
    return done.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 where a run failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance_report", description=__doc__)
    parser.add_argument("--engines", default="fsdp,megatron", help="by entry point, with commas")
    parser.add_argument("--only", default="", help="ENGINE:LAYOUT, with commas; default: all")
    parser.add_argument("--ranks-at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True, help="an empty or new folder")
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
    room = Room(chosen.ranks_at_once)
    # The widest first: otherwise a run of four ranks would wait at the end, alone.
    order = sorted(runs, key=lambda run: -run.layout.world_size)
    with ThreadPoolExecutor(max_workers=len(order)) as pool:
        codes = list(pool.map(lambda run: hold(run, room=room, folder=chosen.out, extra=chosen.kit), order))
    found = [path for run in runs if (path := chosen.out / f"{run.name}.json").exists()]
    report = [sys.executable, "-m", "temper_engine_api.conformance.side_by_side", *map(str, found)]
    if found:
        codes.append(subprocess.run([*report, "--report", str(chosen.out / "report.md")], check=False).returncode)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
