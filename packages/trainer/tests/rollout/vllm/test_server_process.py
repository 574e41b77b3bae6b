"""The trainer's end of a server, where the server cannot start or misbehaves."""

import asyncio
import contextlib
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

from packages.trainer.tests.rollout.models_for_tests import make_requests, make_tokenizer
from temper_engine_api.errors import ConfigError, WeightError
from temper_engine_api.process_folders import SHARED_MEMORY, remove_orphans
from temper_trainer import redaction
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.config_loading import load
from temper_trainer.rollout.async_sampler import AsyncSampler, Cohort
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.vllm import server_process
from temper_trainer.rollout.vllm.messages import (
    Call,
    Hello,
    Ready,
    ServerSpec,
    decode,
    encode,
)
from temper_trainer.rollout.vllm.server import ServerLoop
from temper_trainer.rollout.vllm.server_process import ServerProcess
from temper_trainer.rollout.vllm.server_spec import build_server_spec
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_channel import DeviceLocation
from temper_trainer.types import (
    Completion,
    FinishReason,
    RefusedRequestError,
    SamplingRequest,
)
from temper_trainer.weight_sync.transport_factory import _locate_receivers

SPEC = ServerSpec(arguments={}, end_token_ids=(1,), max_length=64, vocab_size=41)
REQUESTS = make_requests([[2], [3], [2]], SamplingConfig(max_tokens=4))


def completion_of(request: SamplingRequest) -> Completion:
    tokens = (request.prompt_tokens[0],) * request.sampling.max_tokens
    return Completion(
        request_id=request.request_id,
        tokens=tokens,
        rollout_logprobs=(-1.0,) * len(tokens),
        finish_reason=FinishReason.MAX_TOKENS,
        weight_version=1,
    )


class FakeReplica:
    """A server that returns wrong results or dies at a given call, as only a broken one does."""

    def __init__(
        self,
        number: int,
        *,
        spoil: Callable[[Completion], Completion] = lambda c: c,
        dies_at: Sequence[int] = (),
    ) -> None:
        self.name = f"rollout replica {number}"
        self._spoil = spoil
        self._dies_at = list(dies_at)
        self.num_calls = self.num_starts = 0
        self.can_restart = True
        self.versions = {"vllm": "0.32.0"}
        self.loaded: list[int] = []
        self.requested: list[int] = []

    def start(self) -> None:
        self.num_starts += 1

    def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
        future: Future[list[Completion]] = Future()
        self.num_calls += 1
        if self.num_calls in self._dies_at:
            future.set_exception(ReplicaError(f"{self.name} died"))
        else:
            self.requested += [request.request_id for request in requests]
            future.set_result([self._spoil(completion_of(request)) for request in requests])
        return future

    def call(self, method: str, *arguments: object) -> "Future[object]":
        future: Future[object] = Future()
        assert method == "load"
        (version,) = arguments
        assert isinstance(version, int)
        self.loaded.append(version)
        future.set_result(version)
        return future

    def close(self) -> None: ...


def sampler_of(*replicas: FakeReplica, max_restarts: int = 2) -> VllmSampler:
    sampler = VllmSampler(replicas, spec=SPEC, max_restarts=max_restarts)
    sampler.load(lambda replica: replica.call("load", 1), version=1)
    return sampler


