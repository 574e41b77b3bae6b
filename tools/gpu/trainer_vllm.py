"""GRPO with vLLM on H200s, through the trainer's own command: colocated on one GPU with sleep and wake, and separate GPUs with NCCL sync.

    python -m tools.gpu.trainer_vllm --out FOLDER --rollout-python PYTHON [--shape 0.5B] [--jobs colocated,separate] [--gpus 2,3] [--check]

PYTHON is an interpreter with vLLM, temper-engine-api and temper-trainer (their sources on PYTHONPATH are enough); this one needs the
trainer and the FSDP engine with their dependencies, Ray not among them. --gpus names those to use, so that several of these can run side by
side; --check reads each job's settings and runs nothing.

Each job is a run of ``temper-train`` in a process of its own on arithmetic problems with a random model of the given shape; the timings of
its steps, the first one left out, become rows of FOLDER/rows.jsonl.

What must be carried to the image, beside this checkout: vllm==0.26.0 (with what it needs, apache-tvm-ffi==0.1.15.post2), hydra-core,
omegaconf, antlr4-python3-runtime, cattrs, fsspec, jinja2, matplotlib, pyarrow, rich. VLLM_USE_FLASHINFER_SAMPLER=0 is set here.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from temper_trainer.config_loading import load
from tools.gpu.workload import SHAPES, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run, and the GPUs that it needs."""

    gpus: int
    """The first is the actor's, the others are the servers'; of one GPU all is shared."""
    per_server: int = 1
    """GPUs of a server that has GPUs of its own."""
    overrides: tuple[str, ...]
    """Beside those that all runs share."""


def _apart(gpus: int, *more: str, per_server: int = 1) -> Job:
    """The actor on the first GPU, servers on the others."""
    servers = (f"rollout.num_replicas={(gpus - 1) // per_server}", f"rollout.vllm.tensor_parallel_size={per_server}")
    return Job(gpus=gpus, per_server=per_server, overrides=(*servers, "weight_sync.transport=collective", *more))


JOBS: dict[str, Job] = {
    "colocated": Job(
        gpus=1, overrides=("rollout.vllm.sleep_level=2", "rollout.vllm.gpu_memory_utilization=0.5", "weight_sync.transport=cuda_ipc")
    ),
    "colocated_shared_memory": Job(gpus=1, overrides=("rollout.vllm.sleep_level=1", "rollout.vllm.gpu_memory_utilization=0.5")),
    "separate": _apart(2),
    "separate_tp2": _apart(3, per_server=2),
    "one_step_off": _apart(2, "loop=one_step_off"),
    "async": _apart(2, "loop=async", "asynchrony.max_staleness=2"),
    "separate_4": _apart(4),
    "one_step_off_4": _apart(4, "loop=one_step_off"),
    "async_4": _apart(4, "loop=async", "asynchrony.max_staleness=2"),
}

TIMES = ("time/step_s", "time/rollout_s", "time/update_s", "time/annotate_s", "time/weight_sync_s", "time/wait_s", "rollout/tokens_per_s")
OTHERS = ("weight_sync/canary_difference", "mismatch/kl", "staleness/max", "rollout/tokens", "groups/dead_share", "actor/grad_norm")


def overrides(shape: str, *, steps: int, rollout_python: str, folder: Path) -> list[str]:
    """What every job shares."""
    sizes = SHAPES[shape]
    architecture = "actor.engine.model.architecture"
    return [
        "experiment=quickstart",
        "warm_start=null",
        "data.eval=null",
        "reward.function=tools.gpu.workload:characters",
        f"run.dir={folder}",
        f"run.total_steps={steps}",
        "run.save_model=false",
        "run.table_every=0",
        "run.num_threads=8",
        *(f"{architecture}.{name}={size}" for name, size in sizes.items() if name != "vocab_size"),
        f"{architecture}.vocab_size={sizes['vocab_size']}",
        f"{architecture}.max_position_embeddings=4096",
        "actor.engine.device=cuda",
        "actor.engine.precision.compute=bf16",
        "actor.engine.optimizer.lr=1e-6",
        "sampling.max_tokens=1024",
        "batching.prompts_per_step=32",
        "batching.max_tokens=32768",
        "rollout=vllm",
        "rollout.dtype=bf16",
        "rollout.max_concurrent=256",
        "rollout.canary_tolerance=0.3",
        f"runtime.rollout_python={rollout_python}",
    ]


def settings_of(name: str, gpus: Sequence[str], *, shape: str, steps: int, rollout_python: str, out: Path) -> list[str]:
    """The overrides of a job on these GPUs: the first is the actor's, each other one a server's."""
    shared = overrides(shape, steps=steps, rollout_python=rollout_python, folder=out / f"{name}-{shape}")
    job = JOBS[name]
    sets = [",".join(gpus[first : first + job.per_server]) for first in range(1, job.gpus, job.per_server)]
    servers = ",".join(f'"{devices}"' for devices in sets)
    return [*shared, *job.overrides, *([f"runtime.rollout_devices=[{servers}]"] if servers else [])]


def run_job(rows: Rows, name: str, gpus: Sequence[str], *, shape: str, steps: int, rollout_python: str, out: Path) -> None:
    """One run, and its row; a run that fails leaves a row with the end of its log."""
    num_gpus = JOBS[name].gpus
    if len(gpus) < num_gpus:
        rows.add({"job": name, "skipped": f"needs {num_gpus} GPUs, and has {len(gpus)}"})
        return
    folder = out / f"{name}-{shape}"
    settings = settings_of(name, gpus[:num_gpus], shape=shape, steps=steps, rollout_python=rollout_python, out=out)
    environment = os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "CUDA_VISIBLE_DEVICES": ",".join(gpus[:num_gpus])}
    begin = time.perf_counter()
    with (out / f"{name}.log").open("w") as log:
        command = [sys.executable, "-m", "temper_trainer", *settings]
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=540, check=False).returncode
    row: dict[str, object] = {"job": name, "shape": shape, "gpus": num_gpus, "exit": code, "wall_s": round(time.perf_counter() - begin, 1)}
    if code != 0:
        row["log"] = (out / f"{name}.log").read_text(errors="replace").splitlines()[-25:]
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        steady = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["phase"] == "rl"][1:]
        for key in (*TIMES, *OTHERS):
            values = [line[key] for line in steady if key in line]
            if values:
                row[key] = round(statistics.median(values), 5)
    rows.add(row)


def check_job(name: str, *, shape: str, steps: int, rollout_python: str, out: Path) -> None:
    """Compose and validate a job's settings, which needs no GPU.

    Raises:
        ConfigError: what is wrong with them.
    """
    gpus = [str(gpu) for gpu in range(JOBS[name].gpus)]
    load(settings_of(name, gpus, shape=shape, steps=steps, rollout_python=rollout_python, out=out))
    print(f"{name}: its settings are valid")


def main() -> None:
    """Run the chosen jobs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rollout-python", default=sys.executable)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5B")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--gpus", help="such as 2,3; default: all")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    if chosen.check:
        for name in chosen.jobs.split(","):
            check_job(name, shape=chosen.shape, steps=chosen.steps, rollout_python=chosen.rollout_python, out=chosen.out)
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(path=chosen.out / "rows.jsonl")
    gpus = chosen.gpus.split(",") if chosen.gpus else [str(gpu) for gpu in range(torch.cuda.device_count())]
    for name in chosen.jobs.split(","):
        run_job(rows, name, gpus, shape=chosen.shape, steps=chosen.steps, rollout_python=chosen.rollout_python, out=chosen.out.resolve())


if __name__ == "__main__":
    main()
