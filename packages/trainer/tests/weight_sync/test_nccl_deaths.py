"""A server with its own GPU that is killed while NCCL sends weights to it."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from packages.trainer.tests.weight_sync.test_collective_transport import Actor, sampler_of
from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.weight_channel import WeightChannel, join_channel
from temper_trainer.weight_sync.collective_transport import CollectiveTransport

BUCKET_BYTES = 64 << 20
NUM_BUCKETS = 4


class GpuActor(Actor):
    """One rank, in this process, with weights on the first GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = {
            str(i): torch.full((BUCKET_BYTES // 4,), float(i), device="cuda:0")
            for i in range(NUM_BUCKETS)
        }

    def export_weights(self) -> WeightStream:
        """Yield all weights."""
        return WeightStream(iter([NamedWeight(name, each) for name, each in self.weights.items()]))


def serve(connection: "Connection[Any, Any]") -> None:
    """Answer the calls of a `GpuServer` with a channel to the second GPU."""
    torch.cuda.set_device(1)
    channel: WeightChannel | None = None
    version = -1
    while True:
        method, arguments = connection.recv()
        result: object = None
        if method == "join_channels":
            ((spec,),) = arguments
            if channel is not None:
                channel.close()
            channel = join_channel(spec.to_dict(), device=torch.device("cuda", 1))
        elif method == "receive_weights":
            assert channel is not None
            layout, version = arguments
            for number, bucket in enumerate(layout):
                data = channel.receive(bucket).view(torch.float32)
                assert bool((data == float(number)).all())
            result = version
        elif method == "cached_version":
            result = version
        connection.send(result)


class GpuServer:
    """A server in a process of its own."""

    can_restart = True
    name = "rollout replica 0"
    versions = {"vllm": "0.26.0"}

    def __init__(self) -> None:
        self.num_starts = 0
        self._thread = ThreadPoolExecutor(1)

    def start(self) -> None:
        """Start a new process."""
        self.num_starts += 1
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=serve, args=(other_end,), daemon=True)
        self._process.start()
        other_end.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def sample(self, requests: object) -> "Future[Any]":
        """Refuse; these tests sample nothing."""
        raise NotImplementedError

    def call(self, method: str, *arguments: Any) -> "Future[object]":
        """Return the result of a method of the process."""
        return self._thread.submit(self._run, method, *arguments)

    def kill(self) -> None:
        """Kill the process without notice."""
        pid = self._process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def _run(self, method: str, *arguments: Any) -> object:
        try:
            self._connection.send((method, arguments))
            return self._connection.recv()
        except (OSError, EOFError) as error:
            raise ReplicaError(f"{self.name} died") from error


@pytest.fixture
def server() -> Iterator[GpuServer]:
    each = GpuServer()
    yield each
    each.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, such as H200s")
def test_server_killed_while_nccl_sends_weights_is_restarted_and_gets_them(
    server: GpuServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.set_device(0)
    transport = CollectiveTransport(
        actor=GpuActor(),
        sampler=sampler_of(server),  # type: ignore[arg-type]
        backend="nccl",
        workers_per_replica=1,
        bucket_bytes=BUCKET_BYTES,
        with_digest=True,
        load_timeout_s=60,
        can_resend=False,
    )
    send, num_sent = WeightChannel.send, [0]

    def send_and_kill(channel: WeightChannel, data: Tensor) -> None:
        send(channel, data)
        num_sent[0] += 1
        if num_sent[0] == NUM_BUCKETS + 2:
            server.kill()

    monkeypatch.setattr(WeightChannel, "send", send_and_kill)
    transport.send(1)
    begin = time.monotonic()
    transport.send(2)
    seconds = time.monotonic() - begin
    assert server.num_starts == 2
    assert server.call("cached_version").result() == 2
    assert seconds < 60, "without notice, it would be the channel's 120 s"
    transport.close()
    assert float(torch.ones(4, device="cuda:0").sum()) == 4.0
