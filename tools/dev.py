"""Run the quickstart (`python3 tools/dev.py train`) or all checks (`python3 tools/dev.py test`).

Needs only Python and pip. The first call creates an environment in the ignored folder .temper/env.
"""

import sys

OLDEST_PYTHON = (3, 11)

# Before any other import: an older Python would stop at newer syntax with a SyntaxError instead of
# this sentence.
if sys.version_info < OLDEST_PYTHON:
    sys.exit(
        "Temper needs Python %d.%d or newer, and this is Python %d.%d: call tools/dev.py "
        "with a newer one, for example python3.12 tools/dev.py test."
        % (OLDEST_PYTHON + sys.version_info[:2])
    )

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that `tools` is a package here as well as under pytest and nox

from tools.environment import EnvironmentSetupError, ensure_environment
from tools.git_changes import ChangesError, find_changes
from tools.steps import STEP_NAMES, run_steps

QUICKSTART = ("experiment=quickstart",)
"""Overrides of `temper-train` that select the small run of `dev.py train`."""


def choose_run_dir(root: Path) -> str:
    """Return an override that sets a new run folder: runs/quickstart, or runs/quickstart-N."""
    number = 1
    while (name := f"runs/quickstart-{number}" if number > 1 else "runs/quickstart") and (
        root / name
    ).exists():
        number += 1
    return f"run.dir={name}"


def train(overrides: Sequence[str]) -> int:
    """Replace this process by the quickstart run, which then handles Ctrl-C and exits."""
    python = ensure_environment(ROOT)
    has_folder = any(
        override.startswith(("run.dir=", "run.resume=", "-")) for override in overrides
    )
    run_dir = [] if has_folder else [choose_run_dir(Path.cwd())]
    command = [str(python), "-m", "temper_trainer", *QUICKSTART, *run_dir, *overrides]
    print("dev: " + " ".join(["python", *command[1:]]), flush=True)
    os.execv(command[0], command)


def run_changed(*, base: str | None) -> int:
    """Replace this process by one of the environment, which has the import graph's library."""
    find_changes(ROOT, base=base)  # fails before an environment is created for nothing
    python = ensure_environment(ROOT)
    command = [str(python), "-m", "tools.affected_tests", *(["--base", base] if base else [])]
    os.chdir(ROOT)
    os.execv(command[0], command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two commands; return the exit status."""
    parser = argparse.ArgumentParser(prog="tools/dev.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train_parser = commands.add_parser(
        "train",
        help="run a small GRPO training on the CPU; writes a model, metrics and a plot",
        usage="%(prog)s [overrides...]",
    )
    train_parser.add_argument(
        "overrides", nargs=argparse.REMAINDER, help="overrides for temper-train"
    )
    test_parser = commands.add_parser("test", help="run all checks that a pull request must pass")
    test_parser.add_argument(
        "--only", action="append", choices=STEP_NAMES, help="run only this step; may be repeated"
    )
    test_parser.add_argument(
        "--coverage",
        action="store_true",
        help="also print which percentage of each package the tests execute; takes longer",
    )
    test_parser.add_argument(
        "--changed",
        action="store_true",
        help="run only the tests that the changes since the merge base with main affect",
    )
    test_parser.add_argument(
        "--base", metavar="COMMIT", help="with --changed: compare with this commit instead"
    )
    chosen = parser.parse_args(arguments)
    if chosen.command == "test":
        if chosen.changed and (chosen.only or chosen.coverage):
            test_parser.error("--changed chooses the steps: leave out --only and --coverage")
        if chosen.base is not None and not chosen.changed:
            test_parser.error("--base needs --changed")
    try:
        if chosen.command == "train":
            return train(chosen.overrides)
        if chosen.changed:
            return run_changed(base=chosen.base)
        return run_steps(ROOT, only=chosen.only, with_coverage=chosen.coverage)
    except (ChangesError, EnvironmentSetupError) as error:
        print(f"dev: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dev: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
