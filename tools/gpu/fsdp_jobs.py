"""Run one measurement of FSDPEngine on CUDA or its rehearsal on a CPU, for `engine_fsdp`."""

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import Qwen2Config

from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import ModelSpec, OffloadSpec, OptimizerSpec, PrecisionSpec, Scalar
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.model.token_logprobs import chunked_logprobs
from tools.gpu.fsdp_heads import compare_heads
from tools.gpu.fsdp_timing import RankContext, measure_times, report_speed, synchronize
from tools.gpu.fsdp_workload import FULL, REHEARSAL, Scale, mini_batch, pack_local_batch
from tools.gpu.plain_loop import PlainLoop
from tools.gpu.workload import (
    SMALL,
    ClippedPolicy,
    Rows,
    find_free_port,
    run_update,
    set_rank_variables,
    small_batch,
)

SETTINGS: Mapping[str, object] = {"reshard_after_forward": False}
"""Engine settings of all speed measurements."""
COMPILED: Mapping[str, object] = {"compile_layers": True, "head_keeps_logits": True}
"""Additional settings of the compiled engine."""


def small_config(scale: Scale, **changes: object) -> FSDPConfig:
    """Build the configuration of a small model."""
    base = FSDPConfig(
        model=ModelSpec(architecture=SMALL), optimizer=OptimizerSpec(lr=1e-3), device=scale.device
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def large_config(scale: Scale, shape: str, **changes: object) -> FSDPConfig:
    """Build the configuration of a model whose speed is measured."""
    architecture: dict[str, Scalar] = {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        **scale.shapes[shape],
    }
    return small_config(
        scale, model=ModelSpec(architecture=architecture), **{**SETTINGS, **changes}
    )


def start_engine(config: FSDPConfig) -> FSDPEngine:
    """Build an engine and set its objective."""
    engine = FSDPEngine(config)
    engine.init_model()
    engine.set_loss_fn(ClippedPolicy())
    return engine


def compute_logprobs(config: FSDPConfig) -> Tensor:
    """Return log-probs and entropies of the small batch, as two rows."""
    engine = start_engine(config)
    with engine.eval_mode():
        packed = engine.shard_data(small_batch(), max_tokens=1024)
        result = engine.forward_backward_batch(
            packed, forward_only=True, outputs=[HeadOutput.LOGPROB, HeadOutput.ENTROPY]
        )
    assert result.outputs is not None
    ordered = result.outputs.reorder(small_batch().sample_ids)
    engine.close()
    return torch.stack([ordered.columns[HeadOutput.LOGPROB], ordered.columns[HeadOutput.ENTROPY]])


def check_attention(context: RankContext) -> None:
    """Compare each attention kernel and precision with float32 on the CPU."""
    kernels = [("fp32", "sdpa_varlen", 1e-3), ("bf16", "sdpa_varlen", 0.1)]
    kernels += [("bf16", "torch_varlen", 0.1)] if context.scale.device == "cuda" else []
    for family in ("qwen2", "qwen3", "llama"):
        model = ModelSpec(architecture={**SMALL, "model_type": family})
        expected = compute_logprobs(
            small_config(
                context.scale, model=model, device="cpu", precision=PrecisionSpec(compute="fp32")
            )
        )
        for compute, kernel, limit in kernels:
            precision = PrecisionSpec(compute=compute)  # type: ignore[arg-type]
            actual = compute_logprobs(
                small_config(
                    context.scale, model=model, precision=precision, check_attention=kernel
                )
            )
            worst = float((actual - expected).abs().max())
            context.rows.add(
                {
                    "job": "attention",
                    "model": family,
                    "kernel": kernel,
                    "compute": compute,
                    "worst": worst,
                    "ok": worst < limit,
                }
            )


def check_head(context: RankContext) -> None:
    """Check the fused head in bf16 against plain torch at 2048 positions, and time it when full."""
    scale, shape = context.scale, context.scale.shapes["0.5B"]
    positions, vocabulary, width = (
        scale.micro_batch_tokens,
        shape["vocab_size"],
        shape["hidden_size"],
    )
    hidden = torch.randn(
        positions, width, device=scale.device, dtype=torch.bfloat16
    ).requires_grad_()
    weight = (
        (0.02 * torch.randn(vocabulary, width, device=scale.device)).bfloat16().requires_grad_()
    )
    labels = torch.randint(0, vocabulary, (positions,), device=scale.device)
    few = slice(0, 2048)
    fused = chunked_logprobs(hidden[few], weight, labels[few], needs_entropy=True)
    wide = torch.log_softmax((hidden[few] @ weight.t()).float(), -1)
    plain, entropy = wide.gather(1, labels[few, None])[:, 0], -(wide.exp() * wide).sum(-1)
    fused_gradients, plain_gradients = (
        torch.autograd.grad(x.sum(), (hidden, weight), retain_graph=True)
        for x in (fused.logprob, plain)
    )
    worst = max(
        float((fused.logprob - plain).detach().abs().max()),
        float((fused.entropy - entropy).detach().abs().max()),
    )
    gradient = max(
        float((a - b).float().norm() / b.float().norm())
        for a, b in zip(fused_gradients, plain_gradients, strict=True)
    )
    context.rows.add(
        {
            "job": "head",
            "what": "exactness",
            "worst": worst,
            "gradient": gradient,
            "ok": worst < 1e-3 and gradient < 1e-2,
        }
    )
    # Free these before the peak memory of the fused head is measured.
    del wide, plain, entropy, fused, fused_gradients, plain_gradients

    def run_once() -> None:
        hidden.grad = weight.grad = None
        chunked_logprobs(hidden, weight, labels, needs_entropy=True).logprob.sum().backward()

    run_once()
    if scale.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        initial_bytes = torch.cuda.memory_allocated()
    seconds = measure_times(scale, run_once, repeats=5)[2]
    # Four products of two FLOPs: forward, its recomputation, and two in the backward pass.
    flops = 8 * positions * weight.numel()
    peak = (
        (torch.cuda.max_memory_allocated() - initial_bytes) / 2**30
        if scale.device == "cuda"
        else None
    )
    context.rows.add(
        {
            "job": "head",
            "what": "speed",
            "seconds": seconds,
            "tflops": flops / seconds / 1e12,
            "peak_gib": peak,
        }
    )


def check_offload(context: RankContext) -> None:
    """Check that offloading leaves no tensor on the device and does not change gradient norms."""
    away = OffloadSpec(parameters=True, optimizer=True)
    engine = start_engine(small_config(context.scale, offload=away))
    packed = engine.shard_data(small_batch(), max_tokens=1024)
    here = start_engine(small_config(context.scale))
    norms = [(run_update(engine, packed), run_update(here, packed)) for _ in range(3)]
    tensors = (
        *engine._components.iterate_model_tensors(),
        *engine._components.iterate_optimizer_tensors(),
    )
    kept = sum(t.untyped_storage().nbytes() for t in tensors)
    context.rows.add(
        {
            "job": "offload",
            "bytes_on_device": kept,
            "ok": kept == 0 and all(a == b for a, b in norms),
        }
    )
    here.close()
    engine.close()


def check_ranks(context: RankContext) -> None:
    """Record gradient norms of five updates, and compare the sixth with one after a reload."""
    for compute in ("fp32", "bf16"):
        engine = start_engine(small_config(context.scale, precision=PrecisionSpec(compute=compute)))
        packed = engine.shard_data(small_batch(), max_tokens=1024)
        norms = [run_update(engine, packed) for _ in range(5)]
        folder = _shared_folder(f"ranks-{compute}")
        step = engine.save_checkpoint(str(folder), global_step=5)
        continued = run_update(engine, packed)
        engine.load_checkpoint(step)
        resumed = run_update(engine, packed)
        if context.is_first:
            row = {
                "job": "ranks",
                "world_size": context.world_size,
                "compute": compute,
                "norms": norms,
            }
            shutil.rmtree(folder)
            context.rows.add(
                {
                    **row,
                    "ok": math.isclose(
                        continued, resumed, rel_tol=1e-5 if compute == "fp32" else 1e-3
                    ),
                }
            )
        engine.close()


def _shared_folder(name: str) -> Path:
    # All ranks must name the same folder; the port is the same on all ranks of a job.
    return Path(tempfile.gettempdir(), f"temper-{os.environ['MASTER_PORT']}-{name}")


def _list_strategies(world_size: int) -> Mapping[str, Mapping[str, object]]:
    everything = OffloadSpec(parameters=True, optimizer=True)
    ahead = OffloadSpec(optimizer=True, load_optimizer_in="train_mode")
    cases: dict[str, dict[str, object]] = {
        "fsdp2": {},
        "fsdp1": {"strategy": "fsdp1"},
        "fsdp1, replicated": {"strategy": "fsdp1", "fsdp_size": 1},
        "fsdp2, replicated": {"fsdp_size": 1},
        "fsdp2, kept gathered": {"reshard_after_forward": False, "forward_prefetch": 1},
        "fsdp2, offloaded": {"offload": everything},
        "fsdp2, loaded ahead": {"offload": ahead},
        "fsdp2, updated on the CPU": {"offload": OffloadSpec(optimizer_on_cpu=True)},
        "fsdp1, offloaded": {"strategy": "fsdp1", "offload": everything},
    }
    if world_size == 4:
        cases["fsdp2, hybrid"] = {"fsdp_size": 2}
        cases["fsdp1, hybrid"] = {"strategy": "fsdp1", "fsdp_size": 2}
        cases["fsdp2, kept on two"] = {"reshard_after_forward": 2}
    return cases


def check_strategies(context: RankContext) -> None:
    """Record norms with each strategy, precision and offload, and check a background save."""
    for compute in ("fp32", "fp16"):
        for name, changes in _list_strategies(context.world_size).items():
            engine = start_engine(
                small_config(context.scale, precision=PrecisionSpec(compute=compute), **changes)
            )
            packed = engine.shard_data(small_batch(), max_tokens=1024)
            norms = [run_update(engine, packed) for _ in range(5)]
            folder = _shared_folder(f"{compute}-{name.replace(', ', '-').replace(' ', '-')}")
            step = engine.save_checkpoint(str(folder), global_step=5, in_background=True)
            continued = [run_update(engine, packed) for _ in range(2)]
            engine.load_checkpoint(step)
            resumed = [run_update(engine, packed) for _ in range(2)]
            if context.is_first:
                shutil.rmtree(folder)
                row = {
                    "job": "strategies",
                    "case": name,
                    "world_size": context.world_size,
                    "compute": compute,
                    "norms": norms,
                }
                near = 1e-4 if compute == "fp32" else 2e-2
                context.rows.add(
                    {
                        **row,
                        "ok": all(
                            math.isclose(a, b, rel_tol=near)
                            for a, b in zip(continued, resumed, strict=True)
                        ),
                    }
                )
            engine.close()
            dist.barrier()


def time_background_save(context: RankContext) -> None:
    """Time how long a save of the 0.5B model blocks training, in foreground and background."""
    scale = context.scale
    engine = start_engine(large_config(scale, "0.5B"))
    packed = engine.shard_data(
        mini_batch(scale, scale.shapes["0.5B"], world_size=context.world_size),
        max_tokens=scale.micro_batch_tokens,
    )
    folder = _shared_folder("saves")
    for _ in range(2):
        run_update(engine, packed)
    plain_s = measure_times(scale, partial(run_update, engine, packed), repeats=3)[1]
    for step, in_background in ((1, False), (2, True), (3, True)):
        synchronize(scale)
        started = time.perf_counter()
        engine.save_checkpoint(
            str(folder), global_step=step, in_background=in_background, max_ckpt_to_keep=1
        )
        blocked_s = time.perf_counter() - started
        (during_s,) = measure_times(scale, partial(run_update, engine, packed), repeats=1)
        engine.finish_saving()
        if context.is_first:
            context.rows.add(
                {
                    "job": "background",
                    "world_size": context.world_size,
                    "in_background": in_background,
                    "blocked_s": blocked_s,
                    "update_s": plain_s,
                    "update_during_s": during_s,
                    "total_save_s": time.perf_counter() - started,
                }
            )
    engine.close()
    dist.barrier()
    if context.is_first:
        shutil.rmtree(folder)


def time_engine(
    context: RankContext,
    *,
    shape: str,
    is_compiled: bool = True,
    has_liger: bool = False,
    layers_per_group: int = 1,
) -> None:
    """Time the engine's update: log-probs with gradient, entropy and the clipped objective."""
    scale = context.scale
    batch = mini_batch(scale, scale.shapes[shape], world_size=context.world_size)
    changes = COMPILED if is_compiled and scale.compiles else {}
    changes = {
        **changes,
        "liger_layers": has_liger and scale.device == "cuda",
        "wrap_together": layers_per_group,
    }
    engine = start_engine(large_config(scale, shape, **changes))
    packed = engine.shard_data(batch, max_tokens=scale.micro_batch_tokens)
    run_once = partial(run_update, engine, packed, (HeadOutput.ENTROPY,))
    contender = (
        "engine, compiled" if is_compiled else "engine, Liger" if has_liger else "engine, eager"
    )
    contender += f", {layers_per_group} layers per group" if layers_per_group > 1 else ""
    report_speed(context, run_once, contender=contender, shape=shape, batch=batch)
    engine.close()


def time_plain_loop(context: RankContext, *, shape: str, is_compiled: bool = True) -> None:
    """Time the plain loop on the same samples, distributed by the same plan."""
    scale = context.scale
    batch = mini_batch(scale, scale.shapes[shape], world_size=context.world_size)
    packed = pack_local_batch(scale, batch, rank=context.rank, world_size=context.world_size)
    config = Qwen2Config(**scale.shapes[shape], tie_word_embeddings=True)
    loop = PlainLoop(config, device=scale.device, is_compiled=is_compiled and scale.compiles)
    run_once = partial(loop.update, packed)
    report_speed(
        context,
        run_once,
        contender="plain, compiled" if is_compiled else "plain, eager",
        shape=shape,
        batch=batch,
    )


def check_compiled(context: RankContext) -> None:
    """Compare gradient norms of compiled and eager updates of a small model in fp32 and bf16."""
    for compute in ("fp32", "bf16"):
        norms = {}
        for name, settings in {
            "eager": {},
            "compiled": COMPILED if context.scale.compiles else {},
        }.items():
            engine = start_engine(
                small_config(context.scale, precision=PrecisionSpec(compute=compute), **settings)
            )
            packed = engine.shard_data(small_batch(), max_tokens=1024)
            norms[name] = [run_update(engine, packed) for _ in range(3)]
            engine.close()
        limit = 1e-4 if compute == "fp32" else 2e-2
        is_equal = all(
            math.isclose(a, b, rel_tol=limit)
            for a, b in zip(norms["compiled"], norms["eager"], strict=True)
        )
        if context.is_first:
            context.rows.add(
                {
                    "job": "compiled",
                    "world_size": context.world_size,
                    "compute": compute,
                    "norms": norms,
                    "ok": is_equal,
                }
            )


JOBS: Mapping[str, Callable[[RankContext], None]] = {
    "attention": check_attention,
    "head": check_head,
    "offload": check_offload,
    "ranks": check_ranks,
    "compiled": check_compiled,
    "strategies": check_strategies,
    "background": time_background_save,
    **{f"engine-{shape}": partial(time_engine, shape=shape) for shape in FULL.shapes},
    **{f"plain-{shape}": partial(time_plain_loop, shape=shape) for shape in FULL.shapes},
    **{
        f"engine-{shape}-by-{n}": partial(time_engine, shape=shape, layers_per_group=n)
        for shape in FULL.shapes
        for n in (2, 4, 8)
    },
    "heads": compare_heads,
    **{
        f"liger-{shape}": partial(time_engine, shape=shape, is_compiled=False, has_liger=True)
        for shape in FULL.shapes
    },
    **{
        f"eager-{shape}": partial(time_engine, shape=shape, is_compiled=False)
        for shape in FULL.shapes
    },
}


def rank_main(rank: int, world_size: int, port: int, path: str, job: str, scale: Scale) -> None:
    """Run a job on one rank."""
    set_rank_variables(rank, world_size=world_size, port=port)
    if scale.device == "cuda":
        torch.cuda.set_device(rank)
    # All engines of this process join this group, and none destroys it on close.
    dist.init_process_group("cpu:gloo,cuda:nccl" if scale.device == "cuda" else "gloo")
    JOBS[job](
        RankContext(rows=Rows(path=Path(path)), rank=rank, world_size=world_size, scale=scale)
    )
    dist.destroy_process_group()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at a tiny size")
    options = parser.parse_args()
    port = find_free_port()
    scale = REHEARSAL if options.rehearse else FULL
    spawn(
        rank_main,
        args=(options.world_size, port, str(options.rows), options.job, scale),
        nprocs=options.world_size,
    )


if __name__ == "__main__":
    main()
