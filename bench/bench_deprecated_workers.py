"""Compare 20 updates through the deprecated workers with the engine path, from the same seed.

    python bench/bench_deprecated_workers.py [OUT.png]

Trains a tiny model on generated arithmetic four times: with the engine path and the deprecated
workers, each with one micro-batch per update and with several. Prints the differences, and plots
gradient norms and rewards if a file is given. Needs temper-legacy-shim[workers] and matplotlib.
"""

import argparse
import json
import tempfile
from pathlib import Path

import matplotlib as mpl

from temper_trainer.config_loading import load, write_resolved
from temper_trainer.loops import train
from temper_trainer.types import Prompt

STEPS = 20
BASE = (
    "experiment=quickstart",
    "actor.engine.model.architecture.hidden_size=32",
    "actor.engine.model.architecture.intermediate_size=64",
    "actor.engine.model.architecture.num_hidden_layers=2",
    "data.train.max_rows=512",
    "data.eval=null",
    "warm_start=null",
    "reward.function=bench_deprecated_workers:fraction_of_even_digits",
    "batching.prompts_per_step=8",
    "batching.num_mini_batches=2",
    "algorithm.group_size=8",
    "algorithm.aggregation=token_mean",
    f"run.total_steps={STEPS}",
    "run.table_every=0",
    "run.num_threads=1",
    "run.save_model=false",
    "run.progress=false",
    "run.trackers=[jsonl]",
)
SPLITS = {
    "one micro-batch": "batching.max_tokens=8192",
    "several micro-batches": "batching.max_tokens=512",
}
PATHS = {"engine path": "disable", "deprecated workers": "enable"}
PLOTTED = {"actor/grad_norm": "gradient norm", "reward/mean": "mean reward"}

Rows = list[dict[str, float]]


def fraction_of_even_digits(prompt: Prompt, completion: str) -> float:
    """Return the fraction of even digits, a reward that varies even for an untrained model."""
    del prompt
    return sum(digit in "02468" for digit in completion) / max(len(completion), 1)


def run(directory: Path, *overrides: str) -> Rows:
    """Run a training and return its metrics, one row per step of the RL phase."""
    loaded = load([*BASE, f"run.dir={directory}", *overrides])
    train(
        loaded.config,
        digest=loaded.digest,
        write_config=lambda folder: write_resolved(loaded, folder),
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == "rl" and row["step"] > 0]


def describe(new: Rows, old: Rows) -> str:
    """Describe how far two runs from equal weights differ at step 1, and at most."""
    differences = [
        abs(a["actor/grad_norm"] - b["actor/grad_norm"]) / a["actor/grad_norm"]
        for a, b in zip(new, old, strict=True)
    ]
    num_equal_steps = next(
        (
            i
            for i, (a, b) in enumerate(zip(new, old, strict=True))
            if a["rollout/tokens"] != b["rollout/tokens"]
        ),
        len(new),
    )
    return (
        f"relative difference of gradient norms: {differences[0]:.1e} at step 1, "
        f"at most {max(differences):.1e}; "
        f"completions of equal length for {num_equal_steps} steps"
    )


def plot(results: dict[str, dict[str, Rows]], path: Path) -> None:
    """Plot one column for each split and one row for each metric."""
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(PLOTTED), len(SPLITS), figsize=(10, 6), sharex=True, layout="constrained"
    )
    for column, split in enumerate(SPLITS):
        for row, (name, label) in enumerate(PLOTTED.items()):
            axis = axes[row][column]
            for (path_name, rows), style in zip(results[split].items(), ("-", "--"), strict=True):
                axis.plot(
                    [r["step"] for r in rows], [r[name] for r in rows], style, label=path_name
                )
            axis.set_ylabel(label)
        axes[0][column].set_title(split)
        axes[-1][column].set_xlabel("step")
    axes[0][0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the trainings, print the differences, and plot them if a file is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plot_file", type=Path, nargs="?")
    plot_file: Path | None = parser.parse_args().plot_file
    results: dict[str, dict[str, Rows]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for split, override in SPLITS.items():
            results[split] = {
                name: run(
                    Path(folder) / f"{split} {name}".replace(" ", "-"),
                    override,
                    f"use_legacy_worker_impl={word}",
                )
                for name, word in PATHS.items()
            }
            engine_rows, worker_rows = results[split].values()
            print(f"{split}: {describe(engine_rows, worker_rows)}", flush=True)
    if plot_file is not None:
        plot(results, plot_file)


if __name__ == "__main__":
    main()
