"""Measure throughput, memory and profiles.

FLOPs are counted as 6 per matmul weight and token (including the output head, excluding the
embedding lookup), plus 6 * s^2 * heads * head_dim per layer for a sequence with s tokens, half of
unmasked attention. Frozen weights count 4, since they need no weight gradient. Recomputation is not
counted, and sliding windows are counted as full attention.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig, PreTrainedModel

from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric
from temper_engine_api.vision_language import list_encoder_modules
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.runtime.process_group import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlops:
    """Floating-point operations of one forward and backward pass."""

    per_token: float
    """FLOPs per token in matrix products."""
    per_squared_length: float
    """Attention FLOPs per squared sequence length."""

    def total(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs for sequences of these lengths in tokens."""
        return sum(
            self.per_token * length + self.per_squared_length * length * length
            for length in lengths
        )


def count_training_flops(model: PreTrainedModel, *, is_language_model: bool) -> TrainingFlops:
    """Count FLOPs from the shapes of an unsharded model.

    The parameters may be on the meta device.
    """
    config = model.config.get_text_config(decoder=True)
    # Texts do not reach the encoder of a vision-language model.
    unused = tuple(
        f"{name}." for name in list_encoder_modules(model, model_type=model.config.model_type)
    )
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings() if is_language_model else None
    is_tied = head is not None and head.weight is embedding
    per_token = 0.0
    for name, parameter in model.named_parameters():
        # Norms and biases are negligible. A tied embedding counts once, as the output head.
        if parameter.ndim < 2 or (parameter is embedding and not is_tied):
            continue
        if name.startswith(unused):
            continue
        fraction = _active_fraction(config) if ".experts." in name else 1.0
        per_token += (6.0 if parameter.requires_grad else 4.0) * fraction * parameter.numel()
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return TrainingFlops(
        per_token=per_token,
        per_squared_length=6.0 * config.num_hidden_layers * config.num_attention_heads * head_dim,
    )


def _active_fraction(config: PretrainedConfig) -> float:
    """Return the fraction of the experts that a token is routed to; 1 without experts."""
    settings = config.to_dict()
    num_active = settings.get("num_experts_per_tok")
    num_experts = settings.get("num_experts") or settings.get("num_local_experts")
    is_moe = isinstance(num_active, int) and isinstance(num_experts, int)
    return num_active / num_experts if is_moe else 1.0


@cache
def measure_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a large matmul; cached for the process."""
    # The median of several runs excludes warm-up and clock changes.
    size, repeats = (8192, 21) if device.type == "cuda" else (256, 5)
    with torch.no_grad():
        # GPUs multiply zeros and ones faster (less power), so use values without a pattern. Random
        # numbers would advance the global RNG.
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
    """Times a region on the device; the host waits only when the result is read."""

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
        """Mark the end of the region."""
        self._marks.append(self._mark())

    def seconds(self) -> float:
        """Return the elapsed seconds; waits for the device."""
        begin, end = self._marks
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            milliseconds: float = begin.elapsed_time(end)
            return milliseconds / 1e3
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin


class ThroughputMeter:
    """Measures the throughput of training passes on this rank."""

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
        # All ranks of a sequence-parallel group see the same pack, so each reports its fraction.
        self._fraction = 1.0 / ranks_per_pack
        self._lengths: Sequence[int] | None = None
        self._stopwatch: _Stopwatch | None = None

    def start(self, lengths: Sequence[int] | None) -> None:
        """Start a pass over sequences of these lengths; None does not measure it."""
        self._lengths, self._stopwatch = lengths, _Stopwatch(self._device)

    def stop(self) -> Callable[[], Mapping[str, Metric]]:
        """Stop the pass.

        Returns:
            A function that returns the metrics. It waits for the device when called.
        """
        if self._lengths is None:
            return dict
        lengths, self._lengths = self._lengths, None
        tokens, flops = sum(lengths) * self._fraction, self.flops.total(lengths) * self._fraction
        stopwatch, self._stopwatch = self._stopwatch, None
        assert stopwatch is not None
        stopwatch.stop()

        def read_metrics() -> Mapping[str, Metric]:
            # Weighted by time, so that the mean over calls is total tokens over total time.
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


def measure_memory(device: torch.device) -> Mapping[str, Metric]:
    """Return memory in GiB; the maximum across ranks is reported.

    Host memory of this process (Linux only) and, on CUDA, peak allocated and reserved memory.
    """
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
"""Maximum number of allocation events in the memory history."""


class UpdateProfiler:
    """Profiles a range of updates with torch's profiler and writes one trace per rank.

    Does nothing if `profile_to` is None.
    """

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
                "profile_memory is on, but only CUDA records a memory history: set it to false on "
                "a CPU."
            )
        self._file = (
            Path(config.profile_to)
            / f"rank-{membership.rank}-updates-{self._first}-{self._last}.json"
        )
        if self._file.exists():
            raise ConfigError(
                f"profile_to is {config.profile_to}, which already contains {self._file.name}: "
                "choose another folder."
            )
        config.check_folders()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._maybe_start()

    def on_update_end(self) -> None:
        """Count an update; start or stop the profiler if due."""
        self._done += 1
        if self._done == self._last:
            self.close()
        self._maybe_start()

    def close(self) -> None:
        """Write the running profile, which may cover fewer updates than configured."""
        if self._profile is None:
            return
        assert self._file is not None
        if self._membership.device.type == "cuda":
            torch.cuda.synchronize(self._membership.device)
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._file))
        self._profile = None
        if self._records_memory:
            # The memory history has no public API; torch's documentation names these functions.
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
