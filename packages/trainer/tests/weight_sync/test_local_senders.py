"""Every rank of the actor sends to the workers of servers on its own GPU, tested over gloo."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.rollout.packed_bucket import PackedBucket, unpack_tensors
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_channel import (
    ChannelError,
    ChannelSpec,
    DeviceLocation,
    WeightChannel,
    join_channel,
)
from temper_trainer.weight_sync.collective_transport import CollectiveTransport, assign_senders

GPUS = [DeviceLocation(host="a", gpu=f"GPU-{i}") for i in range(4)]
WEIGHTS = {f"layer {i}": torch.full((16,), float(i)) for i in range(6)}
TIMEOUT_S = 30


class Rank:
    """One rank of the actor, whose export is collective: all ranks read a tensor together."""

    def __init__(self, rank: int, gather: threading.Barrier) -> None:
        self.rank = rank
        self.is_first = rank == 0
        self.transport_state: dict[str, object] = {}
        self._gather = gather

    def export_weights(self) -> WeightStream:
        """Yield all weights; each waits for the other ranks."""
        return WeightStream(self._export())

    def _export(self) -> Iterator[NamedWeight]:
        for name, tensor in WEIGHTS.items():
            self._gather.wait(TIMEOUT_S)
            yield NamedWeight(name, tensor)


class Actor:
    """All ranks, each in a thread."""

    num_updates = 0

    def __init__(self, num_ranks: int) -> None:
        gather = threading.Barrier(num_ranks)
        self.ranks = [Rank(rank, gather) for rank in range(num_ranks)]
        self._threads = ThreadPoolExecutor(num_ranks)

    def run_on_all(self, call: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a function with every rank at once."""
        return list(self._threads.map(lambda rank: call(rank, *arguments), self.ranks))


class Server:
    """A server with a worker, in a thread, on each of its GPUs."""

    can_restart = True
    versions = {"vllm": "0.32.0"}

    def __init__(self, number: int, gpus: list[DeviceLocation]) -> None:
        self.name = f"rollout replica {number}"
        self.gpus = gpus
        self.num_starts = 0
        self.dies_at_bucket: int | None = None
        self._workers = ThreadPoolExecutor(len(gpus))
        self._calls = ThreadPoolExecutor(1)

    def start(self) -> None:
        """Forget everything, as a new process does."""
        self.num_starts += 1
        self.is_dead = False
        self.channels: list[WeightChannel] = []
        self.received: list[dict[str, Tensor]] = [{} for _ in self.gpus]

    def close(self) -> None: ...

    def sample(self, requests: object) -> "Future[Any]":
        """Refuse; these tests sample nothing."""
        raise NotImplementedError

    def call(self, method: str, *arguments: Any) -> "Future[object]":
        """Return the result of a server's method."""
        return self._calls.submit(self._run, method, *arguments)

    def _run(self, method: str, *arguments: Any) -> object:
        try:
            if not self.is_dead:
                return getattr(self, method)(*arguments)
        except ChannelError as error:
            raise ReplicaError(f"{self.name}: {error}") from error
        raise ReplicaError(f"{self.name} died")

    def device_locations(self) -> list[tuple[str, str | None]]:
        """Return the GPU of each worker."""
        return [(gpu.host, gpu.gpu) for gpu in self.gpus]

    def cached_version(self) -> int:
        """Return -1: no delta can be applied."""
        return -1

    def join_channels(self, specs: list[ChannelSpec]) -> None:
        """Open the end of each worker."""
        fields = [spec.to_dict() for spec in specs]
        self.channels = list(
            self._workers.map(lambda each: join_channel(each, device=torch.device("cpu")), fields)
        )

    def receive_weights(
        self, layout: list[PackedBucket], version: int, keep_copy: bool = False
    ) -> int:
        """Receive bucket after bucket in all workers."""
        for index, bucket in enumerate(layout):
            if index == self.dies_at_bucket:
                self.is_dead, self.dies_at_bucket = True, None
                for channel in self.channels:
                    channel.close()
                raise ReplicaError(f"{self.name} died")
            for received, data in zip(
                self.received, self._workers.map(self._receive, self.channels, [bucket] * 4)
            ):
                received |= {name: value.clone() for name, value in unpack_tensors(data, bucket)}
        return version

    def _receive(self, channel: WeightChannel, bucket: PackedBucket) -> Tensor:
        return channel.receive(bucket)

    @property
    def has_all(self) -> bool:
        """True if every worker has the actor's weights."""
        return all(
            each.keys() == WEIGHTS.keys()
            and all(each[name].equal(tensor) for name, tensor in WEIGHTS.items())
            for each in self.received
        )


