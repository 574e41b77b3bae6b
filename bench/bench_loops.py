"""Compare the throughput of the sync, one-step-off and async loops on the same work.

    OMP_NUM_THREADS=1 python bench/bench_loops.py [--steps 12] [--rollout-python PYTHON]
        [--long-tailed] [--loops "sync;async, 1"] [--json FILE]
    python bench/bench_loops.py --scripted [--json FILE]

Uses the quickstart's model and problems, with sampler and actor in separate Ray processes. Each
loop is a `temper-train` run, whose first two steps are skipped. Sampling ahead can save at most
the shorter of sampling and training, if each has a core; the table also shows its cost, staleness.
With --rollout-python the sampler is a vLLM server of that interpreter, otherwise the transformers
sampler. With --long-tailed the policy ends completions at random: their lengths are nearly
geometric, like those of uniformly drawn tokens. Otherwise nearly all have the maximum length.

`--scripted` measures the scheduler of rollouts with a scripted server instead: rollouts of several
turns, loops with log-normal lengths, and the cost of many open rollouts. The server takes a given
time for each token, and tools and training steps sleep.
"""

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from temper_trainer.batching.samples import to_samples
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment.protocol import Environment, Observation
from temper_trainer.loops.rollouts.batch_pipeline import AdmissionRule, BatchPipeline
from temper_trainer.loops.rollouts.group_pipeline import GroupPipeline, GroupSink
from temper_trainer.loops.rollouts.multi_turn import Conversation
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.rollout.scripted_sampler import ScriptedServer
from temper_trainer.types import (
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    SamplingRequest,
    pack_completion,
)

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
LONG_TAILED = (
    "sampling.max_tokens=1024",
    "actor.engine.model.architecture.max_position_embeddings=1152",
    # The policy must not learn other lengths.
    "actor.engine.optimizer.lr=1e-9",
)
COLUMNS = (
    "rollout/length_mean",
    "rollout/length_max",
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
NUM_SLOTS = 64
"""Sequences that the server of the asynchronous rows decodes at the same time."""
ROLLOUTS_PER_STEP = 1024
MEDIAN_TOKENS, TOKENS_SIGMA = 200, 0.8
TOKEN_S = 1e-3
TRAIN_FRACTION = 0.5
"""Time of a training step, as a fraction of the time that the server needs for its rollouts."""


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


def make_requests(
    num_rollouts: int, *, max_tokens: int, first: int = 0
) -> tuple[list[Prompt], list[SamplingRequest]]:
    """Return prompts of one token, which is the index of the rollout, and their requests."""
    prompts = [
        Prompt(prompt_id=i, text="", tokens=(i,), answer="")
        for i in range(first, first + num_rollouts)
    ]
    sampling = SamplingConfig(max_tokens=max_tokens)
    return prompts, [
        SamplingRequest(
            request_id=i, prompt_tokens=prompt.tokens, sampling=sampling, seed=prompt.prompt_id
        )
        for i, prompt in enumerate(prompts)
    ]


def run_turns(times: Sequence[Sequence[float]], *, decode_s: float, max_tools: int) -> float:
    """Return the seconds of rollouts of one-token turns, whose tools take the given times."""
    prompts, requests = make_requests(len(times), max_tokens=1)
    tools = map(TimedTool, times)

    def make_tool() -> Environment:
        return next(tools)

    server = ScriptedServer(
        lambda request: [1], end_token_id=0, token_s=decode_s, max_concurrent=len(times)
    )
    config = EnvironmentConfig(
        name="package:Tool", max_turns=len(times[0]), max_concurrent=max_tools
    )
    with RolloutScheduler(server, environment=config, make_environment=make_tool) as scheduler:
        begin = time.perf_counter()
        scheduler.run(scheduler.run_rollouts(requests, prompts=prompts))
        return time.perf_counter() - begin


def measure_turns(num_rollouts: int = 128) -> dict[str, float]:
    """Compare rollouts of several turns with the slowest of them alone."""
    draw = random.Random(0)
    times = [
        [draw.lognormvariate(0.0, TOOL_SIGMA) * TOOL_S for _ in range(NUM_TURNS)]
        for _ in range(num_rollouts)
    ]
    ideal = max(sum(seconds) for seconds in times) + NUM_TURNS * DECODE_S
    seconds = run_turns(times, decode_s=DECODE_S, max_tools=num_rollouts)
    return {"seconds": seconds, "ideal_s": ideal, "ratio": seconds / ideal}


def draw_length(index: int) -> int:
    """Return the length of a rollout's completion, log-normal."""
    return math.ceil(random.Random(index).lognormvariate(math.log(MEDIAN_TOKENS), TOKENS_SIGMA))


def script_lengths(request: SamplingRequest) -> list[int]:
    """Return what is left of the completion of a rollout, after a prompt of one token."""
    num_done = len(request.prompt_tokens) - 1
    return [1] * (draw_length(request.prompt_tokens[0]) - num_done)


def make_pipeline(
    scheduler: RolloutScheduler, *, rule: AdmissionRule
) -> BatchPipeline[list[int]] | GroupPipeline[int]:
    """Return what samples the lengths of the rollouts of a step, each of which is a group."""

    async def sample(step: int, sink: GroupSink[int] | None = None) -> list[int]:
        first = ROLLOUTS_PER_STEP * (step - 1)
        prompts, requests = make_requests(ROLLOUTS_PER_STEP, max_tokens=10**6, first=first)

        async def finish(index: int, conversation: Conversation) -> None:
            if sink is not None:
                sink.add(first + index, len(conversation.tokens))

        conversations, _ = await scheduler.run_rollouts(
            requests,
            prompts=prompts,
            priority=step,
            on_start=None if sink is None else lambda index: sink.start(first + index),
            finish=finish,
        )
        return [len(each.tokens) for each in conversations]

    async def sample_groups(step: int, sink: GroupSink[int]) -> None:
        await sample(step, sink)

    if rule.overlaps:
        return GroupPipeline(
            scheduler,
            sample_groups,
            rule=rule,
            first_step=1,
            last_step=10**6,
            batch_size=ROLLOUTS_PER_STEP,
        )
    return BatchPipeline(scheduler, sample, rule=rule, first_step=1, last_step=10**6)


def measure_async(max_staleness: int, *, overlaps: bool = True, num_steps: int = 6) -> float:
    """Return the throughput of a loop relative to a server whose slots are never empty.

    The first steps fill the pipeline and are left out. Later steps than those that are measured are
    sampled ahead, as in a long run.
    """
    server = ScriptedServer(
        script_lengths, end_token_id=0, token_s=TOKEN_S, max_concurrent=NUM_SLOTS
    )
    server.load_weights([], version=1)
    mean_tokens = MEDIAN_TOKENS * math.exp(TOKENS_SIGMA**2 / 2)
    train_s = TRAIN_FRACTION * ROLLOUTS_PER_STEP * mean_tokens * TOKEN_S / NUM_SLOTS
    with RolloutScheduler(server, max_sampling=2 * NUM_SLOTS, interrupts=overlaps) as scheduler:
        pipeline = make_pipeline(
            scheduler, rule=AdmissionRule(max_staleness=max_staleness, overlaps=overlaps)
        )
        begin, num_tokens, num_skipped = 0.0, 0, max_staleness + 2
        for step in range(1, num_skipped + num_steps + 1):
            tokens = sum(pipeline.take(step))
            pipeline.start_batches()
            if step > num_skipped:
                num_tokens += tokens
            time.sleep(train_s)
            with pipeline.sync_weights(step):
                server.load_weights([], version=step + 1)
            if step == num_skipped:
                begin = time.perf_counter()
        seconds = time.perf_counter() - begin
    return num_tokens * TOKEN_S / NUM_SLOTS / seconds


def measure_flight(num_rollouts: int = 10_000, *, num_turns: int = 2) -> dict[str, float]:
    """Return the driver's CPU time per completion, and its memory, with open rollouts."""
    times = [[0.0] * num_turns for _ in range(num_rollouts)]
    before = time.process_time()
    # A token takes so long that all rollouts are open before the first one ends.
    seconds = run_turns(times, decode_s=10.0, max_tools=64)
    cpu_s = time.process_time() - before
    return {
        "seconds": seconds,
        "cpu_ms_per_completion": 1e3 * cpu_s / (num_rollouts * num_turns),
        "max_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def measure_samples(num_rollouts: int = 1024, *, num_tokens: int = 8192) -> float:
    """Return the seconds in which rollouts become a batch of samples, the best of three."""
    completion = Completion(
        request_id=0,
        tokens=tuple(range(100_000, 100_000 + num_tokens)),
        rollout_logprobs=tuple(-1.0 / i for i in range(1, num_tokens + 1)),
        finish_reason=FinishReason.END_TOKEN,
        weight_version=1,
    )
    prompt = Prompt(prompt_id=0, text="", tokens=(1,), answer="")
    completion = pack_completion(completion)  # as the scheduler returns it
    rollouts = [
        Rollout(prompt=prompt, completion=completion, text="", reward=1.0, group_id=i, sample_id=i)
        for i in range(num_rollouts)
    ]
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        to_samples(rollouts, temperature=1.0)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure_all() -> dict[str, float]:
    """Run every row and print the table."""
    turns, flight = measure_turns(), measure_flight()
    rows: dict[str, tuple[str, float]] = {
        "turns": (
            f"128 rollouts of {NUM_TURNS} turns, seconds / slowest rollout alone",
            turns["ratio"],
        ),
    }
    names: Sequence[tuple[str, Callable[[], float]]] = (
        ("sync", lambda: measure_async(0, overlaps=False)),
        ("one_step_off", lambda: measure_async(1, overlaps=False)),
        ("async, 1", lambda: measure_async(1)),
        ("async, 2", lambda: measure_async(2)),
    )
    for name, measure in names:
        rows[name] = (f"{name}: tokens/s / perfect stream", measure())
    rows["cpu"] = (
        "10,000 rollouts in flight, ms of CPU per completion",
        flight["cpu_ms_per_completion"],
    )
    rows["memory"] = ("the same, maximum memory of the process in GB", flight["max_memory_gb"])
    rows["samples"] = ("to_samples of 8.4M tokens, seconds", measure_samples())
    print("| row | value |\n|---|---|")
    for title, value in rows.values():
        print(f"| {title} | {value:.3f} |")
    return {name: value for name, (_, value) in rows.items()}


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
    return [*server, "rollout.vllm.kv_cache_bytes=268435456", "rollout.max_concurrent=64"]


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
        # Ray's default niceness of 15 would let other programs slow the sampler and the actor.
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"},
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
    parser.add_argument("--long-tailed", action="store_true", help="end completions at random")
    parser.add_argument("--loops", default=";".join(LOOPS), help="names, separated by semicolons")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scripted", action="store_true", help="measure the scheduler instead")
    chosen = parser.parse_args()
    if chosen.scripted:
        values = measure_all()
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(values, indent=1))
        return
    common = sampler_settings(chosen.rollout_python)
    common += LONG_TAILED if chosen.long_tailed else ()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(chosen.loops.split(";")):
            rows = run_loop(
                [*common, *LOOPS[name]], steps=chosen.steps, folder=Path(folder) / f"loop_{i}"
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
        "| loop | tokens/s | / first | "
        + " | ".join(COLUMNS)
        + " |\n|"
        + "---|" * (len(COLUMNS) + 3)
    )
    for name, numbers in results.items():
        ratio = numbers["tokens_per_s"] / results[next(iter(results))]["tokens_per_s"]
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
