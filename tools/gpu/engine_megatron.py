"""Test and time MegatronEngine on CUDA and NCCL, next to a bare megatron-core loop and FSDPEngine.

    python -m tools.gpu.engine_megatron --out FOLDER [--limit SECONDS]

Runs the conformance kit, compares gradient norms of parallel layouts, and times updates. Run at the
root of the repository with engine-api, engine-fsdp, engine-megatron and megatron-bridge installed:
the kit finds the engine by its entry point. Hosts with one, two and four GPUs run different phases,
each under eight minutes. Four GPUs also measure speed; elsewhere name these jobs with `--only`.
Jobs of a phase run in parallel with a time limit each. Rows are appended to FOLDER/rows.jsonl as
soon as they are measured; the output of JOB is in FOLDER/JOB.txt. Jobs in FOLDER/finished.jsonl are
left out, so the same command continues after an interruption.
"""

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from temper_engine_api.engine import BaseEngine
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec, Scalar
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.engine import MegatronEngine
from tools.gpu.fsdp_timing import measure_gemm_rate, measure_times
from tools.gpu.fsdp_workload import FULL
from tools.gpu.megatron_cases import CASES, LAYOUTS, Case
from tools.gpu.workload import (
    MICRO_BATCH_TOKENS,
    SHAPES,
    ClippedPolicy,
    FinishedJobs,
    Rows,
    compute_flops,
    find_free_port,
    long_tail,
    policy_batch,
    run_update,
    set_rank_variables,
    small_batch,
)

KIT_GROUPS = "gradient,logprob,value,update,weights,checkpoint,offload,rfc_loop,adapter"
SHAPE = SHAPES["0.5B"]
SHORTEST_PHASE_S = 20.0
"""Seconds that must be left to start a phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process with its ranks."""

    name: str
    gpus: tuple[int, ...]
    limit_s: float
    """The job is stopped after this time; rows measured until then are kept."""
    command: tuple[str, ...]
    """Arguments to Python."""


def make_kit_job(layouts: str, gpus: tuple[int, ...], limit_s: float) -> Job:
    """Return a job that runs the conformance kit in these layouts."""
    return Job(
        name=f"kit-{layouts.replace(',', '-')}",
        gpus=gpus,
        limit_s=limit_s,
        command=(
            *(
                "-m",
                "temper_engine_api.conformance",
                "--engine",
                "megatron",
                "--device",
                "cuda",
                "--layouts",
                layouts,
            ),
            *("--groups", KIT_GROUPS, "-v", "--tb=short", "-p", "no:warnings"),
        ),
    )


def make_single_rank_kit_job(limit_s: float) -> Job:
    """Return a job that runs the conformance kit on a single rank."""
    job = make_kit_job("single", (0,), limit_s)
    return replace(
        job,
        command=tuple(
            {"--layouts": "--world-sizes", "single": "1"}.get(word, word) for word in job.command
        ),
    )


def make_rank_job(kind: str, layouts: str, gpus: tuple[int, ...], limit_s: float) -> Job:
    """Return a job that runs this script on as many ranks as GPUs."""
    command = ("-m", "tools.gpu.engine_megatron", "--ranks", kind, "--layouts", layouts, "--out")
    return Job(
        name=f"{kind}-{layouts.replace(',', '-')}", gpus=gpus, limit_s=limit_s, command=command
    )


