"""Test whether the conformance kit detects changes of FSDPEngine's arithmetic.

    python -m tools.mutation draw                      # needs cosmic-ray; rewrites the sample
    python -m tools.mutation run --out FOLDER [--workers 14] [--budget-s 560]
    python -m tools.mutation page STATE [STATE ...]    # rewrites docs/records/mutation.md
    python -m tools.mutation locate                    # after a change of the engine

A mutant is the engine with one changed operator, comparison, condition or number, as cosmic-ray
makes it. `draw` samples mutants with a fixed seed and keeps them in tools/mutation_sample.json.
`locate` needs no cosmic-ray: it finds the same mutants at their new lines, and on the page those in
changed functions count as unfinished.
`run` needs no cosmic-ray: it puts one mutant at a time into a copy of the engine, and runs the kit
on it until the first failure. The state of the run is in FOLDER/mutation.json after each session of
the kit, so that a later call, also on another machine, continues there. After a complete run, a
later call begins again. `nox -s mutation` does all three. `tools/mutation_equivalents.toml` lists
mutants that need not be detected, with the reasons.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.mutation.draw import NUM_MUTANTS, SEED, draw_sample
from tools.mutation.mutation_page import RECORD, write_page
from tools.mutation.run import run_sample
from tools.mutation.sample import locate_sample, read_sample, write_sample
from tools.mutation.sessions import SOURCES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw", help="sample mutants from the current sources")
    running = commands.add_parser("run", help="run the kit on the sampled mutants")
    running.add_argument("--out", type=Path, required=True, help="folder of the state")
    running.add_argument("--workers", type=int, default=2, help="mutants at a time; default 2")
    running.add_argument("--budget-s", type=float, default=24 * 3600.0, help="time limit")
    running.add_argument("--continue-from", type=Path, nargs="*", default=[], metavar="JSON")
    running.add_argument("--only", nargs="*", default=[], metavar="ID", help="mutants to run")
    running.add_argument("--cuda", action="store_true", help="also run survivors on a GPU")
    running.add_argument(
        "--skip-original", action="store_true", help="do not run the unchanged engine"
    )
    page = commands.add_parser("page", help="rewrite the page; fail if too few are detected")
    page.add_argument("states", type=Path, nargs="+", metavar="STATE", help="files of `run`")
    commands.add_parser("locate", help="find the mutants' lines again, and rewrite the page")
    chosen = parser.parse_args(arguments)
    if chosen.command == "page":
        return write_page(chosen.states)
    if chosen.command == "locate":
        write_sample(locate_sample(read_sample()))
        return write_page([RECORD])
    if chosen.command == "draw":
        write_sample(draw_sample(SOURCES, seed=SEED, num_mutants=NUM_MUTANTS))
        return 0
    return run_sample(chosen)


if __name__ == "__main__":
    sys.exit(main())
