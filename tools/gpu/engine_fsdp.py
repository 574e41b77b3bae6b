"""FSDPEngine on CUDA: does it compute the same, does NCCL change anything, and how fast is an update beside a plain loop?

    PYTHONPATH=packages/engine-api/src:packages/engine-fsdp/src python -m tools.gpu.engine_fsdp --out FOLDER [--jobs head,ranks,...]

Needs torch with CUDA and transformers; uses 1, 2 and 4 GPUs where there are that many. Every row is appended to FOLDER/rows.jsonl as
soon as it is measured, and a table comes last.
"""

import argparse
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

from temper_engine_api.batch import PackedBatch
from temper_engine_api.objective import Query
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec, ResidencySpec, Scalar
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.fused_head import linear_logprob
from tools.gpu.workload import (
    MICRO_BATCH_TOKENS,
    SHAPES,
    SMALL,
    ClippedPolicy,
    Rows,
    gemm_rate,
    long_tail,
    policy_batch,
    report_speed,
    small_batch,
    timed,
)


def small_config(**changes: object) -> FSDPConfig:
    """A small model on CUDA."""
    base = FSDPConfig(model=ModelSpec(architecture=SMALL), optimizer=OptimizerSpec(lr=1e-3), device="cuda")
    return replace(base, **changes)  # type: ignore[arg-type]


def started(config: FSDPConfig) -> FSDPEngine:
    """An engine with its objective."""
    engine = FSDPEngine(config)
    engine.init_model()
    engine.set_loss_fn(ClippedPolicy())
    return engine


def update(engine: FSDPEngine, batch: PackedBatch, outputs: tuple[Query, ...] = ()) -> float:
    """One update that also returns these outputs; the gradient norm."""
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(batch, forward_only=False, outputs=outputs)
    return engine.optimizer_step()


def logprobs(config: FSDPConfig) -> Tensor:
    """Log-probs and entropies of the small batch, one after the other."""
    engine = started(config)
    with engine.eval_mode():
        packed = engine.shard_data(small_batch(), max_tokens=1024)
        result = engine.forward_backward_batch(packed, forward_only=True, outputs=[Query.LOGPROB, Query.ENTROPY])
    assert result.outputs is not None
    ordered = result.outputs.in_order_of(small_batch().sample_ids)
    engine.close()
    return torch.stack([ordered.columns[Query.LOGPROB], ordered.columns[Query.ENTROPY]])


def job_attention(rows: Rows) -> None:
    """Each kernel and precision against float32 on the CPU."""
    for family in ("qwen2", "qwen3", "llama"):
        model = ModelSpec(architecture={**SMALL, "model_type": family})
        exact = logprobs(small_config(model=model, device="cpu", precision=PrecisionSpec(compute="fp32")))
        for compute, kernel, limit in (("fp32", "sdpa_varlen", 1e-3), ("bf16", "sdpa_varlen", 0.1), ("bf16", "torch_varlen", 0.1)):
            ours = logprobs(small_config(model=model, precision=PrecisionSpec(compute=compute), attention=kernel))  # type: ignore[arg-type]
            worst = float((ours - exact).abs().max())
            rows.add({"job": "attention", "model": family, "kernel": kernel, "compute": compute, "worst": worst, "ok": worst < limit})


def job_head(rows: Rows) -> None:
    """The fused head in bf16 at the half-billion shape: exactness at 2048 positions, time and memory at 16384."""
    hidden = torch.randn(MICRO_BATCH_TOKENS, 896, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(151936, 896, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, 151936, (MICRO_BATCH_TOKENS,), device="cuda")
    few = slice(0, 2048)
    fused = linear_logprob(hidden[few], weight, labels[few], wants_entropy=True)
    wide = torch.log_softmax((hidden[few] @ weight.t()).float(), -1)
    naive, entropy = wide.gather(1, labels[few, None])[:, 0], -(wide.exp() * wide).sum(-1)
    ours, theirs = (torch.autograd.grad(x.sum(), (hidden, weight), retain_graph=True) for x in (fused.logprob, naive))
    worst = max(float((fused.logprob - naive).detach().abs().max()), float((fused.entropy - entropy).detach().abs().max()))
    gradient = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(ours, theirs, strict=True))
    rows.add({"job": "head", "what": "exactness", "worst": worst, "gradient": gradient, "ok": worst < 1e-3 and gradient < 1e-2})
    del wide, naive, entropy, fused, ours, theirs

    def once() -> None:
        hidden.grad = weight.grad = None
        linear_logprob(hidden, weight, labels, wants_entropy=True).logprob.sum().backward()

    once()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = timed(once, repeats=5)
    flops = 8 * hidden.shape[0] * weight.numel()  # forward, its recomputation, and two products in the backward pass
    rows.add({
        "job": "head", "what": "speed", "seconds": seconds, "tflops": flops / seconds / 1e12,
        "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
    })  # fmt: skip


