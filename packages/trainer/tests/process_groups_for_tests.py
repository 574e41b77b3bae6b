"""Check that process groups are killed before their ids can belong to other processes."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from temper_trainer.process_groups import kill_group, kill_group_on_exit

needs_waitid = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose waitid has WNOWAIT"
)


def check_group_ids(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[int]:
    """Check each group that a module kills or watches; return the list of those it kills."""
    killed: list[int] = []

    def check_id_is_used(group: int) -> None:
        # As the start of any other process does, this waits for those that have died.
        multiprocessing.active_children()
        # Raises ChildProcessError if the process was waited for, so that its id may be reused.
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def kill(group: int) -> None:
        check_id_is_used(group)
        killed.append(group)
        kill_group(group)

    @contextmanager
    def watch(group: int) -> Iterator[None]:
        with kill_group_on_exit(group):
            yield
        check_id_is_used(group)

    monkeypatch.setattr(module, "kill_group", kill)
    monkeypatch.setattr(module, "kill_group_on_exit", watch)
    return killed
