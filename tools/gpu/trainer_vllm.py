r"""Run GRPO with vLLM through `temper-train`: colocated on one GPU, or on separate GPUs with NCCL.

    python -m tools.gpu.trainer_vllm --out FOLDER --rollout-python PYTHON \
        [--shape 0.5B] [--jobs colocated,separate] [--gpus 2,3] [--check] \
        [--weights FOLDER] [--mean-length N] [--override SETTING]

PYTHON is an interpreter with vLLM, temper-engine-api and temper-trainer (their sources on
PYTHONPATH are enough). This interpreter needs the trainer and the FSDP engine with their
dependencies; sources are enough here, too, because the script writes the entry points of engines
that are not installed. Only the jobs with several ranks of the actor (`shared_tp2` and others that
begin with `shared`) need Ray. `--gpus` names the GPUs to use, so that several of these scripts
can run in parallel; `--check` validates the settings of each job and runs nothing.

Each job is a `temper-train` run in its own process, on arithmetic problems with a random model of
the given shape. The timings of all steps except the first become rows of FOLDER/rows.jsonl. Jobs in
FOLDER/finished.jsonl are left out, so the same command continues after an interruption. The job
that was interrupted starts again, because it would otherwise warm up twice: its folder is renamed
to NAME.superseded-N.
`--weights` reads the model from FOLDER/SHAPE, and writes a random one there first if it is absent.
Without it, every run initializes the model on the CPU, which takes minutes for 8B.
`--mean-length` makes that model end completions: so many token ids end one that completions of
uniformly drawn tokens would have this mean length. A random model draws nearly uniformly, so
lengths are nearly geometric, up to `sampling.max_tokens`. Without it, all have that length.
`--override` adds a setting to every job, and may be given several times. The state of AdamW for 8B
does not fit on the actor's GPU, which torch.optim.SGD without `betas` and `weight_decay` avoids.
The job `megatron_colocated` also needs the Megatron engine with its dependencies.
The jobs `experts` and `experts_replayed` need a shape with experts, such as `--shape 30B-A3B-4L`.

The image needs, in addition to this checkout: vllm==0.26.0 (with its dependencies,
apache-tvm-ffi==0.1.15.post2), hydra-core, omegaconf, antlr4-python3-runtime, blake3, cattrs,
fsspec, jinja2, matplotlib, msgspec, pyarrow, rich. This script sets VLLM_USE_FLASHINFER_SAMPLER=0.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from temper_trainer.config_loading import load
from temper_trainer.rollout.vllm.server_process import SERVER_MODULE
from tools.gpu.engine_fsdp import provide_entry_points
from tools.gpu.workload import CARDS, SHAPES, FinishedJobs, Rows, set_aside_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training run and the number of GPUs that it needs."""

    gpus: int
    """The actor gets the first GPU, the servers get the others; a single GPU is shared."""
    ranks: int = 1
    """Ranks of the actor. Several of them share all GPUs with the servers, on Ray."""
    per_server: int = 1
    """Number of GPUs of a server that is not colocated."""
    overrides: tuple[str, ...]
    """Configuration overrides in addition to those of all jobs."""
    warm_start: bool = False
    """Run two updates first, which save the base model that servers with an adapter load."""
    kill_after: int | None = None
    """Number of steps after which the first server is killed while it samples."""
    is_killed_while_sending: bool = False
    """Kill the first server while weights are sent to it; see `kill_while_sending`."""
    expected_log: tuple[str, ...] = ()
    """Texts that the log must contain."""


def _make_separate_job(gpus: int, *more: str, per_server: int = 1) -> Job:
    """Return a job with the actor on the first GPU and servers on the others."""
    servers = (
        f"rollout.num_replicas={(gpus - 1) // per_server}",
        f"rollout.vllm.tensor_parallel_size={per_server}",
    )
    return Job(
        gpus=gpus,
        per_server=per_server,
        overrides=(*servers, "weight_sync.transport=collective", *more),
    )


def _with_killed_server(job: Job, *, transport: str) -> Job:
    """Return a job with an automatic transport whose server is killed in the second step."""
    overrides = (
        *(setting for setting in job.overrides if "transport" not in setting),
        "weight_sync.transport=auto",
    )
    return replace(
        job,
        overrides=overrides,
        kill_after=1,
        expected_log=(f"weights get to the servers by {transport}", "is restarted"),
    )