Phases = tuple[tuple[Job, ...], ...]
ONE_GPU: Phases = (
    (make_rank_job("norms", "single", (0,), 120),),
    (make_single_rank_kit_job(300),),
)
TWO_GPUS: Phases = (
    (
        make_rank_job("norms", "single", (0,), 150),
        make_rank_job("norms", "tp2,tp2-sp,pp2,cp2,dp2-distopt,ep2,tp2-sp-ep2", (0, 1), 150),
    ),
    # Kits run in parallel and share GPUs, because start-up takes most of their time.
    tuple(
        make_kit_job(layout, (0, 1), 310)
        for layout in ("tp2-sp", "pp2-vpp2", "cp2", "dp2-distopt", "ep2")
    ),
)
FOUR_GPUS: Phases = (
    (
        make_rank_job("norms", "single", (0,), 70),
        make_rank_job("norms", "tp2,tp2-sp,pp2,cp2,dp2-distopt", (1, 2), 70),
    ),
    (
        # Kits run in parallel and share GPUs, because start-up takes most of their time.
        *(
            make_kit_job("tp2", (0, 1), 250),
            make_kit_job("pp2", (2, 3), 250),
            make_kit_job("cp2", (0, 1), 250),
            make_kit_job("dp2-distopt", (2, 3), 250),
        ),
        make_kit_job("tp2-pp2", (0, 1, 2, 3), 250),
    ),
    (make_rank_job("speed", "single", (0,), 110), make_rank_job("speed", "tp2", (2, 3), 110)),
    (make_rank_job("speed", "pp2", (0, 1), 80), make_rank_job("speed", "dp2-distopt", (2, 3), 80)),
    (make_rank_job("norms", "tp2-pp2,dp4-distopt", (0, 1, 2, 3), 45),),
    (make_rank_job("speed", "tp2-pp2", (0, 1, 2, 3), 70),),
)
OPTIONAL: Phases = (
    (make_rank_job("speed", "single", (0,), 110),),
    (make_rank_job("speed", "tp2", (0, 1), 110),),
    (make_rank_job("speed", "pp2", (0, 1), 110),),
)
"""Jobs that run only if named with `--only`."""


def list_phases(num_gpus: int, only: list[str] | None) -> Phases:
    """Return the phases for a number of GPUs, or only the named jobs that fit."""
    phases = FOUR_GPUS if num_gpus >= 4 else TWO_GPUS if num_gpus >= 2 else ONE_GPU
    if only is None:
        return phases
    chosen: dict[str, tuple[Job, ...]] = {}
    for job in (job for phase in (*phases, *OPTIONAL) for job in phase):
        if job.name in only and max(job.gpus) < num_gpus:
            chosen.setdefault(job.name, (job,))
    return tuple(chosen.values())


