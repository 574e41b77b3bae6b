r"""Compare RL updates of language models: FSDPEngine, MegatronEngine, a plain loop and TRL.

    PYTHONPATH=packages/engine-api/src:packages/engine-fsdp/src:packages/engine-megatron/src:. \
        python -m tools.gpu.dense_models --out FOLDER \
        [--set one|two|four|experts|transformer-engine] [--rows NAME,...] [--done FILE]

Each row runs in its own processes on as many GPUs as it needs; rows run in parallel while GPUs are
free. Results are appended to FOLDER/rows.jsonl. The output of a row is in FOLDER/ROW.txt, with `-`
for `/`, and is appended to FOLDER/log.txt when the row ends. To continue an interrupted run, pass
`--done rows.jsonl`: rows that are `ok` in that file are skipped, and the table contains both. Rows
that do not fit into `--budget-s` are skipped and named.
Needs torch with CUDA, transformers and blake3; `megatron` rows need megatron-core, megatron-bridge
and omegaconf, with `te` also transformer-engine, `trl` rows TRL and datasets, FSDPEngine's
`rowwise` and `tensorwise` rows torchao. `--rehearse` runs on a CPU at a tiny size.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
import transformers

from tools.gpu.dense_jobs import Row
from tools.gpu.engine_fsdp import write_entry_points
from tools.gpu.workload import Rows

ONE_GPU = (
    "1.7B/16k/engine",
    "0.6B/16k/engine",
    "1.7B/16k/engine+cudnn",
    "0.6B/16k/engine+cudnn",
    "1.7B/16k/trl",
    "0.6B/16k/trl",
    "1.7B/16k/attention",
    "4B/16k/engine+chunked+cudnn",
    "4B/16k/trl",
    "1.7B/16k/plain",
    "0.6B/16k/plain",
    "1.7B/16k/megatron",
    "0.6B/16k/megatron",
    "4B/16k/engine+recompute",
    "0.6B/64k/engine+cudnn",
    "0.6B/64k/engine",
    "0.6B/64k/trl",
    "1.7B/64k/engine+recompute+cudnn",
    "1.7B/64k/engine+recompute",
    "1.7B/4k/engine+cudnn",
    "1.7B/4k/engine",
    "1.7B/4k/trl",
    "0.6B/4k/trl",
    "1.7B/mix/engine",
    "1.7B/mix/engine+cudnn",
    "1.7B/mix/trl",
    "8B-half/8k/engine+profile",
    "4B/16k/plain+recompute",
    "4B/16k/megatron+recompute",
    "4B/64k/engine+recompute+chunked+cudnn",
    "0.6B/4k/engine+cudnn",
    "4B/4k/engine+chunked+cudnn",
    "8B-half/8k/engine+cudnn",
    "1.7B/mix/plain",
    "1.7B/mix/megatron",
    "1.7B/16k/trl+kept",
    "1.7B/64k/trl",
    "4B/4k/trl",
    "4B/64k/trl",
    "1.7B/4k/plain",
    "0.6B/4k/plain",
    "4B/4k/plain+recompute",
    "0.6B/64k/plain",
    "1.7B/64k/plain+recompute",
    "1.7B/4k/megatron",
    "0.6B/4k/megatron",
    "4B/4k/megatron+recompute",
    "1.7B/64k/megatron+recompute",
    "0.6B/64k/megatron+recompute",
    "4B/64k/megatron+recompute",
    "4B/64k/plain+recompute",
    "4B/64k/engine+recompute",
)
"""Rows on one GPU, most important first."""
TWO_GPUS = (
    "8B/8k/engine+reshard+cudnn",
    "8B/8k/engine+reshard+cudnn+rowwise",
    "8B/8k/engine+reshard+cudnn+tensorwise",
    "8B/8k/plain+reshard",
    "8B/8k/megatron+tp2-sp",
    "8B/8k/megatron+pp2",
    "8B/8k/megatron+dp2-distopt+recompute",
    "8B/8k/engine+reshard+cudnn+profile+export+checkpoint",
    "8B/8k/engine+reshard",
    "8B/8kx2/engine+recompute+cudnn",
)
"""Rows on two GPUs, most important first."""
TRANSFORMER_ENGINE = (
    "8B-half/8k/megatron",
    "8B-half/8k/megatron+te",
    "8B-half/8k/megatron+te+tensorwise",
    "8B-half/8k/megatron+te+blockwise",
    "8B-half/8k/engine+cudnn",
    "8B-half/8k/engine+cudnn+tensorwise",
    "8B-half/8k/engine+cudnn+rowwise",
    "8B-half/8k/megatron+te+recompute",
    "8B-half/8k/megatron+te+tensorwise+recompute",
)
"""Rows of TransformerEngine's layers and float8 on one GPU, most important first."""
FOUR_GPUS = (
    "8B/8k/engine+reshard+recompute+cudnn+x4",
    "8B/8k/engine+reshard+recompute+cudnn+rowwise+x4",
    "8B/8k/engine+reshard+recompute+cudnn+tensorwise+x4",
    "8B/8k/engine+reshard+recompute+x4",
    "8B/8k/plain+reshard+recompute+x4",
    "8B/8k/megatron+tp2-sp+dp2-distopt+x4",
    "8B/8k/megatron+tp2-pp2+x4",
    "8B/8k/megatron+tp2-pp2+recompute+x4",
    "8B/8k/engine+reshard+recompute+x4+export",
    "8B/8k/engine+reshard+recompute+x4+checkpoint",
)
"""Rows on four GPUs with 80 GB each, most important first."""
EXPERTS = (
    "30B-A3B-12L/16k/engine+reshard+recompute+x4",
    "30B-A3B-4L/16k/engine",
    "30B-A3B-4L/16k/megatron",
    "30B-A3B-4L/16k/plain",
    "30B-A3B-4L/16k/megatron+sequential",
    "30B-A3B-4L/16k/engine+eager",
    "30B-A3B-12L/16k/engine+ep+recompute+x4",
    "30B-A3B-12L/16k/megatron+recompute+ep4+x4",
    "30B-A3B-12L/16k/plain+reshard+recompute+x4",
    "30B-A3B-4L/16k/engine+ep+x2",
    "30B-A3B-4L/16k/engine+reshard+x2",
    "30B-A3B-4L/16k/megatron+ep2+x2",
    "30B-A3B-4L/4k/engine",
    "30B-A3B-4L/4k/megatron",
    "30B-A3B-4L/4k/plain",
    "30B-A3B-4L/16k/trl",
    "30B-A3B-4L/4k/trl",
)
"""Rows of mixtures of experts on one, two and four GPUs with 80 GB each, most important first."""
SETS: Mapping[str, Sequence[str]] = {
    "one": ONE_GPU,
    "two": TWO_GPUS,
    "four": FOUR_GPUS,
    "experts": EXPERTS,
    "transformer-engine": TRANSFORMER_ENGINE,
}
LIMIT_S = 240.0
"""Time limit of one row, in seconds."""
SHORTEST_S = 30.0
"""Seconds that must be left to start a row."""