def _with_adapter(job: Job) -> Job:
    """Return a job that sends only the adapter."""
    lora = (
        "actor.engine.lora.rank=16",
        "actor.engine.lora.alpha=32",
        "actor.engine.optimizer.lr=1e-4",
        "weight_sync.content=adapter",
    )
    kept = (
        setting
        for setting in job.overrides
        if "transport" not in setting and "sleep_level" not in setting
    )
    asleep = ("rollout.vllm.sleep_level=1",) if job.gpus == 1 else ()
    return replace(job, overrides=(*kept, *asleep, *lora), warm_start=True)


def _make_shared_job(gpus: int, *, per_server: int) -> Job:
    """Return a job whose servers share the GPUs of all ranks of the actor."""
    return Job(
        gpus=gpus,
        ranks=gpus,
        per_server=per_server,
        overrides=(
            "runtime.kind=ray",
            "runtime.gpus_per_worker=1",
            f"actor.num_workers={gpus}",
            f"rollout.num_replicas={gpus // per_server}",
            f"rollout.vllm.tensor_parallel_size={per_server}",
            "rollout.vllm.sleep_level=2",
            "rollout.vllm.gpu_memory_utilization=0.5",
        ),
        expected_log=("weights get to the servers by cuda_ipc",),
    )


_COLOCATED = Job(
    gpus=1,
    overrides=(
        "rollout.vllm.sleep_level=2",
        "rollout.vllm.gpu_memory_utilization=0.5",
        "weight_sync.transport=cuda_ipc",
    ),
)


JOBS: dict[str, Job] = {
    "colocated": _COLOCATED,
    "colocated_shared_memory": Job(
        gpus=1, overrides=("rollout.vllm.sleep_level=1", "rollout.vllm.gpu_memory_utilization=0.5")
    ),
    "megatron_colocated": replace(
        _COLOCATED, overrides=(*_COLOCATED.overrides, "model_engine=megatron")
    ),
    "separate": _make_separate_job(2),
    "separate_tp2": _make_separate_job(3, per_server=2),
    "one_step_off": _make_separate_job(2, "loop=one_step_off"),
    "async": _make_separate_job(2, "loop=async", "asynchrony.max_staleness=2"),
    "separate_4": _make_separate_job(4),
    "one_step_off_4": _make_separate_job(4, "loop=one_step_off"),
    "async_4": _make_separate_job(4, "loop=async", "asynchrony.max_staleness=2"),
    "killed": _with_killed_server(_make_separate_job(2), transport="collective"),
    "killed_while_sending": replace(
        _make_separate_job(2),
        is_killed_while_sending=True,
        expected_log=("killed server", "are sent again", "is restarted"),
    ),
    "killed_colocated": _with_killed_server(_COLOCATED, transport="cuda_ipc"),
    "experts": _make_separate_job(2),
    "experts_replayed": _make_separate_job(2, "rollout.routing_replay=sampler"),
    "adapter": _with_adapter(_make_separate_job(2)),
    "adapter_colocated": _with_adapter(_COLOCATED),
    "shared_tp2": _make_shared_job(2, per_server=2),
    "shared_tp1": _make_shared_job(2, per_server=1),
    "shared_tp2_4": _make_shared_job(4, per_server=2),
    "killed_shared_tp2": _with_killed_server(
        _make_shared_job(2, per_server=2), transport="cuda_ipc"
    ),
}

TIMES = (
    "time/step_s",
    "time/rollout_s",
    "time/update_s",
    "time/forward_s",
    "time/weight_sync_s",
    "time/wait_s",
    "rollout/tokens_per_s",
)
LARGEST = ("weight_sync/canary_difference", "mismatch/kl")
"""Metrics whose maximum is reported too, because a median hides wrong weights in a single step."""
OTHERS = (
    "weight_sync/canary_difference",
    "mismatch/kl",
    "staleness/max",
    "rollout/tokens",
    "rollout/length_mean",
    "rollout/length_max",
    "rollout/truncated_fraction",
    "groups/zero_std_fraction",
    "actor/grad_norm",
)


def _card(shape: str) -> list[tuple[str, object]]:
    """Return the fields of the shape's `config.json`, for the context that the jobs need."""
    sizes = CARDS.get(shape) or {"model_type": "qwen2", **SHAPES[shape]}
    # Completions are shorter than the context from which Llama scales its angles.
    kept = [item for item in sizes.items() if item[0] != "rope_scaling"]
    return [*kept, ("max_position_embeddings", 4096)]


