"""Disturb training runs at random, continue them, and keep a table of the results.

    python -m tools.fault_campaign [--cases 60] [--loop-cases 40] [--ray-cases 4]
        [--vllm-cases 4] [--seed 0] [--jobs 2] [--restart]

A case is a seed: `packages/trainer/tests/loops/faults_for_tests.py` draws its faults and settings
and runs it. Results are stored in .temper/fault_campaign.json after each case; later calls at the
same commit run only the missing cases. The table is docs/records/fault_campaign.md; what follows
the line `<!-- earlier campaigns -->` there is kept. Cases on vLLM are skipped unless vLLM is
installed here, or in the environment whose interpreter TEMPER_ROLLOUT_PYTHON names.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from tools.release_records import git

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".temper" / "fault_campaign.json"
RUNS = ROOT / ".temper" / "fault_campaign"
REPORT = ROOT / "docs" / "records" / "fault_campaign.md"
FIRST_RAY_SEED, FIRST_VLLM_SEED, FIRST_LOOP_SEED = 10_000, 20_000, 30_000
FIRST_ASYNC_VLLM_SEED = 40_000
"""First seeds whose cases run on Ray, on a vLLM server, with another loop, and with loop async on a
vLLM server, as in PROGRAM."""
EARLIER = "<!-- earlier campaigns -->"
"""Line of the report below which it is written by hand."""
PROGRAM = ROOT / "packages" / "trainer" / "tests" / "loops" / "faults_for_tests.py"

REPORT_HEAD = """\
# Training runs under random faults

Written by `nox -s faults`. Each case starts `temper-train` with `run.resume=auto` on a small
model, disturbs it, and repeats the same command until it ends by itself. Fault, time and settings
are drawn from the seed. A case passes if

* each restart repeats at most the steps logged since the last save: one with `save_every=1`, two
  with `save_every=2`, three with `save_every=2` in the background, and those of checkpoints that
  the case itself damaged,
* every logged number equals that of an undisturbed run bit for bit, except times, rates and memory,
* no process is left 10 s after a start has ended, and after the last start no file is left in
  shared memory, in the temporary folder, or of the lock,
* no other command was needed.

