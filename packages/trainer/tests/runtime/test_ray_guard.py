"""Test that a killed run leaves no process of its Ray cluster."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from temper_trainer.runtime.ray.ray_guard import MARKER_VARIABLE, RayGuard, find_processes

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
DRIVER = """
import sys
from temper_trainer.config.run import RuntimeConfig
from temper_trainer.runtime.ray import ray_runtime
guard = ray_runtime.RayGuard
class Told(guard):
    def __init__(self):
        super().__init__()
        print(self._token, flush=True)
ray_runtime.RayGuard = Told
ray_runtime.connect_to_ray(RuntimeConfig(kind="ray"))
print("connected", flush=True)
sys.stdin.read()
"""


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_guard_ends_only_processes_started_under_it() -> None:
    guard = RayGuard()
    with guard:
        own = subprocess.Popen(SLEEPER, start_new_session=True)
    other = subprocess.Popen(SLEEPER)
    with own, other:
        assert wait_until(lambda: find_processes(guard._token) == [own.pid], timeout_s=10)
        guard.close()
        assert own.wait(timeout=10) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()
    assert MARKER_VARIABLE not in os.environ


@pytest.mark.ray
# Nightly: starts Ray. The guard is tested without it above.
@pytest.mark.nightly
@pytest.mark.parametrize(
    "num_lines", [1, 2], ids=["while it starts Ray", "when it has started Ray"]
)
def test_killed_driver_leaves_no_process_of_its_cluster(num_lines: int) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdout is not None
        token = driver.stdout.readline().strip()
        if num_lines == 2:
            assert driver.stdout.readline() == "connected\n"
        least = 1 if num_lines == 1 else 4  # GCS, raylet and their agents
        assert wait_until(lambda: len(find_processes(token)) >= least, timeout_s=60)
        driver.kill()
    assert wait_until(lambda: find_processes(token) == [], timeout_s=10)
