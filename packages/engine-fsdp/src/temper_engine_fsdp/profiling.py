"""A torch profiler over a few updates, as configured: one trace per rank, and on CUDA a history of the device's memory if asked."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from temper_engine_api.errors import ConfigError
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.process_group import Membership

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
        self._has_memory = config.profile_memory
        self._file: Path | None = None
        if config.profile_to is None:
            return
        if config.profile_memory and membership.device.type != "cuda":
            raise ConfigError("profile_memory is on, but only CUDA keeps a history of its memory: switch it off on a CPU.")
        self._file = Path(config.profile_to) / f"rank-{membership.rank}-updates-{self._first}-{self._last}.json"
        if self._file.exists():
            raise ConfigError(f"profile_to is {config.profile_to}, which holds {self._file.name} already: choose another folder.")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._start_if_due()

    def update_done(self) -> None:
        """Another update has ended."""
        self._done += 1
        if self._done == self._last:
            self.close()
        self._start_if_due()

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
        if self._has_memory:
            torch.cuda.memory._dump_snapshot(str(self._file.with_suffix(".pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("wrote a profile of updates %d to %d to %s", self._first, self._done, self._file)

    def _start_if_due(self) -> None:
        if self._file is None or self._done != self._first - 1 or self._profile is not None:
            return
        if self._has_memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)
        on_device = [ProfilerActivity.CUDA] if self._membership.device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
        self._profile.start()