def run_phase(jobs: Sequence[Job], rows: Rows, *, finished: FinishedJobs, left_s: float) -> None:
    """Start the jobs of a phase together and wait for all of them, at most `left_s`."""
    started = time.monotonic()
    running = []
    for job in jobs:
        command = [
            sys.executable,
            *job.command,
            *([str(rows.path.parent)] if job.command[-1] == "--out" else []),
        ]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, job.gpus))}
        if "tp2" in job.name:
            # Megatron requires this with tensor parallelism, so that kernels start in launch order.
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        with (rows.path.parent / f"{job.name}.txt").open("w") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running.append((job, process))
    for job, process in running:
        try:
            code: int | None = process.wait(
                timeout=max(1.0, started + min(job.limit_s, left_s) - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            code = None
            stop(process)
        row: dict[str, object] = {
            "job": "ended",
            "name": job.name,
            "seconds": round(time.monotonic() - started, 1),
            "code": code,
        }
        if job.name.startswith("kit"):
            row |= count_outcomes((rows.path.parent / f"{job.name}.txt").read_text())
        rows.add(row)
        if code == 0:
            finished.add(job.name)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a job so that pytest reports its failures, then kill the remaining processes."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=8)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def count_outcomes(text: str) -> dict[str, object]:
    """Count passed tests and list failed ones in the kit's output."""
    outcomes = re.findall(r"::(\S+) (PASSED|FAILED|ERROR)", text)
    failed = [test for test, outcome in outcomes if outcome != "PASSED"]
    return {"passed": len(outcomes) - len(failed), "failed": failed}


def rank_main(
    rank: int, world_size: int, port: int, path: str, kind: str, layouts: list[str]
) -> None:
    """Run a job on one rank."""
    set_rank_variables(rank, world_size=world_size, port=port)
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    for layout in layouts:
        RANK_JOBS[kind](Rows(path=Path(path)), rank, world_size, layout)
    dist.destroy_process_group()


@contextmanager
def open_engine(engine: BaseEngine) -> Iterator[BaseEngine]:
    """Initialize the engine with an objective, and close it on exit."""
    engine.init_model()
    engine.set_loss_fn(ClippedPolicy())
    try:
        yield engine
    finally:
        engine.close()


def make_case_config(case: Case, layout: str) -> MegatronConfig:
    """Build the configuration of a case in a layout."""
    return make_megatron_config(
        case.architecture,
        layout,
        precision=PrecisionSpec(compute=case.compute),
        lora=case.lora,
        layers=case.layers,
        float8=case.float8,
    )


def make_megatron_config(
    architecture: Mapping[str, Scalar], layout: str, **changes: object
) -> MegatronConfig:
    """Build the configuration of a model in a layout on CUDA."""
    base = MegatronConfig(
        model=ModelSpec(architecture=architecture), optimizer=OptimizerSpec(lr=1e-3), device="cuda"
    )
    return replace(base, **LAYOUTS[layout], **changes)  # type: ignore[arg-type]


def record_norms(rows: Rows, rank: int, world_size: int, layout: str) -> None:
    """Record gradient norms of five updates for each case; on a single rank also FSDPEngine's."""
    for case in (case for case in CASES if case.supports(layout)):
        if case.layers == "transformer_engine" and find_spec("transformer_engine") is None:
            continue
        config = make_case_config(case, layout)
        engines: dict[str, BaseEngine] = {"megatron": MegatronEngine(config)}
        if layout == "single" and not case.has_experts and case.layers == "torch":
            shared = {
                "model": config.model,
                "optimizer": config.optimizer,
                "precision": config.precision,
                "lora": config.lora,
            }
            engines["fsdp"] = FSDPEngine(FSDPConfig(device="cuda", **shared))  # type: ignore[arg-type]
        for name, engine in engines.items():
            with open_engine(engine):
                packed = engine.shard_data(small_batch(), max_tokens=1024)
                norms = [run_update(engine, packed) for _ in range(5)]
            if rank == 0:
                rows.add(
                    {
                        "job": "norms",
                        "contender": name,
                        "layout": layout,
                        "world_size": world_size,
                        "case": case.name,
                        "norms": norms,
                    }
                )


def time_updates(rows: Rows, rank: int, world_size: int, layout: str) -> None:
    """Time updates of a 0.5B model by the bare loop, MegatronEngine and FSDPEngine."""
    rate = measure_gemm_rate(FULL)
    fields = LAYOUTS[layout]
    tensor, pipeline = (
        int(str(fields.get(f"{axis}_parallel", 1))) for axis in ("tensor", "pipeline")
    )
    replica = tensor * pipeline
    measure = partial(
        report_speed, rows, rank=rank, layout=layout, num_replicas=world_size // replica, gemm=rate
    )
    time_bare_loop(measure, lengths=long_tail(rank // replica), tensor=tensor, pipeline=pipeline)
    architecture: dict[str, Scalar] = {"model_type": "qwen2", "tie_word_embeddings": True, **SHAPE}
    cases: dict[str, Callable[[], BaseEngine]] = {
        "engine": lambda: MegatronEngine(
            make_megatron_config(architecture, layout, compile_head=True)
        ),
        "fsdp": lambda: FSDPEngine(
            FSDPConfig(
                model=ModelSpec(architecture=architecture),
                optimizer=OptimizerSpec(lr=1e-3),
                device="cuda",
                reshard_after_forward=False,
            )
        ),
        "engine, eager head": lambda: MegatronEngine(make_megatron_config(architecture, layout)),
    }
    for name, make in cases.items():
        with open_engine(make()) as engine:
            lengths = long_tail(engine.topology.dp.rank)
            # Seed by data-parallel rank, because all ranks of a replica need the same tokens.
            torch.manual_seed(engine.topology.dp.rank)
            packed = policy_batch(lengths, world_size=engine.topology.dp.size)
            measure(
                name,
                lambda e=engine, p=packed: run_update(e, p, (HeadOutput.ENTROPY,)),  # type: ignore[misc]
                lengths=lengths,
                num_replicas=engine.topology.dp.size,
            )


def time_bare_loop(
    measure: Callable[..., None], *, lengths: list[list[int]], tensor: int, pipeline: int
) -> None:
    """Time the bare megatron-core loop."""
    from tools.gpu.megatron_loop import BareLoop, make_pack

    torch.manual_seed(0)
    packs = [
        make_pack(torch.randint(0, SHAPE["vocab_size"], (sum(sizes),), device="cuda"), sizes)
        for sizes in lengths
    ]
    loop = BareLoop(SHAPE, tensor=tensor, pipeline=pipeline, max_tokens=MICRO_BATCH_TOKENS)
    measure("bare", lambda: loop.update(packs), lengths=lengths)
    loop.close()


def report_speed(
    rows: Rows,
    contender: str,
    run_once: Callable[[], float],
    *,
    rank: int,
    layout: str,
    num_replicas: int,
    gemm: float,
    lengths: list[list[int]],
) -> None:
    """Report the tokens/s per GPU of the median update, and its fraction of the matmul rate."""
    for _ in range(3):
        norm = run_once()
    torch.cuda.reset_peak_memory_stats()
    seconds = measure_times(FULL, run_once, repeats=6)[3]
    world_size = dist.get_world_size()
    tokens = sum(map(sum, lengths)) * num_replicas / world_size
    per_token, attention = compute_flops(SHAPE, lengths)
    if rank == 0:
        rows.add(
            {
                "job": "speed",
                "contender": contender,
                "layout": layout,
                "world_size": world_size,
                "tokens_per_s_and_gpu": round(tokens / seconds),
                "mfu": round(
                    (per_token * tokens + attention * num_replicas / world_size) / seconds / gemm, 3
                ),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                "grad_norm": norm,
                "ok": math.isfinite(norm),
            }
        )


RANK_JOBS: Mapping[str, Callable[[Rows, int, int, str], None]] = {
    "norms": record_norms,
    "speed": time_updates,
}


def format_table(rows: list[dict[str, object]]) -> str:
    """Format speeds relative to the bare loop, differences of gradient norms, and exit codes."""
    lines = []
    base = {
        row["layout"]: row["tokens_per_s_and_gpu"]
        for row in rows
        if row.get("job") == "speed" and row["contender"] == "bare"
    }
    for row in (row for row in rows if row.get("job") == "speed"):
        base_rate = base.get(row["layout"])
        ratio = (
            f"{float(str(row['tokens_per_s_and_gpu'])) / float(str(base_rate)):.3f}"
            if base_rate
            else "?"
        )
        lines.append(
            f"{row['layout']:12} {row['contender']:20} {row['tokens_per_s_and_gpu']:>8} tok/s/GPU  "
            f"MFU {row['mfu']}  relative to bare {ratio}"
        )
    norms_rows = [row for row in rows if row.get("job") == "norms"]
    single_rank_norms = {
        row["case"]: row["norms"]
        for row in norms_rows
        if (row["contender"], row["layout"]) == ("megatron", "single")
    }
    for row in norms_rows:
        verdict = (
            "agree"
            if norms_agree(row["norms"], single_rank_norms.get(row["case"]), case=str(row["case"]))
            else "DIFFER"
        )
        lines.append(
            f"norms {row['contender']} {row['layout']} {row['case']}: {verdict} {row['norms']}"
        )
    lines += [f"{row}" for row in rows if row.get("job") == "ended"]
    return "\n".join(lines)


def norms_agree(actual: object, expected: object, *, case: str) -> bool:
    """Return whether the gradient norms of the first updates agree.

    Rounding differences grow with every update: three are compared in fp32, two in 16 bits.
    """
    near, count = (1e-4, 3) if case.endswith("fp32") else (2e-2, 2)
    if not isinstance(actual, list) or not isinstance(expected, list):
        return False
    return all(
        math.isclose(a, b, rel_tol=near)
        for a, b in zip(actual[:count], expected[:count], strict=True)
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--ranks",
        choices=RANK_JOBS,
        help="run this job on every visible GPU instead of the phases",
    )
    parser.add_argument(
        "--only",
        help="comma-separated names of jobs, as in the rows of an earlier run; default: all",
    )
    parser.add_argument(
        "--limit", type=float, default=470.0, help="seconds for all phases; default: 470"
    )
    parser.add_argument(
        "--layouts", default="single", help="comma-separated layouts of the job of --ranks"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(path=options.out / "rows.jsonl")
    if options.ranks:
        port = find_free_port()
        world_size = torch.cuda.device_count()
        spawn(
            rank_main,
            args=(
                world_size,
                port,
                str(rows.path),
                options.ranks,
                options.layouts.split(","),
            ),
            nprocs=world_size,
        )
        return
    rows.add(
        {
            "job": "machine",
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
        }
    )
    deadline = time.monotonic() + options.limit
    finished = FinishedJobs(path=options.out / "finished.jsonl")
    for phase in list_phases(
        torch.cuda.device_count(), options.only.split(",") if options.only else None
    ):
        jobs = [job for job in phase if not finished.contain(job.name)]
        left_s = deadline - time.monotonic()
        if left_s < SHORTEST_PHASE_S:
            rows.add({"job": "skipped", "names": [job.name for job in jobs]})
            continue
        run_phase(jobs, rows, finished=finished, left_s=left_s)
    print(format_table(rows.read()))


if __name__ == "__main__":
    main()