def test_server_without_vllm_names_the_package_to_install(tmp_path: Path) -> None:
    spec = replace(SPEC, environment={"PYTHONWARNINGS": "ignore"})
    log = tmp_path / "replica.log"
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import sys\nsys.modules['vllm'] = None\n"
    )  # also where this environment has vLLM
    server = ServerProcess(
        spec,
        name="rollout replica 0",
        python=sys.executable,
        log_file=log,
        start_timeout_s=240,
        stall_timeout_s=60,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        sentence = (
            r"rollout replica 0 cannot start: .* has no vLLM, .*pip install 'vllm>=0\.26,<0\.33'"
        )
        with pytest.raises(ConfigError, match=sentence):
            server.start()
    assert server.process_id is None


def test_server_gets_only_the_secrets_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_registered", {"the key of a judge"})
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    token = "+rollout.vllm.engine_kwargs.hf_token=${oc.env:HF_TOKEN}"
    config = load(["experiment=quickstart", "rollout=vllm", token]).config
    spec = build_server_spec(config, tokenizer=make_tokenizer())
    assert spec.arguments["hf_token"] == "hf_abcdefgh"
    assert spec.secrets == ("hf_abcdefgh",)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_log_of_a_server_and_its_workers_hides_the_secrets_of_its_arguments(
    tmp_path: Path, method: str
) -> None:
    secret = "given to the engine"
    package = tmp_path / "vllm"
    package.mkdir()
    # LLM.__init__ logs its arguments, and errors quote them. So do the workers of vLLM.
    (package / "__init__.py").write_text(
        "import multiprocessing, os\nimport worker_for_tests\n"
        "print('non-default args:', os.environ['GIVEN'], flush=True)\n"
        f"context = multiprocessing.get_context('{method}')\n"
        "process = context.Process(target=worker_for_tests.run)\n"
        "process.start()\nprocess.join()\n"
        "raise RuntimeError('no access with ' + os.environ['GIVEN'])\n"
    )
    (tmp_path / "worker_for_tests.py").write_text(
        "import os\n\ndef run():\n    print('worker:', os.environ['GIVEN'], flush=True)\n"
        "    raise ValueError('no worker with ' + os.environ['GIVEN'])\n"
    )
    server = ServerProcess(
        replace(SPEC, environment={"GIVEN": secret}, secrets=(secret,)),
        name="r",
        python=sys.executable,
        log_file=tmp_path / "replica.log",
        start_timeout_s=240,
        stall_timeout_s=60,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        with pytest.raises(ReplicaError, match="ended while it built its model"):
            server.start()
    log = (tmp_path / "replica.log").read_text()
    assert secret not in log
    assert "non-default args: <hidden>" in log
    assert "worker: <hidden>" in log
    assert "ValueError: no worker with <hidden>" in log
    assert "RuntimeError: no access with <hidden>" in log


def test_missing_interpreter_is_named(tmp_path: Path) -> None:
    server = ServerProcess(
        SPEC,
        name="r",
        python="/no/python",
        log_file=tmp_path / "log",
        start_timeout_s=60,
        stall_timeout_s=60,
    )
    with pytest.raises(
        ConfigError, match=r"runtime\.rollout_python is /no/python, which cannot be started"
    ):
        server.start()


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ("silent", r"r sent no message for rollout\.vllm\.stall_timeout_s = 1 s"),
        ("stuck", r"r sent no message for rollout\.vllm\.stall_timeout_s = 1 s"),
        ("garbled", r"r sent an invalid message \(ValidationError"),
    ],
)
def test_server_that_hangs_or_sends_invalid_messages_counts_as_dead(
    behaviour: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "SERVER_MODULE", "temper_trainer_test_server")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    spec = replace(SPEC, environment={"BEHAVIOUR": behaviour})
    server = ServerProcess(
        spec,
        name="r",
        python=sys.executable,
        log_file=tmp_path / "log",
        start_timeout_s=120,
        stall_timeout_s=1,
    )
    server.start()
    with pytest.raises(ReplicaError, match=sentence):
        server.call("anything").result(timeout=60)
    assert server.process_id is None


def test_living_server_may_load_for_the_load_timeout_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "SERVER_MODULE", "temper_trainer_test_server")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    server = ServerProcess(
        replace(SPEC, environment={"BEHAVIOUR": "beats"}),
        name="r",
        python=sys.executable,
        log_file=tmp_path / "log",
        start_timeout_s=120,
        stall_timeout_s=1,
        load_timeout_s=3,
    )
    server.start()
    begin = time.monotonic()
    sentence = r"r is alive, but .* for rollout\.vllm\.load_timeout_s = 3 s"
    with pytest.raises(ReplicaError, match=sentence):
        server.call("anything").result(timeout=60)
    assert time.monotonic() - begin > 3  # not after stall_timeout_s
    assert server.process_id is None


