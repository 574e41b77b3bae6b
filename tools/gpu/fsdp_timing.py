"""Time an update, and profile when the device is idle or waits for communication."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from temper_engine_api.batch import SequenceBatch
from tools.gpu.fsdp_workload import Scale, compute_imbalance
from tools.gpu.workload import Rows, flops_per_token_and_square

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank of a job, and the file for its rows."""

    rows: Rows
    rank: int
    world_size: int
    scale: Scale

    @property
    def is_first(self) -> bool:
        """True if this rank writes the rows."""
        return self.rank == 0


def synchronize(scale: Scale) -> None:
    if scale.device == "cuda":
        torch.cuda.synchronize()


def measure_times(scale: Scale, run_once: Callable[[], object], *, repeats: int) -> list[float]:
    """Return the seconds of each call in ascending order, including the device's work."""
    seconds = []
    for _ in range(repeats):
        synchronize(scale)
        start = time.perf_counter()
        run_once()
        synchronize(scale)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def measure_gemm_rate(scale: Scale) -> float:
    """Measure the FLOP/s of a large bf16 matmul."""
    size, dtype = (8192, torch.bfloat16) if scale.device == "cuda" else (256, torch.float32)
    a, b = (torch.randn(size, size, device=scale.device, dtype=dtype) for _ in range(2))
    measure_times(scale, lambda: a @ b, repeats=5)
    seconds = measure_times(scale, lambda: a @ b, repeats=20)
    return float(2 * size**3 / seconds[10])


def report_speed(
    context: RankContext,
    run_once: Callable[[], float],
    *,
    contender: str,
    shape: str,
    batch: SequenceBatch,
) -> None:
    """Report tokens/s per GPU of the median update, its fraction of the matmul rate and idle time.

    Args:
        context: This rank.
        run_once: Runs one update and returns its gradient norm.
        contender: Name of the measured implementation.
        shape: Name of the model shape.
        batch: The mini-batch of all ranks.
    """
    scale, world_size = context.scale, context.world_size
    gemm = measure_gemm_rate(scale)
    for _ in range(3):
        norm = run_once()
    if scale.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = measure_times(scale, run_once, repeats=scale.num_updates)
    peak = torch.cuda.max_memory_allocated() if scale.device == "cuda" else 0
    profile_row = profile_update(context, run_once, shape=shape, contender=contender)
    if not context.is_first:
        return
    median = seconds[len(seconds) // 2]
    tokens = batch.num_tokens / world_size
    per_token, per_square = flops_per_token_and_square(scale.shapes[shape])
    flops = (
        per_token * tokens + per_square * float(batch.lengths.double().square().sum()) / world_size
    )
    context.rows.add(
        {
            "job": "update",
            "contender": contender,
            "shape": shape,
            "world_size": world_size,
            "tokens_per_s": round(tokens / median),
            "mfu": round(flops / median / gemm, 3),
            "gemm_tflops": round(gemm / 1e12),
            "seconds": [round(s, 4) for s in seconds],
            "imbalance": round(
                compute_imbalance(scale, scale.shapes[shape], batch, world_size=world_size), 4
            ),
            **profile_row,
            "peak_gib": round(peak / 2**30, 1),
            "grad_norm": norm,
            "ok": math.isfinite(norm),
        }
    )


def profile_update(
    context: RankContext, run_once: Callable[[], float], *, shape: str, contender: str
) -> dict[str, object]:
    """Profile one update: ms of kernels, exposed communication and idle device.

    Writes the most expensive kernels to `profile-*.txt` next to the rows.
    """
    if context.scale.device != "cuda":
        run_once()
        return {}
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run_once()
        torch.cuda.synchronize()
    spans = [
        (e.name, (e.time_range.start, e.time_range.end))
        for e in profiler.events()
        if e.device_type == DeviceType.CUDA
    ]
    # Kernels of NCCL communicate, all others compute. ProfilerStep is a range, not a kernel.
    communication = _merge_intervals(span for name, span in spans if "nccl" in name.lower())
    compute = _merge_intervals(
        span
        for name, span in spans
        if "nccl" not in name.lower() and not name.startswith("ProfilerStep")
    )
    busy = _merge_intervals([*communication, *compute])
    span_us = busy[-1][1] - busy[0][0]
    if context.is_first and context.world_size in (1, 2, 4):
        kernel_table = profiler.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90
        )
        context.rows.path.with_name(
            f"profile-{contender.split(',')[0]}-{shape}-{context.world_size}.txt"
        ).write_text(kernel_table)
    return {
        # Profiler times are in microseconds.
        "work_ms": round(_sum_lengths(compute) / 1e3, 1),
        "exposed_communication_ms": round((_sum_lengths(busy) - _sum_lengths(compute)) / 1e3, 1),
        "idle_ms": round((span_us - _sum_lengths(busy)) / 1e3, 1),
    }


def _merge_intervals(spans: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals; return them disjoint and in ascending order."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _sum_lengths(spans: Iterable[Interval]) -> float:
    return sum(end - start for start, end in spans)
