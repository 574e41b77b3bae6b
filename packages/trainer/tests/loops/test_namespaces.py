"""Run two Ray nodes in network namespaces without a common loopback address."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from temper_trainer.loops import RunResult

from .conftest import SMALL

pytest.importorskip("ray", reason="Ray is not installed: pip install './packages/trainer[ray]'")
# Nightly: starts two Ray nodes and needs root; it takes minutes.
pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1800)]

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
NAMES = (f"temper-{os.getpid()}-a", f"temper-{os.getpid()}-b")
ADDRESSES = ("10.211.77.1", "10.211.77.2")
PORT = 6391
SHORT_RUN = (
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.total_steps=3",
    "sampling.max_tokens=12",
    "algorithm=reinforce_plus_plus",
    "actor.engine.model.architecture.hidden_size=128",
    "sampling.top_k=1",
    "algorithm.group_size=1",
)
APART = (
    "runtime.kind=ray",
    f"runtime.address={ADDRESSES[0]}:{PORT}",
    "rollout.pool=rollout",
    "run.progress=false",
)


COUNT_NODES = f"""
import ray
ray.init(
    address="{ADDRESSES[0]}:{PORT}",
    include_dashboard=False,
    log_to_driver=False,
    configure_logging=False,
)
print(sum(node["Alive"] for node in ray.nodes()))
"""


def environment() -> dict[str, str]:
    """Return the environment of all processes; in isolated namespaces Ray needs no token."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}


def on_head(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in the namespace of the head node."""
    inside = ["ip", "netns", "exec", NAMES[0], sys.executable, *command]
    return subprocess.run(
        inside, env=environment(), capture_output=True, text=True, timeout=900, check=False
    )


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def remove_namespaces() -> None:
    """Remove the namespaces with all processes in them, which were started here."""
    for name in NAMES:
        for word in subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        ).stdout.split():
            subprocess.run(["kill", "-9", word], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def node(node_index: int, *arguments: str, folder: str) -> "subprocess.Popen[bytes]":
    """Start one Ray node of one core in its namespace."""
    command = [
        "ip",
        "netns",
        "exec",
        NAMES[node_index],
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--num-cpus=1",
    ]
    with Path(folder, f"node-{node_index}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, f"--node-ip-address={ADDRESSES[node_index]}", *arguments],
            env=environment(),
            stdout=log,
            stderr=log,
        )


def wait_for_nodes(number: int, *, folder: str) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        counted = on_head("-c", COUNT_NODES)
        if counted.stdout.strip() == str(number):
            return
    logs = [path.read_text() for path in sorted(Path(folder).glob("node-*.log"))]
    raise AssertionError("\n".join([*logs, counted.stdout, counted.stderr]))


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    """A head and another node."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        remove_namespaces()
        pytest.skip(
            f"network namespaces can't be made here ({error}): run as root on Linux with iproute2"
        )
    ends = [f"tmp{os.getpid() % 100000}{side}" for side in "ab"]
    ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for name, end, address in zip(NAMES, ends, ADDRESSES, strict=True):
        ip("link", "set", end, "netns", name)
        ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        for device in (end, "lo"):
            ip("-n", name, "link", "set", device, "up")
    folder = tempfile.mkdtemp(prefix="tr-", dir="/tmp")  # names of sockets must be short
    processes: list[subprocess.Popen[bytes]] = []
    try:
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
        processes.append(node(0, *head, folder=folder))
        wait_for_nodes(1, folder=folder)
        processes.append(node(1, f"--address={ADDRESSES[0]}:{PORT}", folder=folder))
        wait_for_nodes(2, folder=folder)
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
        remove_namespaces()
        for process in processes:
            process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def run_apart(folder: Path, *overrides: str) -> str:
    """Run with the driver on the head node, and return its output."""
    done = on_head(
        "-m", "temper_trainer", *SMALL, *SHORT_RUN, *APART, f"run.dir={folder}", *overrides
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.bitwise
def test_roles_in_separate_namespaces_give_the_metrics_of_one_process(
    run: Run, rows: Rows, tmp_path: Path, nodes: None
) -> None:
    run(tmp_path / "inline", *SHORT_RUN)
    output = run_apart(tmp_path / "apart")
    assert "train[0]: actor on 1 CPU" in output
    assert "rollout[0]: rollout on 1 CPU" in output
    assert {f"train[0]: {ADDRESSES[0]}", f"rollout[0]: {ADDRESSES[1]}"} <= set(
        output.splitlines()
    ) or {
        f"train[0]: {ADDRESSES[1]}",
        f"rollout[0]: {ADDRESSES[0]}",
    } <= set(output.splitlines())
    assert rows(tmp_path / "apart") == rows(tmp_path / "inline")


@pytest.mark.vllm
def test_weights_reach_a_server_on_another_host_by_broadcast(
    run: Run, rows: Rows, tmp_path: Path, nodes: None
) -> None:
    named = os.environ.get("TEMPER_ROLLOUT_PYTHON")
    if named is None and importlib.util.find_spec("vllm") is None:
        pytest.skip(
            "vLLM is neither installed here nor named by TEMPER_ROLLOUT_PYTHON: nox -s vllm makes "
            "an environment and runs this"
        )
    served = (
        "rollout=vllm",
        f"runtime.rollout_python={named or sys.executable}",
        "rollout.vllm.kv_cache_bytes=67108864",
    )
    served = (
        *served,
        "rollout.vllm.enforce_eager=true",
        "rollout.max_concurrent=16",
        "weight_sync.transport=collective",
    )
    run(tmp_path / "inline", *SHORT_RUN)
    run_apart(tmp_path / "apart", *served)
    for name in ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/tokens"):
        expected = [row[name] for row in rows(tmp_path / "inline")]
        assert [row[name] for row in rows(tmp_path / "apart")] == pytest.approx(
            expected, rel=1e-4, abs=1e-6
        ), name
