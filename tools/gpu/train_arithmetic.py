r"""Train a 0.4B model on generated word problems with `temper-train`, on one GPU without downloads.

    python -m tools.gpu.train_arithmetic --out FOLDER [--runs NAME,...] [--budget-s N] \
        [--rollout-python PYTHON] [--steps N] [--rehearse]

Every run is `temper-train experiment=quickstart` in its own process, with the layers of
Qwen2.5-0.5B and a vocabulary of words: a warm start on demonstrations of which half are wrong,
then reinforcement learning (or distillation from the model of the first run) in bf16 with the
`hf` sampler. The runs of `--runs lora,sft,dpo,reward-model` start from the warm start that the run
`grpo` saved: reinforcement learning of an adapter, and supervised training on right (and wrong)
solutions, whose saved models are evaluated afterwards.

Results are appended to FOLDER/rows.jsonl, the metrics of every step to FOLDER/NAME.jsonl. The same
command continues an interrupted measurement: runs that are `ok` in FOLDER/rows.jsonl are skipped,
and others continue from their last checkpoint. A run saves every two minutes, and 60 s before the
budget ends. Curves leave out the time between two parts, and times of steps the first step of each
part; `wall_s` is that of the last part. `--parallel N` runs N of them on the GPU at once: learning
curves stay the same, times do not. `--rehearse` runs a tiny model on a CPU.

Needs the trainer, both engines and their dependencies. The runs `ray-grpo` and `ray-ppo-megatron`
need Ray and four GPUs. The runs `tool-sync`, `tool-async` and `vllm-distillation` need vLLM: name
its interpreter with `--rollout-python`. The first two call a calculator at every `=`, and the third
one has a vLLM server for the teacher, too. `long-sync` and `long-async` are `tool-sync` and
`tool-async` with 512 rollouts per step on problems of up to eight operations, both from the warm
start of `long-sync`. All servers and the actor share the GPU. Name runs with Ray or vLLM with
`--runs`, also `grpo-te` and `grpo-te-float8`, which need TransformerEngine.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Literal

from temper_trainer.config.data import ArithmeticSource
from temper_trainer.data.arithmetic import generate_arithmetic_rows
from temper_trainer.metrics.run_files import read_starts
from tools.gpu.engine_fsdp import write_entry_points
from tools.gpu.workload import Rows

SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""Layer sizes of Qwen/Qwen2.5-0.5B."""
TEACHER = "grpo"
"""Run that teaches `distillation`, and whose warm start others continue."""
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "ppo": ("algorithm=ppo", "algorithm.group_size=4", "critic.engine.optimizer.lr=3e-5"),
    "grpo-megatron": ("model_engine=megatron",),
    # With random base weights an adapter learns little; this run shows that adapters work on a GPU.
    "grpo-lora": (
        "actor.engine.lora.rank=32",
        "actor.engine.lora.alpha=64",
        "actor.engine.optimizer.lr=1e-4",
    ),
    "grpo-one-step-off": ("loop=one_step_off",),
    "grpo-float8": ("actor.engine.float8=rowwise",),
    "grpo-float8-tensorwise": ("actor.engine.float8=tensorwise",),
    "distillation": ("algorithm=distill", "algorithm.group_size=4"),
}
"""Configuration overrides by run without vLLM, most important first."""
_PAIRS = (
    "data.train=jsonl",
    "data.train.paths=[PAIRS]",
    "data.train.prompt_key=prompt",
)
_SUPERVISED = (
    "data.eval=null",
    "~run.eval_every",
    "~run.eval_sampled",
    "~run.eval_sampling",
    "~sampling",
    "batching.prompts_per_step=128",
)
FROM_WARM_START: dict[str, tuple[str, ...]] = {
    "lora": (
        "actor.engine.lora.rank=32",
        "actor.engine.lora.alpha=64",
        "actor.engine.optimizer.lr=1e-4",
    ),
    "sft": ("task=sft", *_SUPERVISED, "actor.engine.optimizer.lr=5e-5"),
    "dpo": ("task=dpo", "ref=frozen", *_SUPERVISED, *_PAIRS, "actor.engine.optimizer.lr=1e-5"),
    "reward-model": (
        "task=rm",
        "actor.engine.model.model_type=reward_model",
        *_SUPERVISED,
        *_PAIRS,
        "actor.engine.optimizer.lr=5e-5",
    ),
}
"""Configuration overrides of runs that start from the warm start of `grpo`."""
WARM_START_OF = dict.fromkeys(FROM_WARM_START, TEACHER) | {"long-async": "long-sync"}
"""Run whose warm start each of these runs continues; its warm start must be complete."""
SUPERVISED_RUNS = ("sft", "dpo", "reward-model")
"""Runs without sampling, so without rewards or evaluations during training."""
_TOOL = (
    "environment.name=calculator",
    "environment.call_start=''",
    "environment.call_end='='",
    "environment.answer_start=''",
    "environment.answer_end=''",
    "environment.max_observation_tokens=8",
    "rollout=vllm",
    "rollout.max_concurrent=512",
)
_LONG = (
    *_TOOL,
    *(f"{rows}.max_operations=8" for rows in ("data.train", "data.eval", "warm_start.data")),
    "data.train.max_rows=40000",
    # After 120 updates of the warm start, 3 % of the problems are solved, after 500 38 %.
    "warm_start.total_steps=500",
    "warm_start.data.max_rows=64000",
    "data.max_prompt_tokens=112",
    # Eight calls of at most 8 tokens, their answers, and the final line.
    "environment.max_turns=12",
    "environment.max_tokens=112",
    "sampling.max_tokens=24",
    "run.eval_sampling.max_tokens=24",
    "batching.prompts_per_step=64",
    "batching.max_tokens=16384",
)
VLLM_RUNS: dict[str, tuple[str, ...]] = {
    "tool-sync": _TOOL,
    "tool-async": (*_TOOL, "loop=async", "asynchrony.max_staleness=2"),
    "vllm-distillation": (
        *RUNS["distillation"],
        "rollout=vllm",
        "rollout.max_concurrent=512",
        "teachers.first.backend=vllm",
        "teachers.first.engine.precision.compute=bf16",
    ),
    "long-sync": _LONG,
    "long-async": (*_LONG, "loop=async", "asynchrony.max_staleness=2"),
}
"""Configuration overrides by run with a vLLM server."""
_ON_FOUR_WORKERS = ("runtime.kind=ray", "actor.num_workers=4")
TRANSFORMER_ENGINE_RUNS: dict[str, tuple[str, ...]] = {
    "grpo-te": ("model_engine=megatron", "actor.engine.layers=transformer_engine"),
    "grpo-te-float8": (
        "model_engine=megatron",
        "actor.engine.layers=transformer_engine",
        "actor.engine.float8=tensorwise",
    ),
}
"""Configuration overrides by run with TransformerEngine's layers."""
RAY_RUNS: dict[str, tuple[str, ...]] = {
    "ray-grpo": _ON_FOUR_WORKERS,
    "ray-ppo-megatron": (
        *_ON_FOUR_WORKERS,
        *RUNS["ppo"],
        "model_engine=megatron",
        "actor.engine.tensor_parallel=2",
        "critic.engine.tensor_parallel=2",
        "critic.num_workers=4",
    ),
}
"""Configuration overrides by run with four Ray workers, each on its own GPU."""
# With a fixed size, a server does not measure free memory while the teacher's takes some of it.
_VLLM_ON_GPU = ("rollout.vllm.kv_cache_bytes=17179869184", "weight_sync.transport=cuda_ipc")
_VLLM_ON_CPU = ("rollout.vllm.kv_cache_bytes=67108864", "rollout.vllm.enforce_eager=true")
TIMES = (
    "time/step_s",
    "time/rollout_s",
    "time/teacher_s",
    "time/update_s",
    "time/weight_sync_s",
    "staleness/mean",
)
STOP_S = 60.0
"""Seconds for a run to save its state before its limit; `run.stop_grace_s` is as long."""
SHORTEST_S = STOP_S + 90.0
"""Seconds that must be left to start a run: a server of vLLM takes more than a minute to start."""