def transport_between(actor: Actor, *servers: Server, senders: int) -> CollectiveTransport:
    spec = ServerSpec(arguments={}, end_token_ids=(1,), max_length=64, vocab_size=41)
    return CollectiveTransport(
        actor=actor,
        sampler=VllmSampler(servers, spec=spec, max_restarts=3),
        backend="gloo",
        workers_per_replica=len(servers[0].gpus),
        bucket_bytes=128,
        with_digest=True,
        load_timeout_s=60,
        can_resend=True,
        senders=GPUS[:senders],
    )


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([[0, 1]], {0: 2, 1: 2}),
        ([[2, 1], [0, 3]], {0: 2, 1: 2, 2: 2, 3: 2}),
        ([[2, 3]], {2: 2, 3: 2}),
        ([[0], [0]], {0: 3}),
    ],
)
def test_each_worker_gets_the_weights_from_the_rank_on_its_gpu(
    gpus: list[list[int]], expected: dict[int, int]
) -> None:
    servers = [Server(i, [GPUS[gpu] for gpu in each]) for i, each in enumerate(gpus)]
    transport = transport_between(Actor(4), *servers, senders=4)
    for version in (1, 2):
        # 6 tensors of 16 floats.
        assert transport.send(version).num_bytes == 6 * 16 * 4
        assert all(server.has_all for server in servers)
    assert {rank: spec.size for rank, spec in transport._specs.items()} == expected
    transport.close()


def test_server_that_dies_while_several_ranks_send_is_restarted_and_gets_the_weights() -> None:
    first, second = Server(0, GPUS[:2]), Server(1, GPUS[2:])
    first.dies_at_bucket = 1
    transport = transport_between(Actor(4), first, second, senders=4)
    transport.send(1)
    assert second.has_all
    for each in transport._sampler._pool._members:
        if each.start is not None:
            each.start.result(timeout=TIMEOUT_S)
    transport.send(2)
    assert (first.num_starts, second.num_starts) == (2, 1)
    assert first.has_all
    transport.close()


def test_restarted_server_gets_the_weights_again_from_the_ranks_on_its_gpus() -> None:
    first, second = Server(0, GPUS[:2]), Server(1, GPUS[2:])
    transport = transport_between(Actor(4), first, second, senders=4)
    transport.send(1)
    second.is_dead = True
    sampler = transport._sampler
    sampler.call_each("cached_version", [()] * 2)
    assert (second.num_starts, second.has_all) == (2, True)
    transport.close()


def test_worker_on_a_gpu_without_a_rank_is_refused() -> None:
    with pytest.raises(ReplicaError, match=r"GPU-3 of host a, which no rank of the actor uses"):
        assign_senders([[GPUS[0], GPUS[3]]], senders=GPUS[:2])


def test_server_that_joins_on_a_gpu_without_a_rank_leaves_again() -> None:
    first, second = Server(0, GPUS[:2]), Server(1, GPUS[2:])
    transport = transport_between(Actor(2), first, senders=2)
    transport.send(1)
    second.start()
    second.can_restart = False
    sampler = transport._sampler
    sampler.add(second)
    first.received = [{} for _ in first.gpus]
    transport.send(2)
    assert first.has_all
    assert sampler.replicas == (first,)
    assert sampler.has_refused(second)
    transport.close()


def test_ranks_on_one_gpu_have_one_sender() -> None:
    assert assign_senders([[GPUS[1]]], senders=[GPUS[0], GPUS[1], GPUS[1]]) == [[1]]