def job_residency(rows: Rows) -> None:
    """What stays on the device between contexts with everything offloaded."""
    engine = started(small_config(residency=ResidencySpec(offload_parameters=True, offload_optimizer=True)))
    packed = engine.shard_data(small_batch(), max_tokens=1024)
    here = started(small_config())
    norms = [(update(engine, packed), update(here, packed)) for _ in range(3)]
    kept = sum(t.untyped_storage().nbytes() for t in (*engine._parts.model_tensors(), *engine._parts.optimizer_tensors()))
    rows.add({"job": "residency", "bytes_on_device": kept, "ok": kept == 0 and all(a == b for a, b in norms)})
    engine.close()
    here.close()


def rank_main(rank: int, world_size: int, port: int, path: str, job: str, gemm: float) -> None:
    """One rank of a job that needs several."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    # One group for all engines of this process: they join it, and leave it as it is.
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    RANK_JOBS[job](Rows(path=Path(path)), rank, world_size, gemm)
    torch.distributed.destroy_process_group()


def ranks_agree(rows: Rows, rank: int, world_size: int, gemm: float) -> None:
    """Gradient norms of five updates, and of a sixth after saving and loading."""
    for compute in ("fp32", "bf16"):
        engine = started(small_config(precision=PrecisionSpec(compute=compute)))
        packed = engine.shard_data(small_batch(), max_tokens=1024)
        norms = [update(engine, packed) for _ in range(5)]
        folder = Path(tempfile.gettempdir(), f"temper-{os.environ['MASTER_PORT']}-{compute}")
        step = engine.save_checkpoint(str(folder), global_step=5)
        goes_on = update(engine, packed)
        engine.load_checkpoint(step)
        resumed = update(engine, packed)
        if rank == 0:
            row = {"job": "ranks", "world_size": world_size, "compute": compute, "norms": norms}
            shutil.rmtree(folder)
            rows.add({**row, "ok": math.isclose(goes_on, resumed, rel_tol=1e-5 if compute == "fp32" else 1e-3)})
        engine.close()


ENGINES: Mapping[str, Mapping[str, object]] = {
    "engine": {},
    "engine, compiled": {"compile_layers": True, "head_keeps_logits": True},
}
"""Settings whose updates are timed."""


def ranks_agree_in_strategies(rows: Rows, rank: int, world_size: int, gemm: float) -> None:
    """Norms of five updates with each strategy, precision and residency, and of a sixth after a save in the background."""
    everything = ResidencySpec(offload_parameters=True, offload_optimizer=True)
    ahead = ResidencySpec(offload_optimizer=True, load_optimizer_in="train_mode")
    cases: dict[str, dict[str, object]] = {
        "fsdp2": {},
        "fsdp1": {"strategy": "fsdp1"},
        "fsdp1, replicated": {"strategy": "fsdp1", "fsdp_size": 1},
        "fsdp2, replicated": {"fsdp_size": 1},
        "fsdp2, kept gathered": {"reshard_after_forward": False, "forward_prefetch": 1},
        "fsdp2, offloaded": {"residency": everything},
        "fsdp2, loaded ahead": {"residency": ahead},
        "fsdp2, updated on the CPU": {"residency": ResidencySpec(optimizer_on_cpu=True)},
        "fsdp1, offloaded": {"strategy": "fsdp1", "residency": everything},
    }
    if world_size == 4:
        cases["fsdp2, hybrid"] = {"fsdp_size": 2}
        cases["fsdp1, hybrid"] = {"strategy": "fsdp1", "fsdp_size": 2}
        cases["fsdp2, kept on two"] = {"reshard_after_forward": 2}
    for compute in ("fp32", "fp16"):
        for name, changes in cases.items():
            engine = started(small_config(precision=PrecisionSpec(compute=compute), **changes))
            packed = engine.shard_data(small_batch(), max_tokens=1024)
            norms = [update(engine, packed) for _ in range(5)]
            folder = Path(
                tempfile.gettempdir(), f"temper-{os.environ['MASTER_PORT']}-{compute}-{name.replace(', ', '-').replace(' ', '-')}"
            )
            step = engine.save_checkpoint(str(folder), global_step=5, in_background=True)
            goes_on = [update(engine, packed) for _ in range(2)]
            engine.load_checkpoint(step)
            resumed = [update(engine, packed) for _ in range(2)]
            if rank == 0:
                shutil.rmtree(folder)
                row = {"job": "strategies", "case": name, "world_size": world_size, "compute": compute, "norms": norms}
                near = 1e-4 if compute == "fp32" else 2e-2
                rows.add({**row, "ok": all(math.isclose(a, b, rel_tol=near) for a, b in zip(goes_on, resumed, strict=True))})
            engine.close()
            dist.barrier()


def background_save(rows: Rows, rank: int, world_size: int, gemm: float) -> None:
    """How long training stands still for a save at the half-billion shape, in the foreground and in the background."""
    architecture: dict[str, Scalar] = {"model_type": "qwen2", "tie_word_embeddings": True, **SHAPES["0.5B"]}
    engine = started(small_config(model=ModelSpec(architecture=architecture)))
    packed = policy_batch(long_tail(rank), world_size=world_size)
    folder = Path(tempfile.gettempdir(), f"temper-{os.environ['MASTER_PORT']}-saves")
    for _ in range(2):
        update(engine, packed)
    plain_s = timed(partial(update, engine, packed), repeats=3)
    for step, in_background in ((1, False), (2, True), (3, True)):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        engine.save_checkpoint(str(folder), global_step=step, in_background=in_background, max_ckpt_to_keep=1)
        stands_still_s = time.perf_counter() - begun
        during_s = timed(partial(update, engine, packed), repeats=1)
        engine.finish_saving()
        if rank == 0:
            rows.add({
                "job": "background", "world_size": world_size, "in_background": in_background, "stands_still_s": stands_still_s,
                "update_s": plain_s, "update_during_s": during_s, "whole_save_s": time.perf_counter() - begun,
            })  # fmt: skip
    engine.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


def throughput(rows: Rows, rank: int, world_size: int, gemm: float, *, shape: str) -> None:
    """The RL update of the engine: log-prob with gradient, entropy, clipped objective."""
    lengths = long_tail(rank)
    architecture: dict[str, Scalar] = {"model_type": "qwen2", "tie_word_embeddings": True, **SHAPES[shape]}
    for name, settings in ENGINES.items():
        engine = started(small_config(model=ModelSpec(architecture=architecture), reshard_after_forward=False, **settings))
        packed = policy_batch(lengths, world_size=world_size)
        once = partial(update, engine, packed, (Query.ENTROPY,))
        report_speed(rows, once, name=name, rank=rank, shape=shape, world_size=world_size, gemm=gemm, lengths=lengths)
        if world_size == 1:
            write_profile(rows, once, name=f"{shape}, {name}")
        engine.close()
        del engine, once


def write_profile(rows: Rows, once: Callable[[], float], *, name: str) -> None:
    """The kernels of one update by the time they take, as text beside the rows."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        once()
        torch.cuda.synchronize()
    told = seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90)
    rows.path.with_name(f"profile {name}.txt").write_text(told)


