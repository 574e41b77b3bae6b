"""Test that a killed group of server processes leaves nothing in shared memory."""

import subprocess
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from temper_trainer.rollout.vllm.server_group import kill_server_group

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose /proc names the files that a process maps"
)
LEADER = """
import sys, subprocess, time
from multiprocessing.shared_memory import SharedMemory
if len(sys.argv) < 3:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[1], "worker"])
else:
    own, shared = SharedMemory(create=True, size=4096), SharedMemory(create=True, size=4096)
    print(own.name, shared.name, flush=True)
time.sleep(600)
"""


def test_killed_group_leaves_no_shared_memory_but_what_others_map() -> None:
    command = [sys.executable, "-c", LEADER, LEADER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        own, shared = leader.stdout.readline().split()
        mapped = SharedMemory(shared)
        # It would remove the file itself when this process ends.
        resource_tracker.unregister(f"/{shared}", "shared_memory")
        assert Path("/dev/shm", own).exists()
        kill_server_group(leader.pid)
    assert not Path("/dev/shm", own).exists()
    assert Path("/dev/shm", shared).exists()
    mapped.close()
    Path("/dev/shm", shared).unlink()