@pytest.mark.parametrize("behaviour", ["gives-up", "hangs-up"])
def test_log_of_a_server_that_closed_its_connection_is_read(
    behaviour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "SERVER_MODULE", "temper_trainer_test_server")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    spec = replace(SPEC, environment={"BEHAVIOUR": behaviour})
    server = ServerProcess(
        spec,
        name="r",
        python=sys.executable,
        log_file=tmp_path / "log",
        start_timeout_s=120,
        stall_timeout_s=60,
    )
    with pytest.raises(ReplicaError, match="the key is 7"):
        ask_once(server)
    assert server.process_id is None


DRIVER = """
import sys
from pathlib import Path
from temper_trainer.rollout.vllm import server_process
from temper_trainer.rollout.vllm.messages import ServerSpec
server_process.SERVER_MODULE = "temper_trainer_test_server"
spec = ServerSpec(
    arguments={}, end_token_ids=(1,), max_length=64, vocab_size=41,
    environment={"BEHAVIOUR": "builds"},
)
server_process.ServerProcess(
    spec, name="r", python=sys.executable, log_file=Path(sys.argv[1]) / "log",
    start_timeout_s=600, stall_timeout_s=600,
).start()
"""


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def servers_of(session: Path) -> list[Path]:
    """Return the folders in /proc of processes whose temporary directory is `session`."""
    marker = f"TMPDIR={session}".encode()
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if marker in (process / "environ").read_bytes() and b"_test_server" in command:
                processes.append(process)
    return processes


def test_killed_driver_leaves_no_starting_server_and_no_folder_after_the_next_start(
    tmp_path: Path,
) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": path}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], env=environment)
    with driver:
        assert wait_until(lambda: len(servers_of(tmp_path)) == 1, timeout_s=60)
        assert wait_until(lambda: len(list(tmp_path.glob("temper-server-*"))) == 1, timeout_s=60)
        time.sleep(2)  # the server has read its spec by then, in which case a thread of it watches
        (sockets,) = SHARED_MEMORY.glob(f"temper-ipc-*-{driver.pid}-*")
        driver.kill()
    assert wait_until(lambda: servers_of(tmp_path) == [], timeout_s=10)
    for root in (tmp_path, SHARED_MEMORY):
        remove_orphans(root)  # as the next start does
    assert not sockets.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


class EndlessEngine:
    """An engine whose requests end only when they are interrupted, and which checks as vLLM's."""

    def __init__(self) -> None:
        self.open: dict[tuple[int, int], SamplingRequest] = {}

    def add(self, key: tuple[int, int], request: SamplingRequest) -> None:
        if request.request_id == 2:
            raise RefusedRequestError("it is too long.", request.request_id)
        self.open[key] = request

    def interrupt(self, call: int | None = None) -> list[tuple[tuple[int, int], Completion]]:
        keys = [key for key in self.open if call is None or key[0] == call]
        reason = FinishReason.INTERRUPTED
        return [
            (key, replace(completion_of(self.open.pop(key)), finish_reason=reason)) for key in keys
        ]

    def load_files(self, buckets: object, version: int) -> int:
        if self.open:
            raise WeightError(f"{len(self.open)} requests are open: interrupt them first.")
        return version


class LoopServer(ServerProcess):
    """A server in a thread of this process, with the loop of a real one."""

    def __init__(self) -> None:
        super().__init__(
            SPEC,
            name="r",
            python="",
            log_file=Path(os.devnull),
            start_timeout_s=60,
            stall_timeout_s=60,
        )
        self.engine = EndlessEngine()

    def _connect(self) -> "Connection[object, object]":
        near, far = multiprocessing.Pipe()
        threading.Thread(target=self._serve, args=(far,), daemon=True).start()
        return near

    def _serve(self, connection: "Connection[object, object]") -> None:
        connection.send_bytes(encode(Hello(versions={"vllm": "0.32.0"})))
        connection.recv_bytes()
        connection.send_bytes(encode(Ready(device="cpu")))
        loop = ServerLoop(cast(Any, self.engine), connection, queue.SimpleQueue())
        with contextlib.suppress(EOFError), connection:
            while True:
                call = decode(connection.recv_bytes())
                assert isinstance(call, Call)
                loop._handle(call)


