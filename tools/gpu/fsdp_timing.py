"""Time an update, and profile when the device is idle or waits for communication."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from temper_engine_api.batch import SequenceBatch
from tools.gpu.fsdp_workload import Scale, imbalance
from tools.gpu.workload import Rows, flops_per_token_and_square

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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


def times_of(scale: Scale, once: Callable[[], object], *, repeats: int) -> list[float]:
    """Return the seconds of each call in ascending order, including the device's work."""
    seconds = []
    for _ in range(repeats):
        synchronize(scale)
        start = time.perf_counter()
        once()
        synchronize(scale)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def gemm_rate(scale: Scale) -> float:
    """Measure the FLOP/s of a large bf16 matmul."""
    size, dtype = (8192, torch.bfloat16) if scale.device == "cuda" else (256, torch.float32)
    a, b = (torch.randn(size, size, device=scale.device, dtype=dtype) for _ in range(2))
    times_of(scale, lambda: a @ b, repeats=5)
    seconds = times_of(scale, lambda: a @ b, repeats=20)
    return float(2 * size**3 / seconds[10])


def report_speed(
    place: Place, once: Callable[[], float], *, who: str, shape: str, batch: SequenceBatch
) -> None:
    """Report tokens/s per GPU of the median update, its fraction of the matmul rate and idle time.

    Args:
        place: This rank.
        once: Runs one update and returns its gradient norm.
        who: Name of the measured implementation.
        shape: Name of the model shape.
        batch: The mini-batch of all ranks.
    """
    scale, world_size = place.scale, place.world_size
    gemm = gemm_rate(scale)
    for _ in range(3):
        norm = once()
    if scale.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = times_of(scale, once, repeats=scale.num_updates)
    peak = torch.cuda.max_memory_allocated() if scale.device == "cuda" else 0
    lost = where_time_goes(place, once, shape=shape, who=who)
    if not place.is_first:
        return
    median = seconds[len(seconds) // 2]
    tokens = batch.num_tokens / world_size
    per_token, per_square = flops_per_token_and_square(scale.shapes[shape])
    flops = (
        per_token * tokens + per_square * float(batch.lengths.double().square().sum()) / world_size
    )
    place.rows.add(
        {
            "job": "update",
            "who": who,
            "shape": shape,
            "world_size": world_size,
            "tokens_per_s": round(tokens / median),
            "mfu": round(flops / median / gemm, 3),
            "gemm_tflops": round(gemm / 1e12),
            "seconds": [round(s, 4) for s in seconds],
            "imbalance": round(
                imbalance(scale, scale.shapes[shape], batch, world_size=world_size), 4
            ),
            **lost,
            "peak_gib": round(peak / 2**30, 1),
            "grad_norm": norm,
            "ok": math.isfinite(norm),
        }
    )


def where_time_goes(
    place: Place, once: Callable[[], float], *, shape: str, who: str
) -> dict[str, object]:
    """Profile one update: ms of kernels, exposed communication and idle device.

    Writes the most expensive kernels to `profile-*.txt` next to the rows.
    """
    if place.scale.device != "cuda":
        once()
        return {}
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        once()
        torch.cuda.synchronize()
    spans = [
        (e.name, (e.time_range.start, e.time_range.end))
        for e in seen.events()
        if e.device_type == DeviceType.CUDA
    ]
    # Kernels of NCCL communicate, all others compute. ProfilerStep is a range, not a kernel.
    talk = _union(span for name, span in spans if "nccl" in name.lower())
    work = _union(
        span
        for name, span in spans
        if "nccl" not in name.lower() and not name.startswith("ProfilerStep")
    )
    busy = _union([*talk, *work])
    whole = busy[-1][1] - busy[0][0]
    if place.is_first and place.world_size in (1, 2, 4):
        told = seen.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90
        )
        place.rows.path.with_name(
            f"profile-{who.split(',')[0]}-{shape}-{place.world_size}.txt"
        ).write_text(told)
    return {
        # Profiler times are in microseconds.
        "work_ms": round(_length(work) / 1e3, 1),
        "bare_communication_ms": round((_length(busy) - _length(work)) / 1e3, 1),
        "idle_ms": round((whole - _length(busy)) / 1e3, 1),
    }


def _union(spans: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals; return them disjoint and in ascending order."""
    found: list[Interval] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _length(spans: Iterable[Interval]) -> float:
    return sum(end - start for start, end in spans)