A cold case starts a new interpreter each time; the others fork one that has imported torch. Cases
from seed 10000 on run on Ray, and are compared with the undisturbed run in one process. Those from
seed 20000 on sample on a vLLM server, and are compared with an undisturbed run that does so, too.
There `mismatch/*` may differ by 1e-6, because vLLM's log-probs differ in their last bits between
two undisturbed runs, too.
Those from seed 30000 on have `loop=async` or `loop=one_step_off`, and those from seed 40000 on
`loop=async` on a vLLM server. A resumed run samples again what
it had sampled ahead, so its numbers are not compared: each step must be logged once, the staleness
must stay within 1, and the last checkpoint's position in the data must be that of all trained
prompts.
The second fault of a case belongs to its second start. It did not happen if one start was enough,
because the run survived the first fault or had ended before it.
"""

NO_VLLM = (
    "it was neither installed nor named by TEMPER_ROLLOUT_PYTHON; `nox -s vllm` makes an "
    "environment and runs these cases"
)

Row = Mapping[str, object]


@dataclass(slots=True, kw_only=True)
class Record:
    """Results at one commit, by seed."""

    commit: str
    rows: dict[int, Row] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, *, commit: str) -> "Record":
        """Return the stored record of this commit, or an empty one."""
        if not path.exists():
            return cls(commit=commit)
        stored = json.loads(path.read_text())
        if stored["commit"] != commit:
            return cls(commit=commit)
        return cls(commit=commit, rows={int(seed): row for seed, row in stored["rows"].items()})

    def save(self, path: Path) -> None:
        """Replace the file atomically, so that a killed campaign keeps the previous version."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(path)

    def table(self) -> str:
        """Return the part of the report on these cases as Markdown."""
        rows = [row for _, row in sorted(self.rows.items())]
        num_failed = sum(bool(row["problems"]) for row in rows)
        has_vllm = any(
            FIRST_VLLM_SEED <= seed < FIRST_LOOP_SEED or seed >= FIRST_ASYNC_VLLM_SEED
            for seed in self.rows
        )
        lines = [
            REPORT_HEAD,
            (
                f"{len(rows)} cases, {num_failed} failed. All ran at commit `{self.commit[:8]}`. "
                f"Last: {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores."
                + ("" if has_vllm else f" None ran on vLLM: {NO_VLLM}.")
            ),
            "",
            "| case | seed | fault | when | starts | steps repeated | equal | leftovers | result |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for number, row in enumerate(rows, start=1):
            cells = [
                number,
                row["seed"],
                row["fault"],
                row["when"],
                row["starts"],
                row["repeated"],
                {True: "yes", False: "no", None: "not compared"}[cast("bool | None", row["equal"])],
                _join(row["leftovers"]) or "none",
                _join(row["problems"]) or "passed",
            ]
            lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
        return "\n".join(lines) + "\n"


def write_report(record: Record, path: Path) -> None:
    """Write the table, and keep what the report says of earlier campaigns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _, marker, earlier = (path.read_text() if path.exists() else "").partition(EARLIER)
    path.write_text(f"{record.table()}\n{marker}{earlier}" if marker else record.table())


def has_vllm() -> bool:
    """Return True if a server can be started."""
    return "TEMPER_ROLLOUT_PYTHON" in os.environ or importlib.util.find_spec("vllm") is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing cases; return 1 if any case failed at this commit, else 0."""
    parser = argparse.ArgumentParser(prog="tools.fault_campaign", description=__doc__)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument(
        "--loop-cases", type=int, default=40, help="cases with loop async or one_step_off"
    )
    parser.add_argument("--ray-cases", type=int, default=4, help="cases on Ray, in addition")
    parser.add_argument(
        "--vllm-cases",
        type=int,
        default=4,
        help="cases on a vLLM server, in addition, and as many with loop async",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first case in one process")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument(
        "--restart", action="store_true", help="discard the stored cases of this commit"
    )
    chosen = parser.parse_args(arguments)
    commit = git(ROOT, "rev-parse", "HEAD").strip()
    record = Record(commit=commit) if chosen.restart else Record.load(STATE, commit=commit)
    num_vllm_cases = chosen.vllm_cases if has_vllm() else 0
    if num_vllm_cases < chosen.vllm_cases:
        print(f"{chosen.vllm_cases} cases on vLLM are skipped: {NO_VLLM}.")
    requested = (
        *range(chosen.seed, chosen.seed + chosen.cases),
        *range(FIRST_RAY_SEED, FIRST_RAY_SEED + chosen.ray_cases),
        *range(FIRST_VLLM_SEED, FIRST_VLLM_SEED + num_vllm_cases),
        *range(FIRST_LOOP_SEED, FIRST_LOOP_SEED + chosen.loop_cases),
        *range(FIRST_ASYNC_VLLM_SEED, FIRST_ASYNC_VLLM_SEED + num_vllm_cases),
    )
    missing = [seed for seed in requested if seed not in record.rows]
    lock = threading.Lock()
    exit_codes: list[int] = []

    def run_seeds(seeds: Sequence[int]) -> None:
        listed = ",".join(map(str, seeds))
        command = [sys.executable, str(PROGRAM), "--folder", str(RUNS), "--seeds", listed]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            for line in process.stdout:
                row: Row = json.loads(line)
                with lock:
                    record.rows[int(str(row["seed"]))] = row
                    record.save(STATE)
                    write_report(record, REPORT)
                result = _join(row["problems"]) or "passed"
                print(f"{row['seed']}: {row['fault']}, {row['when']}: {result}", flush=True)
        exit_codes.append(process.returncode)

    # Each job takes every n-th case, so that all jobs get every kind of fault.
    seeds_by_job = [seeds for job in range(chosen.jobs) if (seeds := missing[job :: chosen.jobs])]
    threads = [threading.Thread(target=run_seeds, args=(seeds,)) for seeds in seeds_by_job]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = sorted(seed for seed, row in record.rows.items() if row["problems"])
    print(
        f"{len(record.rows)} cases, {len(failed)} failed: {failed}; "
        f"the folders of failed cases are in {RUNS}"
    )
    # A thread that raised has added no exit code.
    return 1 if failed or any(exit_codes) or len(exit_codes) < len(seeds_by_job) else 0


def _join(values: object) -> str:
    assert isinstance(values, list)
    return "; ".join(str(value) for value in values)


if __name__ == "__main__":
    sys.exit(main())