@pytest.mark.parametrize("aborts", [True, False])
def test_request_that_its_caller_gives_up_does_not_stay_open_at_a_weight_sync(aborts: bool) -> None:
    server = LoopServer()
    sampler = VllmSampler([server], spec=SPEC, max_restarts=0)
    if not aborts:  # as on Ray

        def sample(requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
            future: Future[list[Completion]] = Future()
            future.set_running_or_notify_cancel()

            def copy(done: "Future[list[Completion]]") -> None:
                if (error := done.exception()) is not None:
                    future.set_exception(error)
                else:
                    future.set_result(done.result())

            ServerProcess.sample(server, requests).add_done_callback(copy)
            return future

        server.sample = sample  # type: ignore[method-assign]

    def publish(version: int) -> None:
        sampler.load(lambda replica: replica.call("load_files", [], version), version=version)

    async def give_up() -> int:
        streaming = AsyncSampler(sampler, interrupts=True)
        tasks = [
            asyncio.create_task(streaming.sample(each, cohort=Cohort(num_open=2)))
            for each in REQUESTS[:2]
        ]
        while len(server.engine.open) < 2:
            await asyncio.sleep(0.005)
        tasks[0].cancel()
        if aborts:
            await asyncio.wait(tasks[:1])
            while len(server.engine.open) > 1:  # the other one continues
                await asyncio.sleep(0.005)
        tasks[1].cancel()
        await streaming.pause()
        publish(2)
        return streaming.num_active

    publish(1)
    assert asyncio.run(give_up()) == 0
    assert sampler._pool.is_idle(sampler._pool.ready[0])
    # Those before a refused one of the same call are not left either.
    with pytest.raises(RefusedRequestError, match="it is too long"):
        sampler.sample(REQUESTS)
    publish(3)
    sampler.close()


def ask_once(server: ServerProcess) -> None:
    server.start()
    server.call("anything").result(timeout=60)


def test_requests_of_a_dead_replica_are_repeated_with_the_last_weights() -> None:
    fake = FakeReplica(0, dies_at=[1])
    sampler = sampler_of(fake)
    assert sampler.sample(REQUESTS) == [completion_of(request) for request in REQUESTS]
    assert (fake.num_starts, fake.loaded, sampler.num_restarts) == (2, [1, 1], 1)


def test_other_servers_get_requests_while_a_dead_one_starts_again() -> None:
    may_start = threading.Event()

    class SlowStart(FakeReplica):
        def start(self) -> None:
            super().start()
            if self.num_starts > 1:
                assert may_start.wait(30)

    fakes = SlowStart(0, dies_at=range(1, 5)), FakeReplica(1)
    sampler = sampler_of(*fakes)

    async def sample(number: int) -> Completion:
        return await sampler.sample_one(
            replace(REQUESTS[0], request_id=number, prompt_tokens=(number + 2,))
        )

    async def sample_meanwhile() -> None:
        await asyncio.wait_for(asyncio.gather(*map(sample, range(8))), timeout=20)

    asyncio.run(sample_meanwhile())
    assert len(fakes[1].requested) == 8
    assert wait_until(lambda: fakes[0].num_starts == 2, timeout_s=30)
    assert (fakes[0].requested, fakes[0].loaded) == ([], [1])
    may_start.set()
    assert wait_until(lambda: sampler._pool.has_started, timeout_s=30)
    asyncio.run(sample_meanwhile())
    assert fakes[0].requested
    assert fakes[0].loaded == [1, 1]


def test_replica_that_dies_before_the_first_weights_is_restarted_and_its_requests_repeated() -> (
    None
):
    class DiesOnce(FakeReplica):
        """Is dead when it is first asked where its workers are."""

        def call(self, method: str, *arguments: object) -> "Future[object]":
            if method != "device_locations":
                return super().call(method, *arguments)
            future: Future[object] = Future()
            if self.num_starts == 1:
                future.set_exception(ReplicaError(f"{self.name} died"))
            else:
                future.set_result([("host", None)])
            return future

    fake = DiesOnce(0)
    sampler = VllmSampler([fake], spec=SPEC, max_restarts=2)
    assert _locate_receivers(sampler) == [DeviceLocation(host="host")]
    assert (fake.num_starts, sampler.num_restarts) == (2, 1)


def test_replica_that_dies_repeatedly_ends_the_run_with_the_cause() -> None:
    with pytest.raises(
        ReplicaError, match=r"(?s)rollout replica 0 died.*rollout\.vllm\.max_restarts is used up"
    ) as caught:
        sampler_of(FakeReplica(0, dies_at=range(10))).sample(REQUESTS)
    assert "run.resume" not in str(caught.value)  # the run adds the checkpoint


def test_equal_prompts_go_to_the_replica_that_has_cached_them() -> None:
    fakes = FakeReplica(0), FakeReplica(1)
    sampler = sampler_of(*fakes)
    sampler.sample(REQUESTS)
    assert sorted(map(sorted, (fakes[0].requested, fakes[1].requested))) == [[0, 2], [1]]
    sampler.sample([replace(REQUESTS[1], request_id=7)])
    assert sum(7 in fake.requested and 1 in fake.requested for fake in fakes) == 1


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda c: replace(c, tokens=c.tokens[:2], rollout_logprobs=c.rollout_logprobs[:2]),
            "2 tokens and finish reason max_tokens",
        ),
        (
            lambda c: replace(c, rollout_logprobs=(float("nan"),) * 4),
            "log-probs that are not finite",
        ),
        (lambda c: replace(c, rollout_logprobs=(-1.0,)), "4 tokens, 1 log-probs and id"),
        (lambda c: replace(c, weight_version=0), "weights 0, but weights 1 were published"),
        (lambda c: replace(c, tokens=(), rollout_logprobs=()), "0 tokens"),
    ],
)
def test_replica_with_an_invalid_result_is_refused(
    spoil: Callable[[Completion], Completion], sentence: str
) -> None:
    with pytest.raises(WeightError, match=sentence):
        sampler_of(FakeReplica(0, spoil=spoil)).sample(REQUESTS)