def list_overrides(
    name: str, *, out: Path, rehearse: bool, rollout_python: str, steps: int
) -> list[str]:
    """Return the overrides of one run."""
    architecture = "actor.engine.model.architecture"
    sizes = [f"{architecture}.{key}={value}" for key, value in SHAPE.items()]
    size = [
        *sizes,
        "actor.engine.device=cuda",
        "actor.engine.precision.compute=bf16",
        "actor.engine.optimizer.lr=1e-5",
        "rollout.dtype=bf16",
        "warm_start.total_steps=120",
        "warm_start.batch_size=128",
        "warm_start.optimizer.lr=2e-4",
        "data.eval.max_rows=200",
        f"run.total_steps={steps}",
        "run.eval_every=10",
        "run.num_threads=8",
    ]
    tiny = [
        "warm_start.total_steps=3",
        "run.total_steps=2",
        "run.eval_every=1",
        "data.eval.max_rows=16",
    ]
    teacher = (
        [f"teachers.first.engine.model.path={out / TEACHER / 'huggingface'}"]
        if name in ("distillation", "vllm-distillation")
        else []
    )
    placement: list[str] = []
    if name in VLLM_RUNS:
        placement = [f"runtime.rollout_python={rollout_python}"]
        placement += _VLLM_ON_CPU if rehearse else _VLLM_ON_GPU
    elif name in RAY_RUNS:
        placement = ["runtime.cpus_per_worker=0.5" if rehearse else "runtime.gpus_per_worker=1"]
    chosen = (RUNS | FROM_WARM_START | VLLM_RUNS | TRANSFORMER_ENGINE_RUNS | RAY_RUNS)[name]
    base: list[str] = []
    if name in WARM_START_OF:
        start = out / WARM_START_OF[name]
        # Without the sizes and the settings of the warm start, which the saved model replaces.
        size = [each for each in size if not each.startswith(("warm_start.", architecture))]
        tiny = [each for each in tiny if not each.startswith("warm_start.")]
        chosen = tuple(each for each in chosen if not each.startswith("warm_start."))
        base = [
            "warm_start=null",
            f"~{architecture}",
            f"actor.engine.model.path={start / 'warm_start' / 'huggingface'}",
            "data.tokenizer.kind=pretrained",
            f"data.tokenizer.path={start / 'tokenizer'}",
        ]
        if any(each.startswith("task=") for each in chosen):
            unused = ("data.eval.", "run.eval_", "rollout.")
            size = [each for each in size if not each.startswith(unused)]
            tiny = [each for each in tiny if not each.startswith(unused)]
    return [
        "experiment=quickstart",
        *([] if rehearse else size),
        f"run.dir={out / name}",
        # A checkpoint has up to 9 GB, with a critic. One is kept, because disks may be small.
        "run.save_interval_s=120",
        "run.max_ckpt_to_keep=1",
        "run.resume=auto",
        *teacher,
        *base,
        *(each.replace("PAIRS", str(out / "pairs.jsonl")) for each in chosen),
        *(tiny if rehearse else []),
        *placement,
    ]