@dataclass(slots=True, kw_only=True)
class RunningRow:
    """The processes of one row and their captured output."""

    row: Row
    gpus: Sequence[int]
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]
    started: float = field(default_factory=time.monotonic)


def count_gpus(row: Row) -> int:
    """Return the number of GPUs that a row runs on."""
    if "x4" in row.options:
        return 4
    if "x2" in row.options:
        return 2
    return 2 if row.model == "8B" and row.contender != "attention" else 1


def name_gpus(gpus: Sequence[int]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for GPUs that this process numbers from 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)


def start_row(row: Row, gpus: Sequence[int], options: argparse.Namespace) -> RunningRow:
    """Start the processes of a row."""
    environment = os.environ | {"OMP_NUM_THREADS": "8", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(options.entry_points), os.environ.get("PYTHONPATH", "")]
    )
    if not options.rehearse:
        environment["CUDA_VISIBLE_DEVICES"] = name_gpus(gpus)
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if "tp2" in row.layout:
        # Megatron requires this with tensor parallelism, so that kernels start in launch order.
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    command = [sys.executable, "-m", "tools.gpu.dense_jobs", row.name]
    command += ["--rows", str(options.results.path), "--world-size", str(len(gpus))]
    command += ["--rehearse"] if options.rehearse else []
    if options.gpus == 1:
        command += ["--lock", str(options.out / "gpu.lock")]
    # A named file, so that what a row printed survives if this program is killed.
    path = options.out / f"{row.name.replace('/', '-')}.txt"
    output = path.open("w+b")
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    return RunningRow(row=row, gpus=gpus, process=process, output=output)