@pytest.mark.parametrize("second", [-2.0, float("nan")])
def test_replicas_with_different_logprobs_are_refused(second: float) -> None:
    class Judge(FakeReplica):
        """A replica whose log-prob of every token is `says`."""

        says = -1.0

        def call(self, method: str, *arguments: object) -> "Future[object]":
            if method != "compute_logprobs":
                return super().call(method, *arguments)
            future: Future[object] = Future()
            future.set_result([[self.says]])
            return future

    one, two = Judge(0), Judge(1)
    sampler = sampler_of(one, two)
    assert sampler.compute_logprobs([(2, 3)], temperature=1.0) == [[-1.0]]
    two.says = second
    with pytest.raises(
        WeightError, match="rollout replica 0 and rollout replica 1 return different log-probs"
    ):
        sampler.compute_logprobs([(2, 3)], temperature=1.0)


def test_replica_with_old_weights_is_refused() -> None:
    sampler = sampler_of(FakeReplica(0))
    with pytest.raises(
        WeightError, match="weights 2 were published, but rollout replica 0 has weights 1"
    ):
        sampler.load(lambda replica: replica.call("load", 1), version=2)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (replace(REQUESTS[0], prompt_tokens=()), "a prompt needs at least one token"),
        (replace(REQUESTS[0], prompt_tokens=(41,)), "ids from 0 to 40"),
        (
            replace(REQUESTS[0], prompt_tokens=(2,) * 61),
            r"rollout\.vllm\.max_model_len is 64",
        ),
    ],
)
def test_request_that_no_server_can_complete_is_refused(
    request_: SamplingRequest, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        sampler_of(FakeReplica(0)).sample([request_])
