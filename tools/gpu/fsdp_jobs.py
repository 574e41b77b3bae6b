"""Run one measurement of FSDPEngine on CUDA or its rehearsal on a CPU, for `engine_fsdp`."""

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
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import Qwen2Config

from temper_engine_api.batch import PackedBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec, ResidencySpec, Scalar
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.model.token_logprobs import chunked_logprobs
from tools.gpu.fsdp_heads import heads
from tools.gpu.fsdp_timing import Place, report_speed, synchronize, times_of
from tools.gpu.fsdp_workload import FULL, REHEARSAL, Scale, mini_batch, share_of
from tools.gpu.plain_loop import PlainLoop
from tools.gpu.workload import SMALL, ClippedPolicy, Rows, small_batch

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


def started(config: FSDPConfig) -> FSDPEngine:
    """Build an engine and set its objective."""
    engine = FSDPEngine(config)
    engine.init_model()
    engine.set_loss_fn(ClippedPolicy())
    return engine


def update(engine: BaseEngine, batch: PackedBatch, outputs: tuple[HeadOutput, ...] = ()) -> float:
    """Run one update that also computes these outputs, and return the gradient norm."""
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(batch, forward_only=False, outputs=outputs)
    return engine.optimizer_step()


def logprobs(config: FSDPConfig) -> Tensor:
    """Return log-probs and entropies of the small batch, as two rows."""
    engine = started(config)
    with engine.eval_mode():
        packed = engine.shard_data(small_batch(), max_tokens=1024)
        result = engine.forward_backward_batch(
            packed, forward_only=True, outputs=[HeadOutput.LOGPROB, HeadOutput.ENTROPY]
        )
    assert result.outputs is not None
    ordered = result.outputs.reorder(small_batch().sample_ids)
    engine.close()
    return torch.stack([ordered.columns[HeadOutput.LOGPROB], ordered.columns[HeadOutput.ENTROPY]])


def attention(place: Place) -> None:
    """Compare each attention kernel and precision with float32 on the CPU."""
    kernels = [("fp32", "sdpa_varlen", 1e-3), ("bf16", "sdpa_varlen", 0.1)]
    kernels += [("bf16", "torch_varlen", 0.1)] if place.scale.device == "cuda" else []
    for family in ("qwen2", "qwen3", "llama"):
        model = ModelSpec(architecture={**SMALL, "model_type": family})
        exact = logprobs(
            small_config(
                place.scale, model=model, device="cpu", precision=PrecisionSpec(compute="fp32")
            )
        )
        for compute, kernel, limit in kernels:
            precision = PrecisionSpec(compute=compute)  # type: ignore[arg-type]
            ours = logprobs(
                small_config(place.scale, model=model, precision=precision, attention=kernel)
            )
            worst = float((ours - exact).abs().max())
            place.rows.add(
                {
                    "job": "attention",
                    "model": family,
                    "kernel": kernel,
                    "compute": compute,
                    "worst": worst,
                    "ok": worst < limit,
                }
            )


def head(place: Place) -> None:
    """Check the fused head in bf16 against plain torch at 2048 positions, and time it when full."""
    scale, shape = place.scale, place.scale.shapes["0.5B"]
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
    naive, entropy = wide.gather(1, labels[few, None])[:, 0], -(wide.exp() * wide).sum(-1)
    ours, theirs = (
        torch.autograd.grad(x.sum(), (hidden, weight), retain_graph=True)
        for x in (fused.logprob, naive)
    )
    worst = max(
        float((fused.logprob - naive).detach().abs().max()),
        float((fused.entropy - entropy).detach().abs().max()),
    )
    gradient = max(
        float((a - b).float().norm() / b.float().norm()) for a, b in zip(ours, theirs, strict=True)
    )
    place.rows.add(
        {
            "job": "head",
            "what": "exactness",
            "worst": worst,
            "gradient": gradient,
            "ok": worst < 1e-3 and gradient < 1e-2,
        }
    )
    # Free these before the peak memory of the fused head is measured.
    del wide, naive, entropy, fused, ours, theirs

    def once() -> None:
        hidden.grad = weight.grad = None
        chunked_logprobs(hidden, weight, labels, needs_entropy=True).logprob.sum().backward()

    once()
    if scale.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = times_of(scale, once, repeats=5)[2]
    flops = (
        8 * positions * weight.numel()
    )  # forward, its recomputation, and two products in the backward pass
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if scale.device == "cuda" else None
    place.rows.add(
        {
            "job": "head",
            "what": "speed",
            "seconds": seconds,
            "tflops": flops / seconds / 1e12,
            "peak_gib": peak,
        }
    )


