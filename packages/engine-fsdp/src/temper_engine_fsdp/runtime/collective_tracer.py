"""What each rank is doing, said where the others can read it; and from that a sentence when a collective does not end.

Entering a stage writes its name and the time to the store of the process group. Gloo raises in the rank that waits; NCCL ends the process
from a thread of its own, so on CUDA another thread speaks shortly before. There the host goes on while the device still waits, so that a
stage lasts until the device has done what was launched in it.
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
"""Of a collective that waits in vain, in the words of gloo and of stores."""
_WRAPPERS = ("wrapper", "wait", "inner")
_WARN_FRACTION = 0.9
"""Share of the time-out after which the thread speaks."""
IDLE = "between calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stage, as this rank tells of it."""

    name: str
    """What it is doing."""
    detail: str
    """Where within it; may be empty."""
    since: float
    """When it began, in seconds of ``time.time``."""

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


class CollectiveTracer:
    """The stages of one rank of an engine."""

    def __init__(self, membership: Membership, *, timeout_s: float) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        self._prefix = "temper_engine_fsdp/stage"
        self._store = _get_default_store() if membership.world_size > 1 else None
        self._depth = 0
        self._publish(IDLE)
        self.detail = ""
        """Where within the stage this rank is; known to this rank alone."""
        self._launched: deque[tuple[Span, Callable[[], bool]]] = deque()
        self._closed = threading.Event()
        if membership.world_size > 1 and membership.device.type == "cuda":
            threading.Thread(target=self._watch, name="temper-stages", daemon=True).start()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, this rank is doing that; a stage within another belongs to it.

        Raises:
            CollectiveTimeoutError: a collective inside waited in vain; names this rank, the stage, the collective, and what others do.
        """
        self._depth += 1
        if self._depth == 1:
            self._publish(name)
        try:
            yield
        except RuntimeError as error:
            if (
                self._depth > 1
                or isinstance(error, CollectiveTimeoutError)
                or not any(sign in str(error) for sign in _TIMEOUT_MESSAGES)
            ):
                raise
            raise CollectiveTimeoutError(
                self._message(f"waited in vain in {_failed_collective(error)}", self._current())
            ) from error
        finally:
            self._depth -= 1
            if self._depth == 0:
                if self._membership.device.type == "cuda":
                    event = torch.cuda.Event()
                    event.record()
                    self.track_on_device(event.query)
                self.detail = ""
                self._publish(IDLE)

    def track_on_device(self, is_done: Callable[[], bool]) -> None:
        """The host leaves the stage that it is in while the device works on; ``is_done`` asks the device without waiting for it."""
        self._launched.append((self._current(), is_done))
        self._oldest_unfinished()

    def close(self) -> None:
        """The thread ends."""
        self._closed.set()

    def _publish(self, name: str) -> None:
        self._now, self._since = name, time.time()
        if self._store is not None and dist.is_initialized():
            self._store.set(f"{self._prefix}/{self._membership.rank}", f"{self._since:.0f} {name}")

    def _current(self) -> Span:
        return Span(name=self._now, detail=self.detail, since=self._since)

    def _oldest_unfinished(self) -> Span | None:
        """The first stage that is not over, on the device or else on the host."""
        while self._launched:
            span, is_done = self._launched[0]
            if not is_done():
                return span
            self._launched.popleft()
        return None if self._now == IDLE else self._current()

    def _message(self, what: str, span: Span) -> str:
        return (
            f"rank {self._membership.rank} {what} during {span}, {time.time() - span.since:.0f} s "
            "after it began "
            f"(collective_timeout_s is {self._timeout_s:g}). {self._describe_other_ranks(span)} "
            "Look at the log of the rank that is elsewhere; "
            "raise collective_timeout_s where it is only slow."
        )

    def _describe_other_ranks(self, span: Span) -> str:
        """Where the other ranks say they are; those that are elsewhere first."""
        assert self._store is not None, "a rank alone waits for nobody"
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
        """Speak once about each stage that is about to reach the time-out."""
        warned_since = 0.0
        while not self._closed.wait(min(5.0, self._timeout_s / 20)):
            span = self._oldest_unfinished()
            if (
                span is not None
                and span.since != warned_since
                and time.time() - span.since > _WARN_FRACTION * self._timeout_s
            ):
                logger.error(
                    "%s",
                    self._message(
                        f"may be waiting in vain in {find_unfinished_collective()}", span
                    ),
                )
                warned_since = span.since


def find_unfinished_collective() -> str:
    """The first collective that was launched and has not ended, by torch's flight recorder; in other words where that knows of none.

    The recorder keeps the newest 2,000 unless TORCH_FR_BUFFER_SIZE says otherwise, that of NCCL a book of its own.
    """
    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json")  # noqa: B009  (no stubs)
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    for entry in sorted(entries, key=lambda entry: entry["record_id"]):
        if not entry["retired"] and entry["state"] != "completed":
            name = entry["profiling_name"].rpartition(":")[2].lstrip("_")
            return f"{name} of {entry['input_sizes']} in group {entry['process_group'][1] or entry['process_group'][0]}"
    return "a collective"


def _failed_collective(error: RuntimeError) -> str:
    """The innermost function of torch.distributed that it went through."""
    names = [
        frame.f_code.co_name
        for frame, _ in walk_tb(error.__traceback__)
        if "torch/distributed/" in frame.f_code.co_filename
        and frame.f_code.co_name not in _WRAPPERS
    ]
    return names[-1].lstrip("_") if names else "a collective"