def plain(rows: Rows, rank: int, world_size: int, gemm: float, *, shape: str) -> None:
    """The plain loop, eager and compiled."""
    from tools.gpu.plain_loop import PlainLoop

    lengths = long_tail(rank)
    tokens = [torch.randint(0, 151936, (sum(sizes),), device="cuda") for sizes in lengths]
    for is_compiled in (False, True):
        loop = PlainLoop(SHAPES[shape], is_compiled=is_compiled)
        report_speed(rows, partial(loop.update, tokens, lengths), name="plain, compiled" if is_compiled else "plain",
                     rank=rank, shape=shape, world_size=world_size, gemm=gemm, lengths=lengths)  # fmt: skip
        del loop


def compiled_agrees(rows: Rows, rank: int, world_size: int, gemm: float) -> None:
    """Gradient norms of three updates of a small model, compiled and not, in float32 and bf16."""
    for compute in ("fp32", "bf16"):
        found = {}
        for name, settings in ENGINES.items():
            engine = started(small_config(precision=PrecisionSpec(compute=compute), **settings))
            packed = engine.shard_data(small_batch(), max_tokens=1024)
            found[name] = [update(engine, packed) for _ in range(3)]
            engine.close()
        limit = 1e-4 if compute == "fp32" else 2e-2
        same = all(math.isclose(a, b, rel_tol=limit) for norms in found.values() for a, b in zip(norms, found["engine"], strict=True))
        if rank == 0:
            rows.add({"job": "compiled", "world_size": world_size, "compute": compute, "norms": found, "ok": same})