def residency(place: Place) -> None:
    """Check that offloading leaves no tensor on the device and does not change gradient norms."""
    away = ResidencySpec(offload_parameters=True, offload_optimizer=True)
    engine = started(small_config(place.scale, residency=away))
    packed = engine.shard_data(small_batch(), max_tokens=1024)
    here = started(small_config(place.scale))
    norms = [(update(engine, packed), update(here, packed)) for _ in range(3)]
    tensors = (*engine._components.model_tensors(), *engine._components.optimizer_tensors())
    kept = sum(t.untyped_storage().nbytes() for t in tensors)
    place.rows.add(
        {
            "job": "residency",
            "bytes_on_device": kept,
            "ok": kept == 0 and all(a == b for a, b in norms),
        }
    )
    here.close()
    engine.close()


def ranks_agree(place: Place) -> None:
    """Record gradient norms of five updates, and compare the sixth with one after a reload."""
    for compute in ("fp32", "bf16"):
        engine = started(small_config(place.scale, precision=PrecisionSpec(compute=compute)))
        packed = engine.shard_data(small_batch(), max_tokens=1024)
        norms = [update(engine, packed) for _ in range(5)]
        folder = _folder_of_all_ranks(f"ranks-{compute}")
        step = engine.save_checkpoint(str(folder), global_step=5)
        goes_on = update(engine, packed)
        engine.load_checkpoint(step)
        resumed = update(engine, packed)
        if place.is_first:
            row = {
                "job": "ranks",
                "world_size": place.world_size,
                "compute": compute,
                "norms": norms,
            }
            shutil.rmtree(folder)
            place.rows.add(
                {
                    **row,
                    "ok": math.isclose(
                        goes_on, resumed, rel_tol=1e-5 if compute == "fp32" else 1e-3
                    ),
                }
            )
        engine.close()


def _folder_of_all_ranks(name: str) -> Path:
    # All ranks must name the same folder; the port is the same on all ranks of a job.
    return Path(tempfile.gettempdir(), f"temper-{os.environ['MASTER_PORT']}-{name}")


def _strategies(world_size: int) -> Mapping[str, Mapping[str, object]]:
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
    return cases


def strategies(place: Place) -> None:
    """Record norms with each strategy, precision and residency, and check a background save."""
    for compute in ("fp32", "fp16"):
        for name, changes in _strategies(place.world_size).items():
            engine = started(
                small_config(place.scale, precision=PrecisionSpec(compute=compute), **changes)
            )
            packed = engine.shard_data(small_batch(), max_tokens=1024)
            norms = [update(engine, packed) for _ in range(5)]
            folder = _folder_of_all_ranks(f"{compute}-{name.replace(', ', '-').replace(' ', '-')}")
            step = engine.save_checkpoint(str(folder), global_step=5, in_background=True)
            goes_on = [update(engine, packed) for _ in range(2)]
            engine.load_checkpoint(step)
            resumed = [update(engine, packed) for _ in range(2)]
            if place.is_first:
                shutil.rmtree(folder)
                row = {
                    "job": "strategies",
                    "case": name,
                    "world_size": place.world_size,
                    "compute": compute,
                    "norms": norms,
                }
                near = 1e-4 if compute == "fp32" else 2e-2
                place.rows.add(
                    {
                        **row,
                        "ok": all(
                            math.isclose(a, b, rel_tol=near)
                            for a, b in zip(goes_on, resumed, strict=True)
                        ),
                    }
                )
            engine.close()
            dist.barrier()


def background(place: Place) -> None:
    """Time how long a save of the 0.5B model blocks training, in foreground and background."""
    scale = place.scale
    engine = started(large_config(scale, "0.5B"))
    packed = engine.shard_data(
        mini_batch(scale, scale.shapes["0.5B"], world_size=place.world_size),
        max_tokens=scale.micro_batch_tokens,
    )
    folder = _folder_of_all_ranks("saves")
    for _ in range(2):
        update(engine, packed)
    plain_s = times_of(scale, partial(update, engine, packed), repeats=3)[1]
    for step, in_background in ((1, False), (2, True), (3, True)):
        synchronize(scale)
        begun = time.perf_counter()
        engine.save_checkpoint(
            str(folder), global_step=step, in_background=in_background, max_ckpt_to_keep=1
        )
        stands_still_s = time.perf_counter() - begun
        (during_s,) = times_of(scale, partial(update, engine, packed), repeats=1)
        engine.finish_saving()
        if place.is_first:
            place.rows.add(
                {
                    "job": "background",
                    "world_size": place.world_size,
                    "in_background": in_background,
                    "stands_still_s": stands_still_s,
                    "update_s": plain_s,
                    "update_during_s": during_s,
                    "whole_save_s": time.perf_counter() - begun,
                }
            )
    engine.close()
    dist.barrier()
    if place.is_first:
        shutil.rmtree(folder)


