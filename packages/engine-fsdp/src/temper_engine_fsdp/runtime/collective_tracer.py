"""Publish what each rank is doing, and explain a collective that times out.

Each rank writes its current stage's name and start time to the process group's store.
When a collective times out, the error lists the stages of the other ranks. Gloo raises in the
waiting rank. NCCL aborts the process from its own watchdog thread, so on CUDA a thread of ours logs
the same message shortly before. On CUDA the host runs ahead of the device: a stage ends when the
device has finished the kernels launched in it.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _get_default_store

from temper_engine_api.errors import CollectiveTimeoutError
from temper_engine_fsdp.runtime.process_group import Membership

logger = logging.getLogger(__name__)

_TIMEOUT_MESSAGES = (
    "Timed out",
    "timed out",
    "Connection closed by peer",
    "Connection reset by peer",
    "Read error",
)
"""Parts of the messages with which gloo and TCP stores report a timeout or a lost peer."""
_WRAPPERS = ("wrapper", "wait", "inner")
"""Frames of torch.distributed that only forward a call and do not name a collective."""
_WARN_FRACTION = 0.9
"""Fraction of the timeout after which the watchdog thread logs its message."""
IDLE = "between calls"
"""Stage name while the engine is not inside a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stage of this rank."""

    name: str
    """Operation, such as `a training call`."""
    detail: str
    """Position within the operation, such as `micro-batch 2 of 4`; may be empty."""
    since: float
    """Start time in seconds, as given by `time.time`."""

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


class CollectiveTracer:
    """Records the current stage of this rank and reports collectives that time out."""

    def __init__(self, membership: Membership, *, timeout_s: float) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        self._prefix = "temper_engine_fsdp/stage"
        # torch has no public accessor for the store of the default group. A store of our own would
        # need a second port.
        self._store = _get_default_store() if membership.world_size > 1 else None
        self._depth = 0
        self._publish(IDLE)
        self.detail = ""
        """Position within the stage; not published to other ranks."""
        self._pending_device_spans: deque[tuple[Span, Callable[[], bool]]] = deque()
        self._closed = threading.Event()
        if membership.world_size > 1 and membership.device.type == "cuda":
            threading.Thread(target=self._watch, name="temper-stages", daemon=True).start()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Mark everything inside the context as stage `name`; nested stages count as the outer one.

        Raises:
            CollectiveTimeoutError: If a collective inside times out. The message names this rank,
                the stage, the collective, and the stages of the other ranks.
        """
        self._depth += 1
        if self._depth == 1:
            self._publish(name)
        try:
            yield
        except RuntimeError as error:
            # gloo and the stores raise plain RuntimeErrors: only the message tells a timeout.
            if (
                self._depth > 1
                or isinstance(error, CollectiveTimeoutError)
                or not any(message in str(error) for message in _TIMEOUT_MESSAGES)
            ):
                raise
            raise CollectiveTimeoutError(
                self._describe_timeout(
                    f"timed out in {_failed_collective(error)}", self._current_span()
                )
            ) from error
        finally:
            self._depth -= 1
            if self._depth == 0:
                if self._membership.device.type == "cuda":
                    event = torch.cuda.Event()
                    # The stage stays open until the device reaches this event.
                    event.record()
                    self.track_on_device(event.query)
                self.detail = ""
                self._publish(IDLE)

    def track_on_device(self, is_done: Callable[[], bool]) -> None:
        """Keep the current stage open until the device has finished it.

        Args:
            is_done: Queries the device without waiting for it, e.g. `torch.cuda.Event.query`.
        """
        self._pending_device_spans.append((self._current_span(), is_done))
        # Also removes the finished spans from the list.
        self._oldest_unfinished()

    def close(self) -> None:
        """Stop the watchdog thread."""
        self._closed.set()

    def _publish(self, name: str) -> None:
        # Wall time, not monotonic: other ranks compare it with their own clocks.
        self._current_stage, self._since = name, time.time()
        if self._store is not None and dist.is_initialized():
            self._store.set(f"{self._prefix}/{self._membership.rank}", f"{self._since:.0f} {name}")

    def _current_span(self) -> Span:
        return Span(name=self._current_stage, detail=self.detail, since=self._since)

    def _oldest_unfinished(self) -> Span | None:
        """Return the oldest stage that is not finished, and forget the stages that are."""
        while self._pending_device_spans:
            # One stream runs its kernels in order, so the oldest stage is the first to finish.
            span, is_done = self._pending_device_spans[0]
            if not is_done():
                return span
            self._pending_device_spans.popleft()
        return None if self._current_stage == IDLE else self._current_span()

    def _describe_timeout(self, event: str, span: Span) -> str:
        return (
            f"rank {self._membership.rank} {event} during {span}, {time.time() - span.since:.0f} s "
            f"after it began (collective_timeout_s is {self._timeout_s:g}). "
            f"{self._describe_other_ranks(span)} Check the log of the rank in another stage, or "
            "raise collective_timeout_s if that rank is only slow."
        )

    def _describe_other_ranks(self, span: Span) -> str:
        """Describe the stages of up to 8 other ranks; ranks in another stage come first."""
        assert self._store is not None, "a single rank waits for no other, so there is a store"
        lines = []
        for rank in range(self._membership.world_size):
            key = f"{self._prefix}/{rank}"
            if rank == self._membership.rank or not self._store.check([key]):
                continue
            since, _, name = self._store.get(key).decode().partition(" ")
            lines.append(
                (
                    name == span.name,
                    rank,
                    f"Rank {rank} is in {name} since {time.time() - float(since):.0f} s.",
                )
            )
        return " ".join(line for _, _, line in sorted(lines)[:8])

    def _watch(self) -> None:
        """Log one message for each stage that is about to reach the timeout."""
        warned_since = 0.0
        # At least every 5 % of the timeout, so that a check falls into its last 10 %.
        while not self._closed.wait(min(5.0, self._timeout_s / 20)):
            span = self._oldest_unfinished()
            if (
                span is not None
                and span.since != warned_since
                and time.time() - span.since > _WARN_FRACTION * self._timeout_s
            ):
                logger.error(
                    "%s",
                    self._describe_timeout(
                        f"may be about to time out in {find_unfinished_collective()}", span
                    ),
                )
                warned_since = span.since


def find_unfinished_collective() -> str:
    """Return the oldest unfinished collective in torch's flight recorder, or "a collective".

    The recorder keeps the newest 2,000 entries; TORCH_FR_BUFFER_SIZE changes that. NCCL has its own
    recorder.
    """
    # Newer torch versions record NCCL separately; the generic dump covers gloo and older versions.
    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json")  # noqa: B009  (no stubs)
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    for entry in sorted(entries, key=lambda entry: entry["record_id"]):
        if not entry["retired"] and entry["state"] != "completed":
            name = entry["profiling_name"].rpartition(":")[2].lstrip("_")
            return (
                f"{name} of {entry['input_sizes']} in group "
                f"{entry['process_group'][1] or entry['process_group'][0]}"
            )
    return "a collective"


def _failed_collective(error: RuntimeError) -> str:
    """Return the innermost torch.distributed function in an error's traceback."""
    names = [
        frame.f_code.co_name
        for frame, _ in walk_tb(error.__traceback__)
        if "torch/distributed/" in frame.f_code.co_filename
        and frame.f_code.co_name not in _WRAPPERS
    ]
    return names[-1].lstrip("_") if names else "a collective"
