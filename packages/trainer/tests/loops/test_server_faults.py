"""Runs whose servers die, stop, join and leave; servers are processes with transformers engines."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from packages.trainer.tests.rollout.models_for_tests import make_requests, make_tokenizer
from temper_engine_api.errors import ConfigError
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.config_loading import load
from temper_trainer.loops import RunResult
from temper_trainer.loops.rl_loop import StepLoop
from temper_trainer.loops.rl_step import StepResult
from temper_trainer.rollout.sampler import Replica, ReplicaError
from temper_trainer.rollout.vllm import server_process
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.remote_server import RemoteServer
from temper_trainer.rollout.vllm.server_addresses import TOKEN_VARIABLE
from temper_trainer.rollout.vllm.server_process import ServerProcess
from temper_trainer.rollout.vllm.server_spec import build_server_spec
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.runtime import vllm_servers
from temper_trainer.types import Completion, RefusedRequestError

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]

MODULE = "packages.trainer.tests.rollout.vllm.temper_trainer_test_engine"
SHORT_RUN = (
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "sampling.max_tokens=8",
    "sampling.top_k=1",
    "algorithm.group_size=1",
    "algorithm=reinforce_plus_plus",
    "actor.engine.optimizer.lr=1e-2",
    "loop=one_step_off",
    "run.total_steps=5",
)
COLLECTIVE = ("rollout=vllm", "weight_sync.transport=collective", "weight_sync.bucket_bytes=20000")
NUMBERS = ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/tokens")
LISTENER = f"""
import sys
from temper_trainer.rollout.vllm.listening_server import ListeningServer
server = ListeningServer("127.0.0.1", int(sys.argv[1]), token="secret of a test", module={MODULE!r})
print(server.port, flush=True)
server.serve_forever()
"""

run_step = StepLoop.run_step


@pytest.fixture(autouse=True)
def _use_test_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[4])
    monkeypatch.setattr(server_process, "SERVER_MODULE", MODULE)
    monkeypatch.setattr(vllm_servers, "WATCH_INTERVAL_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(TOKEN_VARIABLE, "secret of a test")


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> dict[int, Callable[[VllmSampler], None]]:
    """Actions that are called before steps, by the number of the step."""
    actions: dict[int, Callable[[VllmSampler], None]] = {}

    def act_and_run(loop: StepLoop, *, step: int, **given: object) -> StepResult:
        sampler = loop.components.sampler
        if isinstance(sampler, VllmSampler) and step in actions:
            actions[step](sampler)
        return run_step(loop, step=step, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(StepLoop, "run_step", act_and_run)
    return actions


class Listener:
    """A server that listens, in a process."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LISTENER, str(port)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.address = f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Kill it and the process that serves a run."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()]
        for pid in (self._process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    """Start servers that listen; ended with the test."""
    started: list[Listener] = []

    def start(port: int = 0) -> Listener:
        started.append(Listener(port))
        return started[-1]

    yield start
    for each in started:
        if each._process.poll() is None:
            each.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def send_signal(replica: Replica, number: signal.Signals) -> None:
    assert isinstance(replica, ServerProcess)
    assert replica.process_id is not None
    os.killpg(replica.process_id, number)


def assert_close(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(actual) == len(expected) == 5
    for name in NUMBERS:
        assert [row[name] for row in actual] == pytest.approx(
            [row[name] for row in expected], rel=1e-4, abs=1e-6
        ), name


def wait_for_restart(sampler: VllmSampler) -> None:
    (start,) = [each.start for each in sampler._pool._members if each.start is not None]
    start.result(timeout=120)


# Nightly: makes runs with servers that restart. In test_server_process.py replicas die every day.
@pytest.mark.nightly
def test_servers_that_are_killed_or_stopped_leave_their_work_to_the_others(
    run: Run,
    rows: Rows,
    tmp_path: Path,
    before_step: dict[int, Callable[[VllmSampler], None]],
) -> None:
    run(tmp_path / "hf", *SHORT_RUN)
    samplers: list[VllmSampler] = []
    before_step |= {
        1: samplers.append,
        2: lambda sampler: send_signal(sampler.replicas[0], signal.SIGKILL),
        # With the weights of step 3, it takes part again.
        3: wait_for_restart,
        4: lambda sampler: send_signal(sampler.replicas[1], signal.SIGSTOP),
    }
    run(
        tmp_path / "faults",
        *SHORT_RUN,
        *COLLECTIVE,
        "rollout.num_replicas=2",
        "rollout.vllm.stall_timeout_s=10",
    )
    assert samplers[0].num_restarts == 2
    assert_close(rows(tmp_path / "faults"), rows(tmp_path / "hf"))


# Nightly: makes a run with servers that join and leave. test_server_membership.py tests it without
# one.
@pytest.mark.nightly
def test_servers_join_and_leave_by_their_lines_in_a_file(
    run: Run,
    rows: Rows,
    tmp_path: Path,
    before_step: dict[int, Callable[[VllmSampler], None]],
    listen: Callable[..., Listener],
) -> None:
    first, second = listen(), listen()
    file = tmp_path / "servers"
    file.write_text(f"{first.address}\n")

    def join(sampler: VllmSampler) -> None:
        file.write_text(f"{first.address}\n{second.address}\n")
        wait_until(lambda: len(sampler.replicas) == 2)

    def leave(sampler: VllmSampler) -> None:
        file.write_text(f"{second.address}\n")
        wait_until(lambda: [each.name for each in sampler.replicas] == [f"server {second.address}"])

    def restart(sampler: VllmSampler) -> None:
        # The only one: its requests wait until it listens again.
        second.kill()
        listen(second.port)

    run(tmp_path / "hf", *SHORT_RUN, "loop=sync")
    before_step |= {2: join, 3: leave, 4: restart}
    run(
        tmp_path / "elastic",
        *SHORT_RUN,
        "loop=sync",
        *COLLECTIVE,
        f"rollout.vllm.servers_file={file}",
    )
    assert_close(rows(tmp_path / "elastic"), rows(tmp_path / "hf"))


SPEC = ServerSpec(arguments={}, end_token_ids=(1,), max_length=64, vocab_size=41)


def test_server_that_refuses_a_request_continues(tmp_path: Path) -> None:
    config = load(["experiment=quickstart", "rollout=vllm"]).config
    spec = build_server_spec(config, tokenizer=make_tokenizer())
    server = ServerProcess(
        spec,
        name="rollout replica 0",
        python=sys.executable,
        log_file=tmp_path / "replica-0.log",
        start_timeout_s=120,
        stall_timeout_s=60,
    )
    # The sampler would refuse the long request itself, if it knew the limit of the server.
    sampler_spec = replace(spec, max_length=10**6)
    requests = make_requests([[5] * 5000, [5]], SamplingConfig(max_tokens=3))

    async def sample_all(sampler: VllmSampler) -> list[Completion | BaseException]:
        return await asyncio.gather(*map(sampler.sample_one, requests), return_exceptions=True)

    # Without restarts: a server that is started again for a refused request would end the test.
    with closing(VllmSampler([server], spec=sampler_spec, max_restarts=0)) as sampler:
        refused, completion = asyncio.run(sample_all(sampler))
        assert isinstance(refused, RefusedRequestError)
        assert str(refused) == "rollout replica 0: request 0 is too long."
        assert isinstance(completion, Completion)
        assert len(completion.tokens) <= 3
        send_signal(server, signal.SIGKILL)
        with pytest.raises(ReplicaError, match="max_restarts is used up"):
            asyncio.run(sampler.sample_one(requests[1]))


def connect(address: str) -> RemoteServer:
    server = RemoteServer(
        SPEC, address=address, start_timeout_s=60, stall_timeout_s=60, load_timeout_s=60
    )
    try:
        server.start()
    finally:
        server.close()
    return server


def test_server_accepts_only_runs_with_its_token(
    listen: Callable[..., Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = listen().address
    monkeypatch.setenv(TOKEN_VARIABLE, "another secret of servers")
    with pytest.raises(
        ConfigError, match=f"server {address} has another token: set {TOKEN_VARIABLE}"
    ):
        connect(address)
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(ConfigError, match=f"{TOKEN_VARIABLE} is not set"):
        connect(address)


def test_server_that_does_not_listen_is_named() -> None:
    with pytest.raises(
        ReplicaError, match=r"server 127.0.0.1:1 can't be reached .*listening_server"
    ):
        connect("127.0.0.1:1")


# Nightly: a killed driver's folder is removed by the same function, which test_leftovers.py tests.
@pytest.mark.nightly
def test_folder_of_a_killed_server_is_removed_by_the_next_one(
    listen: Callable[..., Listener], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    killed = listen()
    with pytest.raises(ReplicaError):  # SPEC has no model, which the process of a run finds
        connect(killed.address)
    killed.kill()
    (left,) = tmp_path.iterdir()
    assert f"-{killed._process.pid}-" in left.name
    with pytest.raises(ReplicaError):
        connect(listen().address)
    assert not left.exists()