def engine_speed(
    place: Place,
    *,
    shape: str,
    is_compiled: bool = True,
    has_liger: bool = False,
    together: int = 1,
) -> None:
    """Time the engine's update: log-probs with gradient, entropy and the clipped objective."""
    scale = place.scale
    batch = mini_batch(scale, scale.shapes[shape], world_size=place.world_size)
    changes = COMPILED if is_compiled and scale.compiles else {}
    changes = {
        **changes,
        "liger_layers": has_liger and scale.device == "cuda",
        "wrap_together": together,
    }
    engine = started(large_config(scale, shape, **changes))
    packed = engine.shard_data(batch, max_tokens=scale.micro_batch_tokens)
    once = partial(update, engine, packed, (HeadOutput.ENTROPY,))
    who = "engine, compiled" if is_compiled else "engine, Liger" if has_liger else "engine, eager"
    who += f", {together} layers at once" if together > 1 else ""
    report_speed(place, once, who=who, shape=shape, batch=batch)
    engine.close()


def plain_speed(place: Place, *, shape: str, is_compiled: bool = True) -> None:
    """Time the plain loop on the same samples, distributed by the same plan."""
    scale = place.scale
    batch = mini_batch(scale, scale.shapes[shape], world_size=place.world_size)
    packed = share_of(scale, batch, rank=place.rank, world_size=place.world_size)
    config = Qwen2Config(**scale.shapes[shape], tie_word_embeddings=True)
    loop = PlainLoop(config, device=scale.device, is_compiled=is_compiled and scale.compiles)
    once = partial(loop.update, packed)
    report_speed(
        place,
        once,
        who="plain, compiled" if is_compiled else "plain, eager",
        shape=shape,
        batch=batch,
    )


def compiled_agrees(place: Place) -> None:
    """Compare gradient norms of compiled and eager updates of a small model in fp32 and bf16."""
    for compute in ("fp32", "bf16"):
        found = {}
        for name, settings in {
            "eager": {},
            "compiled": COMPILED if place.scale.compiles else {},
        }.items():
            engine = started(
                small_config(place.scale, precision=PrecisionSpec(compute=compute), **settings)
            )
            packed = engine.shard_data(small_batch(), max_tokens=1024)
            found[name] = [update(engine, packed) for _ in range(3)]
            engine.close()
        limit = 1e-4 if compute == "fp32" else 2e-2
        same = all(
            math.isclose(a, b, rel_tol=limit)
            for a, b in zip(found["compiled"], found["eager"], strict=True)
        )
        if place.is_first:
            place.rows.add(
                {
                    "job": "compiled",
                    "world_size": place.world_size,
                    "compute": compute,
                    "norms": found,
                    "ok": same,
                }
            )


JOBS: Mapping[str, Callable[[Place], None]] = {
    "attention": attention,
    "head": head,
    "residency": residency,
    "ranks": ranks_agree,
    "compiled": compiled_agrees,
    "strategies": strategies,
    "background": background,
    **{f"engine-{shape}": partial(engine_speed, shape=shape) for shape in FULL.shapes},
    **{f"plain-{shape}": partial(plain_speed, shape=shape) for shape in FULL.shapes},
    **{
        f"engine-{shape}-by-{n}": partial(engine_speed, shape=shape, together=n)
        for shape in FULL.shapes
        for n in (2, 4, 8)
    },
    "heads": heads,
    **{
        f"liger-{shape}": partial(engine_speed, shape=shape, is_compiled=False, has_liger=True)
        for shape in FULL.shapes
    },
    **{
        f"eager-{shape}": partial(engine_speed, shape=shape, is_compiled=False)
        for shape in FULL.shapes
    },
}


def rank_main(rank: int, world_size: int, port: int, path: str, job: str, scale: Scale) -> None:
    """Run a job on one rank."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if scale.device == "cuda":
        torch.cuda.set_device(rank)
    # All engines of this process join this group, and none destroys it on close.
    dist.init_process_group("cpu:gloo,cuda:nccl" if scale.device == "cuda" else "gloo")
    JOBS[job](Place(rows=Rows(path=Path(path)), rank=rank, world_size=world_size, scale=scale))
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scale = REHEARSAL if options.rehearse else FULL
    spawn(
        rank_main,
        args=(options.world_size, port, str(options.rows), options.job, scale),
        nprocs=options.world_size,
    )


if __name__ == "__main__":
    main()
