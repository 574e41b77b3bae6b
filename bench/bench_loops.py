"""Compare the throughput of the sync, one-step-off and async loops on the same work.

    OMP_NUM_THREADS=1 python bench/bench_loops.py [--steps 12] [--rollout-python PYTHON]
        [--json FILE]
    python bench/bench_loops.py --turns [--rollouts 128]

Uses the quickstart's model and problems, with sampler and actor in separate Ray processes. Each
loop is a `temper-train` run, whose first two steps are skipped. Sampling ahead can save at most
the shorter of sampling and training, if each has a core; the table also shows its cost, staleness.
With --rollout-python the sampler is a vLLM server of that interpreter, otherwise the transformers
sampler.

`--turns` compares rollouts of eight turns that take turns together, as with the transformers
sampler, and concurrent ones, as with vLLM. A completion takes DECODE_S, and a tool a log-normal
time with the median TOOL_S. The ideal is the time of the slowest rollout alone.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment.protocol import Observation
from temper_trainer.loops.multi_turn import RolloutLimits, run_conversations
from temper_trainer.rollout.scripted_sampler import ScriptedSampler
from temper_trainer.types import Completion, Prompt, SamplingRequest

LOOPS = {
    "sync": ("loop=sync",),
    "one_step_off": ("loop=one_step_off",),
    "async, 1": ("loop=async", "asynchrony.max_staleness=1"),
    "async, 3": ("loop=async", "asynchrony.max_staleness=3"),
}
WORK = (
    "experiment=quickstart",
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.table_every=0",
    "run.progress=false",
    "runtime.kind=ray",
    "runtime.cpus_per_worker=1",
    "rollout.pool=rollout",
    # An untrained policy solves no problem, so every group would have zero advantage and be left
    # out of the update. The entropy term keeps these groups in.
    "algorithm.entropy_coef=1e-6",
)
COLUMNS = (
    "time/step_s",
    "time/rollout_s",
    "time/wait_s",
    "time/update_s",
    "time/weight_sync_s",
    "staleness/mean",
)


NUM_TURNS = 8
DECODE_S, TOOL_S, TOOL_SIGMA = 0.05, 0.05, 1.0
"""Seconds of a completion, median seconds of a tool, and the deviation of their logarithm."""


class TimedSampler(ScriptedSampler):
    """A sampler that takes DECODE_S for all requests of a call, however many they are."""

    def __init__(self, *, is_concurrent: bool) -> None:
        super().__init__(lambda request: [1], end_token_id=0)
        self._is_concurrent = is_concurrent

    @property
    def is_concurrent(self) -> bool:
        """True if rollouts do not take turns together."""
        return self._is_concurrent

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Return one token per request after DECODE_S."""
        time.sleep(DECODE_S)
        return super().sample(requests)


class TimedTool:
    """An environment whose answers take given times."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = iter(seconds)

    def reset(self, prompt: Prompt) -> None:
        """Do nothing; the times are those of one rollout."""

    def step(self, tokens: Sequence[int]) -> Observation:
        """Answer nothing after the next time."""
        time.sleep(next(self._seconds))
        return Observation()


def measure_turns(*, num_rollouts: int) -> None:
    """Print the seconds of both ways to run turns, and their ratio to the ideal."""
    draw = random.Random(0)
    times = [
        [draw.lognormvariate(0.0, TOOL_SIGMA) * TOOL_S for _ in range(NUM_TURNS)]
        for _ in range(num_rollouts)
    ]
    prompts = [Prompt(prompt_id=i, text="", tokens=(1,), answer="") for i in range(num_rollouts)]
    requests = [
        SamplingRequest(
            request_id=i, prompt_tokens=(1,), sampling=SamplingConfig(max_tokens=1), seed=i
        )
        for i in range(num_rollouts)
    ]
    ideal = max(sum(seconds) for seconds in times) + NUM_TURNS * DECODE_S
    print(f"| {num_rollouts} rollouts of {NUM_TURNS} turns | seconds | / ideal |\n|---|---|---|")
    print(f"| ideal: the slowest rollout alone | {ideal:.2f} | 1 |")
    for name, is_concurrent in (("turns together", False), ("concurrent", True)):
        tools = iter(times)
        begin = time.perf_counter()
        run_conversations(
            TimedSampler(is_concurrent=is_concurrent),
            requests,
            prompts=prompts,
            make_environment=lambda tools=tools: TimedTool(next(tools)),  # type: ignore[misc]
            limits=RolloutLimits(max_turns=NUM_TURNS, max_tokens=1000, stop="="),
            max_concurrent=num_rollouts,
        )
        seconds = time.perf_counter() - begin
        print(f"| {name} | {seconds:.2f} | {seconds / ideal:.2f} |")


def list_overrides(settings: Sequence[str], *, steps: int, folder: Path) -> list[str]:
    """Return the overrides of one loop's run."""
    return [*WORK, *settings, f"run.total_steps={steps}", f"run.dir={folder}"]


def sampler_settings(rollout_python: str | None) -> list[str]:
    """Return the overrides for a vLLM server, or none for the transformers sampler."""
    if rollout_python is None:
        return []
    server = [
        "rollout=vllm",
        f"runtime.rollout_python={rollout_python}",
        "rollout.vllm.enforce_eager=true",
    ]
    return [*server, "rollout.vllm.kv_cache_bytes=67108864", "rollout.max_concurrent=64"]


def run_loop(settings: list[str], *, steps: int, folder: Path) -> list[dict[str, float]]:
    """Run a training and return its metrics without the first two steps."""
    command = [
        sys.executable,
        "-m",
        "temper_trainer",
        *list_overrides(settings, steps=steps, folder=folder),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(settings)} exited with status {done.returncode}:\n"
            f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == "rl"][2:]


def main() -> None:
    """Print the table, and write it to the JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rollout-python")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", action="store_true", help="compare ways to run turns instead")
    parser.add_argument("--rollouts", type=int, default=128)
    chosen = parser.parse_args()
    if chosen.turns:
        measure_turns(num_rollouts=chosen.rollouts)
        return
    sampler = sampler_settings(chosen.rollout_python)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, settings) in enumerate(LOOPS.items()):
            rows = run_loop(
                [*sampler, *settings], steps=chosen.steps, folder=Path(folder) / f"loop_{i}"
            )
            medians = {
                column: statistics.median(row.get(column, 0.0) for row in rows)
                for column in COLUMNS
            }
            tokens = sum(row["rollout/tokens"] for row in rows)
            results[name] = {
                **medians,
                "tokens_per_s": tokens / sum(row["time/step_s"] for row in rows),
            }
    print(
        "| loop | tokens/s | / sync | "
        + " | ".join(COLUMNS)
        + " |\n|"
        + "---|" * (len(COLUMNS) + 3)
    )
    for name, numbers in results.items():
        ratio = numbers["tokens_per_s"] / results["sync"]["tokens_per_s"]
        cells = [
            f"{numbers['tokens_per_s']:.0f}",
            f"{ratio:.2f}",
            *(f"{numbers[column]:.3f}" for column in COLUMNS),
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