def list_evaluation_overrides(name: str, *, out: Path, rehearse: bool) -> list[str]:
    """Return the overrides that evaluate the saved model of a supervised run."""
    device = [] if rehearse else ["actor.engine.device=cuda", "actor.engine.precision.compute=bf16"]
    return [
        "experiment=quickstart",
        "task=eval",
        "warm_start=null",
        "~actor.engine.model.architecture",
        f"actor.engine.model.path={out / name / 'huggingface'}",
        "data.tokenizer.kind=pretrained",
        f"data.tokenizer.path={out / TEACHER / 'tokenizer'}",
        "data.eval.max_rows=200",
        f"run.dir={out / f'{name}-eval'}",
        "run.resume=auto",
        *device,
        *([] if rehearse else ["rollout.dtype=bf16"]),
    ]


def write_pairs(path: Path, *, num_pairs: int, seed: int, split: Literal["train", "test"]) -> None:
    """Write right and wrong solutions of generated problems as preference pairs."""
    source = ArithmeticSource(split=split, seed=seed, max_rows=num_pairs, wrong_first_operation=1.0)
    lines = [
        json.dumps({"prompt": row.prompt, "chosen": row.answer, "rejected": row.solution})
        for row in generate_arithmetic_rows(source)
    ]
    path.write_text("\n".join(lines) + "\n")