def finish_row(running: RunningRow, options: argparse.Namespace, *, is_late: bool) -> None:
    """Append a row's output to the log, and add a row with the reason if it failed."""
    if is_late:
        # The row was started as a new session, so this also kills its rank processes.
        os.killpg(running.process.pid, signal.SIGKILL)
    status = "killed" if is_late else running.process.wait()
    running.output.seek(0)
    output = running.output.read().decode(errors="replace")
    seconds = round(time.monotonic() - running.started, 1)
    with (options.out / "log.txt").open("a") as log:
        log.write(f"\n=== {running.row.name}: status {status}, {seconds} s\n{output[-60_000:]}\n")
    if status != 0:
        reason = "over its time limit" if is_late else " | ".join(output.strip().splitlines()[-2:])
        options.results.add(
            {
                "job": "failed",
                "name": running.row.name,
                "reason": reason[-400:],
                "wall_s": seconds,
                "ok": False,
            }
        )
    else:
        print(f"{running.row.name}: {seconds} s", flush=True)
    # Last, because a killed process with 200 GB of memory takes many seconds to end.
    running.process.wait()
    running.output.close()


def run_rows(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Run rows in parallel as far as GPUs and time allow."""
    deadline = time.monotonic() + options.budget_s
    waiting, running = list(rows), list[RunningRow]()
    # A single GPU gets two slots, so that the second row imports its modules while the first one
    # runs; `--lock` keeps them from measuring at the same time.
    free = list(range(options.gpus)) if options.gpus > 1 else [0, 0]
    while waiting or running:
        left_s = deadline - time.monotonic()
        if left_s < SHORTEST_S and waiting:
            for row in waiting:
                reason = "no time left in this part"
                options.results.add({"job": "skipped", "name": row.name, "reason": reason})
            waiting.clear()
        for row in list(waiting):
            if count_gpus(row) > min(len(free), options.gpus) or (
                waiting[0] is not row and options.in_order
            ):
                continue
            waiting.remove(row)
            count = count_gpus(row)
            assigned, free = free[:count], free[count:]
            running.append(start_row(row, assigned, options))
        time.sleep(0.2)
        for current in list(running):
            is_late = left_s < 2 or time.monotonic() - current.started > options.limit_s
            if is_late or current.process.poll() is not None:
                running.remove(current)
                free = sorted([*free, *current.gpus])
                finish_row(current, options, is_late=current.process.poll() is None)


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Format measured rows with ratios of their speed to other contenders, then all other rows."""
    measured = {str(r["name"]): r for r in rows if r.get("job") == "dense"}
    heads = ("row", "GPUs", "tok/s/GPU", "TFLOP/s", "of 989", "of GEMM", "GiB", "norm", "to")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, row in sorted(measured.items()):
        same = [other for other in measured if other.rsplit("/", 1)[0] == name.rsplit("/", 1)[0]]
        ratios = [
            f"{other.rsplit('/', 1)[1]} {_number(row) / _number(measured[other]):.2f}"
            for other in same
            if other != name
        ]
        keys = ("tokens_per_s", "tflops", "mfu_of_peak", "mfu_of_gemm", "peak_gib", "first_norm")
        cells = [name, row["gpus"], *(row[key] for key in keys), ", ".join(ratios)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [str(row) for row in rows if row.get("job") != "dense"]
    return "\n".join(lines)


def _number(row: Mapping[str, object]) -> float:
    value = row["tokens_per_s"]
    assert isinstance(value, int | float)
    return float(value)


def main() -> None:
    """Run the rows of a set, or the rows named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", choices=SETS, default="one", help="default: one")
    parser.add_argument("--rows", help="comma-separated names of rows, instead of a set")
    parser.add_argument("--done", type=Path, help="rows.jsonl of an interrupted run")
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="time limit of all rows; default: 540"
    )
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="time limit of a row; default: 240"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at a tiny size")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.results = Rows(path=options.out / "rows.jsonl")
    options.results.path.touch()
    options.gpus = 2 if options.rehearse else torch.cuda.device_count()
    options.in_order = options.set != "one"
    earlier = Rows(path=options.done).read() if options.done else []
    done = {row["name"] for row in earlier if row.get("ok")}
    names = options.rows.split(",") if options.rows else SETS[options.set]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    with tempfile.TemporaryDirectory(prefix="entry-points-") as folder:
        options.entry_points = Path(folder)
        write_entry_points(options.entry_points)
        run_rows([Row.parse(name) for name in names if name not in done], options)
    text = format_table([row for row in earlier if row.get("ok")] + options.results.read())
    (options.out / "table.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