def write_weights(folder: Path, shape: str, *, mean_length: int | None) -> None:
    """Write a random model of the shape to `folder`/`shape`, unless it is there already.

    Args:
        folder: Folder of models.
        shape: Key of `CARDS` or `SHAPES`.
        mean_length: Mean number of tokens of a completion; None if only the limit ends one.
    """
    if (folder / shape / "config.json").exists():
        return
    config = transformers.AutoConfig.for_model(**dict(_card(shape)))
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if mean_length is not None:
        model.generation_config.eos_token_id = list(range(config.vocab_size // mean_length))
    model.save_pretrained(folder / shape)
    del model
    torch.cuda.empty_cache()


def overrides(
    shape: str, *, steps: int, rollout_python: str, folder: Path, weights: Path | None
) -> list[str]:
    """Return the overrides that all jobs have in common."""
    architecture = "actor.engine.model.architecture"
    return [
        "experiment=quickstart",
        "data.eval=null",
        "reward.function=tools.gpu.workload:count_characters",
        f"run.dir={folder}",
        f"run.total_steps={steps}",
        "run.save_model=false",
        "run.table_every=0",
        "run.num_threads=8",
        *(
            [f"~{architecture}", f"actor.engine.model.path={weights / shape}"]
            if weights
            else [f"+{architecture}.{name}={json.dumps(size)}" for name, size in _card(shape)]
        ),
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


def list_overrides(
    name: str,
    gpus: Sequence[str],
    *,
    shape: str,
    steps: int,
    rollout_python: str,
    out: Path,
    weights: Path | None,
    more: Sequence[str],
) -> list[str]:
    """Return the overrides of a job with its GPUs; see `Job.gpus` and `Job.ranks`."""
    shared = overrides(
        shape,
        steps=steps,
        rollout_python=rollout_python,
        folder=out / f"{name}-{shape}",
        weights=weights,
    )
    job = JOBS[name]
    # A learning rate this low hardly changes the weights: the run only saves a model of this shape.
    warm = (
        ("warm_start.total_steps=2", "warm_start.optimizer.lr=1e-6")
        if job.warm_start
        else ("warm_start=null",)
    )
    sets = [
        ",".join(gpus[first : first + job.per_server])
        for first in range(1, job.gpus, job.per_server)
        if job.ranks == 1
    ]
    servers = ",".join(f'"{devices}"' for devices in sets)
    return [
        *shared,
        *warm,
        *job.overrides,
        *([f"runtime.rollout_devices=[{servers}]"] if servers else []),
        *more,
    ]


def run_job(
    rows: Rows,
    name: str,
    gpus: Sequence[str],
    *,
    shape: str,
    settings: Sequence[str],
    out: Path,
    limit_s: float,
    more: Sequence[str],
) -> bool:
    """Run a job and add its row, and return whether it succeeded.

    The row of a failed job contains the end of its log.
    """
    job = JOBS[name]
    folder = out / f"{name}-{shape}"
    environment = os.environ | {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "PYTHONFAULTHANDLER": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    set_aside_run(folder)
    begin = time.perf_counter()
    with (out / f"{name}.log").open("w") as log:
        module = "tools.gpu.kill_while_sending" if job.is_killed_while_sending else "temper_trainer"
        command = [sys.executable, "-m", module, *settings]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        code, killed = watch(
            process, folder / "metrics.jsonl", kill_after=job.kill_after, limit_s=limit_s
        )
    row: dict[str, object] = {
        "job": name,
        "shape": shape,
        "gpus": job.gpus,
        "exit": code,
        "overrides": list(more),
        "wall_s": round(time.perf_counter() - begin, 1),
    }
    log_text = (out / f"{name}.log").read_text(errors="replace")
    row["log_matches"] = [
        line for line in log_text.splitlines() if any(text in line for text in job.expected_log)
    ]
    # If a text is missing, the run did not take the path that the job tests.
    row["missing"] = [text for text in job.expected_log if text not in log_text]
    if job.kill_after is not None:
        row["killed"] = killed
    if code != 0:
        row["log"] = log_text.splitlines()[-25:]
        row["server_log"] = tail(folder / "rollout" / "replica-0.log")
    row |= summarize_metrics(folder / "metrics.jsonl")
    rows.add(row)
    return code == 0


def watch(
    process: "subprocess.Popen[bytes]", metrics: Path, *, kill_after: int | None, limit_s: float
) -> tuple[int | str, bool]:
    """Wait for a run, and kill its first server while it samples after `kill_after` logged steps.

    Returns:
        The exit code or the text of a timeout, and whether a server was killed.
    """
    deadline, killed = time.monotonic() + limit_s, False
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.send_signal(signal.SIGABRT)  # faulthandler writes all stacks to the log
            time.sleep(3)
            process.kill()
            return f"timed out after {limit_s:g} s", killed
        if kill_after is not None and not killed and len(read_steps(metrics)) >= kill_after:
            time.sleep(1.5)  # a rollout takes longer than this
            os.killpg(find_servers(process.pid)[0], signal.SIGKILL)
            killed = True
        time.sleep(0.1)
    return process.returncode, killed


def find_servers(run: int) -> list[int]:
    """Return the process ids of the servers that a run has started, in start order."""
    servers, parents = [], dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            # The command name in parentheses may contain spaces; the state and the parent's id
            # follow it.
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
        parents[int(folder.name)] = parent
        if SERVER_MODULE.encode() in words:
            servers.append(int(folder.name))

    def is_of_run(process: int) -> bool:
        # With Ray, there are processes of Ray between a run and its servers.
        while process not in (0, run):
            process = parents.get(process, 0)
        return process == run

    return sorted(filter(is_of_run, servers))


def read_steps(metrics: Path) -> list[dict[str, float]]:
    """Return the steps logged so far, without a line that is still being written."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().split("\n")[:-1]
    return [row for row in map(json.loads, lines) if row["phase"] == "rl"]


def summarize_metrics(metrics: Path) -> dict[str, object]:
    """Return medians over all steps but the first, and the maximum of some metrics.

    `s_per_step` and `trained_tokens_per_s` count everything between the end of the first step and
    the end of the last.
    """
    steps = read_steps(metrics)
    summary: dict[str, object] = {"steps": len(steps)}
    steady = steps[1:]
    if steady:
        seconds = steps[-1]["time_s"] - steps[0]["time_s"]
        tokens = sum(step["batch/trained_tokens"] for step in steady)
        summary["s_per_step"] = round(seconds / len(steady), 5)
        summary["trained_tokens_per_s"] = round(tokens / seconds, 1)
    for key in (*TIMES, *OTHERS):
        values = [line[key] for line in steady if key in line]
        if values:
            summary[key] = round(statistics.median(values), 5)
            if key in LARGEST:
                summary[f"{key}, largest"] = round(max(values), 5)
    return summary


def tail(path: Path) -> list[str]:
    """Return the last 25 lines of a file; none if it does not exist."""
    return path.read_text(errors="replace").splitlines()[-25:] if path.exists() else []


def main() -> None:
    """Read the command line, and run or check the chosen jobs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rollout-python", default=sys.executable)
    parser.add_argument("--shape", choices=[*SHAPES, *CARDS], default="0.5B")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--gpus", help="GPUs to use, such as 2,3; default: all")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=Path, help="file of results; default: rows.jsonl in --out")
    parser.add_argument("--limit", type=float, default=540.0, help="time limit of a job in seconds")
    parser.add_argument("--weights", type=Path, help="folder of models, written if absent")
    parser.add_argument("--mean-length", type=int, help="mean tokens of a completion")
    parser.add_argument("--override", action="append", default=[], help="a setting of every job")
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    if chosen.mean_length and not chosen.weights:
        parser.error("--mean-length needs --weights, the folder of the model that it changes")
    with provide_entry_points():
        run_chosen(chosen)


def run_chosen(chosen: argparse.Namespace) -> None:
    """Run or check the chosen jobs.

    Raises:
        ConfigError: If the settings of a job to check are invalid.
    """
    out = chosen.out.resolve()
    if chosen.weights and not chosen.check:
        write_weights(chosen.weights, chosen.shape, mean_length=chosen.mean_length)
    out.mkdir(parents=True, exist_ok=True)
    rows = Rows(path=chosen.rows or out / "rows.jsonl")
    finished = FinishedJobs(path=out / "finished.jsonl")
    count = torch.cuda.device_count()
    gpus = chosen.gpus.split(",") if chosen.gpus else [str(gpu) for gpu in range(count)]
    for name in chosen.jobs.split(","):
        needed = JOBS[name].gpus
        used = [str(gpu) for gpu in range(needed)] if chosen.check else gpus[:needed]
        if len(used) < needed:
            rows.add({"job": name, "skipped": f"needs {needed} GPUs, and there are {len(used)}"})
            continue
        settings = list_overrides(
            name,
            used,
            shape=chosen.shape,
            steps=chosen.steps,
            rollout_python=chosen.rollout_python,
            out=out,
            weights=chosen.weights,
            more=chosen.override,
        )
        if chosen.check:
            load(settings)
            print(f"{name}: the settings are valid")
            continue
        if not finished.contain(name, settings) and run_job(
            rows,
            name,
            used,
            shape=chosen.shape,
            settings=settings,
            out=out,
            limit_s=chosen.limit,
            more=chosen.override,
        ):
            finished.add(name, settings)


if __name__ == "__main__":
    main()