def run(
    rows: Rows,
    name: str,
    *,
    out: Path,
    limit_s: float,
    overrides: Sequence[str],
    evaluation: Sequence[str] = (),
) -> None:
    """Run one training and add its row; the row of a failed run contains the end of its log.

    Args:
        rows: Results so far.
        name: Name of the run.
        out: Folder of all runs.
        limit_s: Time limit of the training.
        overrides: Overrides of the training.
        evaluation: Overrides of an evaluation after it; empty for none.
    """
    command = [sys.executable, "-m", "temper_trainer", *overrides]
    start = time.perf_counter()
    log = out / f"{name}.txt"
    code = run_within_limit(command, log=log, limit_s=limit_s, stop_s=STOP_S)
    row: dict[str, object] = {
        "job": name,
        "ok": code == 0,
        "exit": code,
        "wall_s": round(time.perf_counter() - start, 1),
    }
    metrics = out / name / "metrics.jsonl"
    if metrics.exists():
        shutil.copy(metrics, out / f"{name}.jsonl")
        row |= summarize(metrics)
    if code == 0 and evaluation:
        with log.open("a") as output:
            subprocess.run(
                [sys.executable, "-m", "temper_trainer", *evaluation],
                stdout=output,
                stderr=subprocess.STDOUT,
                check=True,
            )
        after = summarize(out / f"{name}-eval" / "metrics.jsonl")
        row |= {key: value for key, value in after.items() if key.startswith("eval")}
    if code != 0:
        row["log"] = log.read_text(errors="replace").splitlines()[-25:]
    rows.add(row)