RANK_JOBS: Mapping[str, Callable[[Rows, int, int, float], None]] = {
    "ranks": ranks_agree,
    "compiled": compiled_agrees,
    "strategies": ranks_agree_in_strategies,
    "background": background_save,
    **{f"throughput-{shape}": partial(throughput, shape=shape) for shape in SHAPES},
    **{f"plain-{shape}": partial(plain, shape=shape) for shape in SHAPES},
}
ALONE_JOBS: Mapping[str, Callable[[Rows], None]] = {
    "attention": job_attention,
    "head": job_head,
    "residency": job_residency,
}


def disagreements(rows: list[dict[str, object]]) -> list[str]:
    """World sizes whose gradient norms are not those of one rank; the first updates only, before rounding grows."""
    alone = {(row["job"], row["compute"]): row["norms"] for row in reversed(rows) if row.get("norms") and row["world_size"] == 1}
    found = []
    for row in rows:
        if row["job"] not in ("ranks", "strategies"):
            continue
        ours, theirs = row["norms"], alone[row["job"], row["compute"]]
        assert isinstance(ours, list)
        assert isinstance(theirs, list)
        # Rounding to bf16 grows with every update, so there only the first two are comparable.
        limit, count = (1e-4, 3) if row["compute"] == "fp32" else (2e-2, 2)
        if any(not math.isclose(a, b, rel_tol=limit) for a, b in zip(ours[:count], theirs[:count], strict=True)):
            found.append(f"{row.get('case', '')} {row['compute']} at {row['world_size']} ranks: norms {ours}, alone {theirs}")
    return found


def table(rows: list[dict[str, object]]) -> str:
    """Rows as text, what failed last."""
    lines = [f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.cuda.get_device_name()}"]
    lines += ["  ".join(f"{key}={value}" for key, value in row.items()) for row in rows]
    failed = [f"not ok: {row}" for row in rows if row.get("ok") is False] + disagreements(rows)
    return "\n".join([*lines, *failed, f"{len(failed)} failures"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--world-sizes", default="1,2,4", help="of jobs that run on several GPUs; those beyond this machine's are left out")
    parser.add_argument("--jobs", default=",".join((*ALONE_JOBS, *RANK_JOBS)))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(path=options.out / "rows.jsonl")
    gemm = gemm_rate()
    rows.add({"job": "gemm", "tflops": gemm / 1e12})
    for job in options.jobs.split(","):
        if job in ALONE_JOBS:
            ALONE_JOBS[job](rows)
            continue
        for world_size in (n for n in map(int, options.world_sizes.split(",")) if n <= torch.cuda.device_count()):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            spawn(rank_main, args=(world_size, port, str(rows.path), job, gemm), nprocs=world_size)
    print(table(rows.read()))


if __name__ == "__main__":
    main()
