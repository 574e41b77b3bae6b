"""Compare how sequences are balanced over data-parallel ranks: Temper's plan and verl.

    python bench/bench_balance.py [--ranks 64] [--seeds 5] [--repeats 3] [--json FILE]

All contenders get the same sequences: log-normal lengths (median e^7, sigma 0.9, clipped to
[32, 16384]), where a sequence of l tokens costs 24576 l + l^2. Quality is the load of the busiest
rank divided by the lower bound max(mean load, longest sequence), for the worst seed; 1 is perfect,
and the excess is waiting time. CPU time is that of the fastest repeat. Contenders that cannot be
imported are named.
"""

import argparse
import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch

from temper_engine_api.balance import assign_to_ranks

SIZES = (1024, 102_400)
"""Numbers of sequences; multiples of 64, because verl's equal counts require that."""
LARGE = 10_000
"""Number of sequences from which a single seed and repeat are measured."""

Contender = Callable[[list[int], int], Sequence[Sequence[int]]]
"""Maps (cost of each sequence, number of ranks) to the sequences of each rank."""


def temper() -> Contender:
    """Return Temper's assignment, with conversion from and to plain lists."""

    def run(costs: list[int], num_ranks: int) -> Sequence[Sequence[int]]:
        sequences_by_rank: list[list[int]] = [[] for _ in range(num_ranks)]
        for i, rank in enumerate(
            assign_to_ranks(torch.tensor(costs), num_ranks=num_ranks).tolist()
        ):
            sequences_by_rank[rank].append(i)
        return sequences_by_rank

    return run


def verl_equal() -> Contender:
    """Return verl's default for data-parallel ranks: Karmarkar-Karp with equal counts per rank."""
    from verl.utils.seqlen_balancing import karmarkar_karp

    return lambda costs, num_ranks: karmarkar_karp(costs, num_ranks, equal_size=True)


def verl_free() -> Contender:
    """Return verl's Karmarkar-Karp without limits on the counts."""
    from verl.utils.seqlen_balancing import karmarkar_karp

    return lambda costs, num_ranks: karmarkar_karp(costs, num_ranks, equal_size=False)


def contiguous() -> Contender:
    """Return an assignment without balancing, which keeps neighbors together."""

    def run(costs: list[int], num_ranks: int) -> Sequence[Sequence[int]]:
        edges = [len(costs) * rank // num_ranks for rank in range(num_ranks + 1)]
        return [range(first, last) for first, last in pairwise(edges)]

    return run


MAKERS: dict[str, Callable[[], Contender]] = {
    "contiguous": contiguous,
    "verl equal counts": verl_equal,
    "verl free counts": verl_free,
    "temper": temper,
}


def draw_costs(num_sequences: int, *, seed: int) -> list[int]:
    """Draw the costs of log-normal sequences."""
    generator = random.Random(seed)
    lengths = (
        min(max(int(generator.lognormvariate(7.0, 0.9)), 32), 16384) for _ in range(num_sequences)
    )
    # The default cost model of `plan_mini_batch`.
    return [24576 * n + n * n for n in lengths]


def measure(
    contender: Contender, *, num_sequences: int, options: argparse.Namespace
) -> dict[str, float]:
    """Measure the worst quality over seeds, the best CPU time, and the range of counts."""
    seeds, repeats = (1, 1) if num_sequences >= LARGE else (options.seeds, options.repeats)
    seconds, over_bound, counts = [], [], []
    for seed in range(seeds):
        costs = draw_costs(num_sequences, seed=seed)
        for _ in range(repeats):
            start = time.process_time()
            sequences_by_rank = contender(costs, options.ranks)
            seconds.append(time.process_time() - start)
        # Every sequence must be assigned exactly once.
        assert sorted(i for sequences in sequences_by_rank for i in sequences) == list(
            range(num_sequences)
        )
        loads = [sum(costs[i] for i in sequences) for sequences in sequences_by_rank]
        over_bound.append(max(loads) / max(sum(costs) / options.ranks, *costs))
        counts += [len(sequences) for sequences in sequences_by_rank]
    return {
        "over_bound": max(over_bound),
        "cpu_ms": 1e3 * min(seconds),
        "fewest": min(counts),
        "most": max(counts),
    }


def report(options: argparse.Namespace) -> dict[str, object]:
    """Run all contenders, print the table, and return the contents of the JSON file."""
    # The other contenders are plain Python, which uses one thread.
    torch.set_num_threads(1)
    results: dict[int, dict[str, dict[str, float] | str]] = {}
    for num_sequences in SIZES:
        results[num_sequences] = {}
        print(f"\n{num_sequences} sequences over {options.ranks} ranks")
        print(f"{'contender':<20}{'max load / bound':>18}{'CPU ms':>12}{'sequences per rank':>22}")
        for name, make in MAKERS.items():
            if name == "verl free counts" and num_sequences >= LARGE:
                results[num_sequences][name] = (
                    f"skipped: needs {num_sequences} x {options.ranks} sets"
                )
                print(f"{name:<20}{results[num_sequences][name]}")
                continue
            try:
                contender = make()
            except ImportError as error:
                results[num_sequences][name] = f"not installed ({error})"
                print(f"{name:<20}not installed ({error})")
                continue
            row = results[num_sequences][name] = measure(
                contender, num_sequences=num_sequences, options=options
            )
            counts = f"{row['fewest']} to {row['most']}"
            print(f"{name:<20}{row['over_bound']:>18.4f}{row['cpu_ms']:>12.2f}{counts:>22}")
    versions = {name: version(name) for name in ("torch", "temper-engine-api")}
    machine = f"{platform.machine()}, {platform.platform()}, Python {platform.python_version()}"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine,
        "versions": versions,
        "options": vars(options),
        "results": results,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = report(options)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
