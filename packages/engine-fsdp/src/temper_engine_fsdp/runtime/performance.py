"""How much arithmetic a model takes per token, how fast this machine multiplies, and from both the speed of a pass.

The convention: 6 floating-point operations for each weight in a matrix product and token, the head included and the embedding's look-up
not, and 6 x s^2 x heads x head_dim for each layer and sequence of s tokens, which is half of what attention without a mask takes.
Frozen weights count 4, since they get no gradient; recomputation counts nothing, and so does the end of a sliding window.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig, PreTrainedModel

from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.runtime.process_group import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlops:
    """Floating-point operations of a training pass."""

    per_token: float
    """In matrix products."""
    per_squared_length: float
    """In attention, for each squared length of a sequence."""

    def total(self, lengths: Sequence[int]) -> float:
        """Of these sequences."""
        return sum(
            self.per_token * length + self.per_squared_length * length * length
            for length in lengths
        )


def count_training_flops(model: PreTrainedModel, *, is_language_model: bool) -> TrainingFlops:
    """Counted from a model that is still whole, or without memory."""
    config = model.config
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings() if is_language_model else None
    is_tied = head is not None and head.weight is embedding
    per_token = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or (parameter is embedding and not is_tied):
            continue
        fraction = _active_fraction(config) if ".experts." in name else 1.0
        per_token += (6.0 if parameter.requires_grad else 4.0) * fraction * parameter.numel()
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return TrainingFlops(
        per_token=per_token,
        per_squared_length=6.0 * config.num_hidden_layers * config.num_attention_heads * head_dim,
    )


def _active_fraction(config: PretrainedConfig) -> float:
    """Experts that a token sees, of all there are."""
    settings = config.to_dict()
    seen, total = (
        settings.get("num_experts_per_tok"),
        settings.get("num_experts") or settings.get("num_local_experts"),
    )
    return seen / total if isinstance(seen, int) and isinstance(total, int) else 1.0


@cache
def measure_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product, measured once per process."""
    size, repeats = (8192, 21) if device.type == "cuda" else (256, 5)
    with torch.no_grad():
        # Numbers without a pattern, since a device multiplies zeros and ones faster; and none of the process's random ones.
        a = (
            torch.arange(size * size, device=device, dtype=torch.float32)
            .sin_()
            .view(size, size)
            .to(dtype)
        )
        seconds = []
        for _ in range(repeats):
            begin = _now(device)
            a @ a
            seconds.append(_now(device) - begin)
    return 2.0 * size**3 / sorted(seconds)[repeats // 2]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Stopwatch:
    """Seconds between two moments of a device; the host waits for none of them before it asks."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks = [self._mark()]

    def _mark(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """The second moment is now."""
        self._marks.append(self._mark())

    def seconds(self) -> float:
        """Between the two."""
        begin, end = self._marks
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            milliseconds: float = begin.elapsed_time(end)
            return milliseconds / 1e3
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin


class ThroughputMeter:
    """Speed of the training passes of one rank."""

    def __init__(
        self,
        flops: TrainingFlops,
        *,
        device: torch.device,
        compute: torch.dtype,
        ranks_per_pack: int,
    ) -> None:
        self.flops = flops
        self._device = device
        self._compute = compute
        self._fraction = 1.0 / ranks_per_pack
        self._lengths: Sequence[int] | None = None
        self._stopwatch: _Stopwatch | None = None

    def start(self, lengths: Sequence[int] | None) -> None:
        """A training pass over sequences of these lengths begins, or a pass that is not measured."""
        self._lengths, self._stopwatch = lengths, _Stopwatch(self._device)

    def stop(self) -> Callable[[], Mapping[str, Metric]]:
        """The pass since ``begin`` ends now. What is returned tells its speed, and waits for the device."""
        if self._lengths is None:
            return dict
        lengths, self._lengths = self._lengths, None
        tokens, flops = sum(lengths) * self._fraction, self.flops.total(lengths) * self._fraction
        stopwatch, self._stopwatch = self._stopwatch, None
        assert stopwatch is not None
        stopwatch.stop()

        def read_metrics() -> Mapping[str, Metric]:
            seconds = stopwatch.seconds()
            return {
                "speed/tokens_per_s": Metric(value=tokens, weight=seconds, reduction="mean"),
                "speed/mfu": Metric(
                    value=flops / measure_matmul_rate(self._device, self._compute),
                    weight=seconds,
                    reduction="mean",
                ),
            }

        return read_metrics


_GIB = 2**30
_STATM = Path("/proc/self/statm")


class LazyMetrics(Mapping[str, Metric]):
    """Metrics that are asked for when somebody reads them."""

    def __init__(self, read: Callable[[], Mapping[str, Metric]]) -> None:
        self._read = cache(read)

    def __getitem__(self, name: str) -> Metric:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def memory_metrics(device: torch.device) -> Mapping[str, Metric]:
    """Largest of all ranks: GiB of this process in host memory where Linux tells, and of tensors and of the allocator on CUDA."""
    values: dict[str, float] = {}
    if _STATM.is_file():
        values["memory/host_gib"] = (
            int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _GIB
        )
    if device.type == "cuda":
        values["memory/allocated_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
        values["memory/reserved_gib"] = torch.cuda.max_memory_reserved(device) / _GIB
    return {name: Metric(value=value, reduction="max") for name, value in values.items()}


logger = logging.getLogger(__name__)

MEMORY_ENTRIES = 1_000_000
"""Most allocations that the history of memory keeps."""


class UpdateProfiler:
    """Starts before update ``profile_from``, writes after ``profile_updates`` of them, and does nothing without a folder."""

    def __init__(self, config: FSDPConfig, *, membership: Membership) -> None:
        self._done = 0
        self._profile: profile | None = None
        self._last = config.profile_from + config.profile_updates - 1
        self._first = config.profile_from
        self._membership = membership
        self._records_memory = config.profile_memory
        self._file: Path | None = None
        if config.profile_to is None:
            return
        if config.profile_memory and membership.device.type != "cuda":
            raise ConfigError(
                "profile_memory is on, but only CUDA keeps a history of its memory: switch it off "
                "on a CPU."
            )
        self._file = (
            Path(config.profile_to)
            / f"rank-{membership.rank}-updates-{self._first}-{self._last}.json"
        )
        if self._file.exists():
            raise ConfigError(
                f"profile_to is {config.profile_to}, which holds {self._file.name} already: choose "
                "another folder."
            )
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._maybe_start()

    def on_update_end(self) -> None:
        """Another update has ended."""
        self._done += 1
        if self._done == self._last:
            self.close()
        self._maybe_start()

    def close(self) -> None:
        """Write what is running; a trace that ended early says so in the log alone."""
        if self._profile is None:
            return
        assert self._file is not None
        if self._membership.device.type == "cuda":
            torch.cuda.synchronize(self._membership.device)
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._file))
        self._profile = None
        if self._records_memory:
            torch.cuda.memory._dump_snapshot(str(self._file.with_suffix(".pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)
        logger.info(
            "wrote a profile of updates %d to %d to %s", self._first, self._done, self._file
        )

    def _maybe_start(self) -> None:
        if self._file is None or self._done != self._first - 1 or self._profile is not None:
            return
        if self._records_memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)
        on_device = [ProfilerActivity.CUDA] if self._membership.device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
        self._profile.start()
