"""Compare one optimizer update on the CPU: FSDPEngine, a hand-written loop, verl, Trainer and TRL.

    python bench/bench_update.py [--ranks 1,2] [--updates 5] [--repeats 2] [--json FILE]
        [--only NAME]

All contenders have the same model, sequences, optimizer and precision, and run in separate
processes. First losses are checked to be equal up to bf16 rounding if the batches are the same.
Only real tokens count, not padding. Reports tokens per CPU-second with one thread on one rank, and
tokens per second on two ranks (gloo). Contenders that cannot be imported are named.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch
from update_contenders import ONE_RANK, SEVERAL_RANKS
from update_workload import IS_BF16, write_model

LOSS_TOLERANCE = 2e-2
"""Relative tolerance of the loss (about 9) between bf16 forward passes."""
Row = dict[str, float | list[float]]


def measure(name: str, options: argparse.Namespace) -> None:
    """Run one rank of a contender; rank 0 prints the result."""
    torch.set_num_threads(1)
    # Selects oneDNN's kernels for all contenders; the engine selects them by itself.
    torch.set_float32_matmul_precision("medium")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    contenders = ONE_RANK if world_size == 1 else SEVERAL_RANKS
    timing = contenders[name](options.model, options.updates)
    if os.environ.get("RANK", "0") == "0":
        print("MEASURED " + json.dumps(timing.summary()), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_in_subprocesses(
    name: str, options: argparse.Namespace, *, ranks: int, model: Path
) -> Row | str:
    """Run a contender in fresh processes; return the reason if it cannot be imported."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        # The model is local: no contender may look for updates on the Hub.
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONWARNINGS="ignore",
    )
    command = [
        sys.executable,
        __file__,
        "--contender",
        name,
        "--model",
        str(model),
        "--updates",
        str(options.updates),
    ]
    running = []
    rendezvous = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for rank in range(ranks):
        rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), **rendezvous}
        running.append(
            subprocess.Popen(
                command,
                env=environment | (rank_variables if ranks > 1 else {}),
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
        )
    out, err = running[0].communicate()
    codes = [process.wait() for process in running]
    if any(codes):
        last = err.strip().splitlines()[-1] if err.strip() else f"exit status {codes}"
        if "ModuleNotFoundError" in last or "ImportError" in last:
            return f"not installed ({last})"
        raise RuntimeError(f"{name} on {ranks} ranks failed:\n{err}")
    row: Row = json.loads(
        next(line for line in out.splitlines() if line.startswith("MEASURED ")).removeprefix(
            "MEASURED "
        )
    )
    return row


def select_best(rows: list[Row]) -> Row:
    """Return the fastest repeat, because other load on the host only slows repeats down."""
    return max(rows, key=lambda row: row["tokens_per_cpu_s"])


def check_equal(rows: dict[str, Row]) -> None:
    """Check that contenders with the same batches start with the same loss."""
    expected = rows["hand loop"]["losses"]
    for name, row in rows.items():
        losses = row["losses"]
        assert isinstance(losses, list)
        assert isinstance(expected, list)
        if losses and abs(losses[0] - expected[0]) > LOSS_TOLERANCE * expected[0]:
            raise AssertionError(
                f"{name} starts with loss {losses[0]}, expected {expected[0]} as in the "
                "hand-written loop: the contenders do not compute the same"
            )


def report(options: argparse.Namespace) -> dict[str, object]:
    """Run all contenders, print the tables, and return the contents of the JSON file."""
    results: dict[str, dict[str, Row | str]] = {}
    print(
        f"compute: {'bf16' if IS_BF16 else 'fp32, because this processor lacks bf16 instructions'}"
    )
    with tempfile.TemporaryDirectory(prefix="bench-update-") as folder:
        model = Path(folder) / "model"
        write_model(model)
        for ranks in options.ranks:
            contenders = ONE_RANK if ranks == 1 else SEVERAL_RANKS
            results_of_ranks: dict[str, Row | str] = {}
            names = [name for name in contenders if options.only in (None, name)]
            repeats_of: dict[str, list[Row]] = {name: [] for name in names}
            # Contenders take turns, so that a slow period of the host affects all of them.
            for _ in range(options.repeats):
                for name in names:
                    row = run_in_subprocesses(name, options, ranks=ranks, model=model)
                    if isinstance(row, str):
                        results_of_ranks[name] = row
                    else:
                        repeats_of[name].append(row)
            results_of_ranks |= {
                name: select_best(rows) for name, rows in repeats_of.items() if rows
            }
            measured = {
                name: row for name, row in results_of_ranks.items() if not isinstance(row, str)
            }
            print_table(results_of_ranks, ranks=ranks)
            if "hand loop" in measured:
                check_equal(measured)
            results[str(ranks)] = results_of_ranks
    machine = (
        f"{platform.machine()}, {platform.platform()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine,
        "compute": "bf16" if IS_BF16 else "fp32",
        "results": results,
    }


def print_table(rows: dict[str, Row | str], *, ranks: int) -> None:
    """Print throughputs, and Temper's relative to each contender."""
    unit = "tokens_per_cpu_s" if ranks == 1 else "tokens_per_s"
    temper_row = rows.get("temper")
    print(f"\n{ranks} rank{'s' if ranks > 1 else ''}")
    print(f"{'contender':<34}{unit:>18}{'temper is':>12}{'peak MiB':>10}{'first loss':>12}")
    for name, row in rows.items():
        if isinstance(row, str):
            print(f"{name:<34}{row}")
            continue
        losses = row["losses"]
        assert isinstance(losses, list)
        speedup = ""
        if isinstance(temper_row, dict):
            speedup = f"{temper_row[unit] / row[unit]:.2f}x"  # type: ignore[operator]
        first = f"{losses[0]:.4f}" if losses else "other"
        print(f"{name:<34}{row[unit]:>18.0f}{speedup:>12}{row['peak_mib']:>10.0f}{first:>12}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2]
    )
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=list(ONE_RANK))
    parser.add_argument("--contender", choices=list(ONE_RANK), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender is not None:
        measure(options.contender, options)
        return
    results = report(options)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