def run_within_limit(
    command: Sequence[str], *, log: Path, limit_s: float, stop_s: float
) -> int | str:
    """Run a command, asking it to stop `stop_s` seconds before the limit.

    Returns:
        The exit code, or a text if the command did not end by itself.
    """
    # Appended, because the log of an earlier part may explain its end.
    with log.open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(limit_s - stop_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # temper-train saves a checkpoint
        try:
            process.wait(stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"killed after {limit_s:.0f} s"
        return f"stopped after {limit_s - stop_s:.0f} s"


def summarize(metrics: Path) -> dict[str, object]:
    """Return medians and means of times, and rewards and held-out accuracy by step."""
    steps = [json.loads(line) for line in metrics.read_text().splitlines() if line]
    main = [step for step in steps if step.get("phase") not in ("warm_start", "eval")]
    row: dict[str, object] = {"steps": len(main)}
    # The first step of each part compiles and allocates.
    first = {
        next((step["step"] for step in main if step["time_s"] > start), None)
        for start in find_starts(metrics.parent)
    }
    steady = [step for step in main[1:] if step["step"] not in first]
    for key in TIMES:
        values = [step[key] for step in steady if key in step]
        if values:
            row[key] = round(statistics.median(values), 3)
            row[f"{key}, mean"] = round(statistics.fmean(values), 3)
    for key in sorted({key for step in steps for key in step}):
        if key.startswith("eval") or key in ("reward/mean", "preference/accuracy"):
            row[key] = [round(step[key], 4) for step in steps if key in step]
    return row


def find_starts(folder: Path) -> list[float]:
    """Return the Unix times of the starts of a run."""
    return [float(str(start["time_s"])) for start in read_starts(folder)]


def find_working_times(times: Sequence[float], *, starts: Sequence[float]) -> list[float]:
    """Return the times of steps as if each part had begun when the step before it ended.

    Args:
        times: Unix times of the steps that the run kept.
        starts: Unix times of its starts.
    """
    working, pause = list(times[:1]), 0.0
    for before, now in pairwise(times):
        pause += max((start - before for start in starts if before < start <= now), default=0.0)
        working.append(now - pause)
    return working


def plot(out: Path, names: Sequence[str]) -> None:
    """Draw reward and held-out accuracy over time as curves.png."""
    # Imported here because a rehearsal of the runs alone does not need matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    curves = (
        ("rl", "reward/mean", "reward of a training step"),
        ("eval", "eval/greedy/reward", "held-out accuracy, greedy"),
    )
    for axes, (phase, key, title) in zip(figure.subplots(1, 2, sharey=True), curves, strict=True):
        for name in names:
            lines = (out / f"{name}.jsonl").read_text().splitlines()
            steps = [json.loads(line) for line in lines]
            times = find_working_times(
                [step["time_s"] for step in steps], starts=find_starts(out / name)
            )
            steps = [step | {"time_s": time_s} for step, time_s in zip(steps, times, strict=True)]
            begin = next((step["time_s"] for step in steps if step["phase"] == "eval"), None)
            if begin is None:  # The limit ended the run before its first evaluation.
                continue
            chosen = [step for step in steps if step["phase"] == phase and key in step]
            seconds = [step["time_s"] - begin for step in chosen]
            axes.plot(seconds, [step[key] for step in chosen], label=name)
        axes.set(title=title, xlabel="seconds since the first evaluation")
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out / "curves.png", dpi=110)


def is_installed(distribution: str) -> bool:
    """Return whether the distribution is installed, so that its entry points are found."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def find_finished(out: Path) -> set[str]:
    """Return the names of runs that succeeded in an earlier call."""
    path = out / "rows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["job"] for row in map(json.loads, lines) if row.get("ok")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen runs that have not succeeded yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--budget-s", type=float, default=560.0)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--rollout-python", default=sys.executable, help="interpreter with vLLM")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rehearse", action="store_true")
    chosen = parser.parse_args(arguments)
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONUNBUFFERED"] = "1"
    # FlashInfer's sampler compiles when it is first used, which needs packages beyond vLLM's.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if not is_installed("temper-engine-fsdp"):
        entry_points = Path(tempfile.mkdtemp(prefix="temper-entry-points-"))
        write_entry_points(entry_points)
        os.environ["PYTHONPATH"] = f"{entry_points}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    write_pairs(out / "pairs.jsonl", num_pairs=8000, seed=5, split="train")
    deadline = time.monotonic() + chosen.budget_s
    finished = find_finished(out)
    rows = Rows(path=out / "rows.jsonl")

    def run_if_time(name: str) -> None:
        left = deadline - time.monotonic()
        if left < SHORTEST_S and not chosen.rehearse:
            print(f"{name}: skipped, because only {left:.0f} s are left")
            return
        overrides = list_overrides(
            name,
            out=out,
            rehearse=chosen.rehearse,
            rollout_python=chosen.rollout_python,
            steps=chosen.steps,
        )
        evaluation = (
            list_evaluation_overrides(name, out=out, rehearse=chosen.rehearse)
            if name in ("sft", "dpo")
            else []
        )
        run(rows, name, out=out, limit_s=left, overrides=overrides, evaluation=evaluation)

    with ThreadPoolExecutor(chosen.parallel) as pool:
        names = [name for name in chosen.runs.split(",") if name not in finished]
        list(pool.map(run_if_time, names))
    measured = [
        name
        for name in chosen.runs.split(",")
        if (out / f"{name}.jsonl").exists() and name not in SUPERVISED_RUNS
    ]
    plot(out, measured)


if __name__ == "__main__":
    main()
