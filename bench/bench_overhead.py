"""Measure the trainer's CPU time per RL step, without sampler, engine and weight sync.

    OMP_NUM_THREADS=1 python bench/bench_overhead.py [--steps 12] [--json FILE]

Runs the quickstart's steps in one process. Calls of the sampler, passes and optimizer steps of the
engine, and weight sync (a copy of the model) are counted separately. The rest is the trainer:
prompts, decoding, rewards, samples, plan, packing, advantages, metrics and files. Reports CPU
seconds of all threads of the process, because other load on the host hardly changes them; torch
uses one thread.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from temper_engine_api.registry import load_engine_class
from temper_trainer.config_loading import load, write_resolved
from temper_trainer.loops import train
from temper_trainer.loops.rl_loop import StepLoop
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.types import Prompt
from temper_trainer.weight_sync.publisher import Publisher

WORK = (
    "experiment=quickstart",
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.table_every=0",
    "run.progress=false",
)
REWARD = "reward.function=bench_overhead:fraction_of_digits"
NUM_SKIPPED = 2
"""Number of first steps that are skipped because they include one-time costs."""


def fraction_of_digits(prompt: Prompt, completion_text: str, /) -> float:
    """Return the fraction of digits, which varies even for an untrained model."""
    return sum(character.isdigit() for character in completion_text) / max(len(completion_text), 1)


class Meter:
    """Counts CPU seconds by name; a call inside another counted call is not counted again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._is_inside = False

    def wrap(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a call so that its CPU time is counted."""

        def timed_call(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return call(*arguments, **named)
            self._is_inside = True
            begin = time.process_time()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin
                self._is_inside = False

        return timed_call

    def take(self) -> dict[str, float]:
        """Return the counts since the last call and reset them."""
        counted, self.seconds = self.seconds, {}
        return counted


def install_meter(meter: Meter, rows: list[dict[str, float]]) -> None:
    """Count the calls of the models, and add a row for each step when its metrics are logged."""
    engine: Any = load_engine_class("fsdp")
    for kind, name, method in (
        (HfSampler, "sampling", "sample"),
        (engine, "engine", "forward_backward_batch"),
        (engine, "engine", "optimizer_zero_grad"),
        (engine, "engine", "optimizer_step"),
        (Publisher, "weight sync", "publish"),
    ):
        setattr(kind, method, meter.wrap(getattr(kind, method), name))
    started = [0.0]
    step, log = StepLoop.run_step, RunLog.log_metrics

    def timed_step(*arguments: Any, **named: Any) -> Any:
        meter.take()
        started[0] = time.process_time()
        return step(*arguments, **named)

    def timed_log(*arguments: Any, **named: Any) -> None:
        log(*arguments, **named)
        if started[0] and named.get("phase") == "rl":
            total = time.process_time() - started[0]
            measured = meter.take()
            rows.append({**measured, "total": total, "trainer": total - sum(measured.values())})

    setattr(StepLoop, "run_step", timed_step)  # noqa: B010 - adds only the measurement
    setattr(RunLog, "log_metrics", timed_log)  # noqa: B010 - adds only the measurement


def main() -> None:
    """Print the table, and write it to the JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    meter = Meter()
    rows: list[dict[str, float]] = []
    install_meter(meter, rows)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load([*WORK, REWARD, f"run.total_steps={chosen.steps}", f"run.dir={folder}/run"])
        train(
            loaded.config,
            digest=loaded.digest,
            write_config=lambda run_folder: write_resolved(loaded, run_folder),
        )
    steady = rows[NUM_SKIPPED:]
    medians = {
        name: statistics.median(row.get(name, 0.0) for row in steady) * 1e3 for name in steady[0]
    }
    print(
        f"{len(steady)} steps of 32 prompts x 8 completions; {platform.machine()}, "
        f"torch {torch.__version__}"
    )
    print("| part | median CPU ms per step |\n|---|---|")
    for name, milliseconds in medians.items():
        print(f"| {name} | {milliseconds:.1f} |")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"median_ms": medians, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
