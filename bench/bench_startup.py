"""Measure how long temper-migrate and temper-train take to print their help.

    python bench/bench_startup.py [--repeats 10] [--json FILE]

Reports wall-clock and CPU seconds of the complete process for the best repeat. The first run of
each command is discarded, because it fills the page cache. The exit status is 1 if the CPU
time of a command exceeds its limit.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LIMITS_S = {"temper-migrate": 0.3, "temper-train": 1.0}
"""Limits of the CPU time. The wall-clock time depends on other programs on the host."""
MODULES = {"temper-migrate": "temper_legacy_shim", "temper-train": "temper_trainer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The best run of one command."""

    command: str
    wall_s: float
    cpu_s: float
    """User and system time of the process."""
    limit_s: float


def measure(command: str, *, repeats: int) -> Start:
    """Run `command --help` once to fill the page cache, then `repeats` times."""
    runs = [_run([sys.executable, "-m", MODULES[command], "--help"]) for _ in range(repeats + 1)][
        1:
    ]
    return Start(
        command=command,
        wall_s=min(wall for wall, _ in runs),
        cpu_s=min(cpu for _, cpu in runs),
        limit_s=LIMITS_S[command],
    )


def _run(command: list[str]) -> tuple[float, float]:
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    # wait4 returns the CPU time of only this child.
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    # wait4 has reaped the process, so Popen cannot get the exit status itself.
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with exit status {process.returncode}")
    return wall_s, usage.ru_utime + usage.ru_stime


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    starts = [measure(command, repeats=chosen.repeats) for command in MODULES]
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f} before, "
        f"best of {chosen.repeats}\n"
    )
    print("| command | wall | CPU | limit of CPU |\n|---|---|---|---|")
    for start in starts:
        print(
            f"| `{start.command} --help` | {start.wall_s:.2f} s | {start.cpu_s:.2f} s "
            f"| {start.limit_s:.1f} s |"
        )
    if chosen.json:
        chosen.json.write_text(
            json.dumps({"load": load, "starts": [asdict(start) for start in starts]}, indent=1)
            + "\n"
        )
    return int(any(start.cpu_s > start.limit_s for start in starts))


if __name__ == "__main__":
    sys.exit(main())
