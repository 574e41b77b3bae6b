"""A channel between an actor and a server's worker, over gloo: whatever the size of a bucket."""

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from temper_engine_api.rendezvous import get_run_token
from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.rollout.packed_bucket import PackedBucket, unpack_tensors
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_channel import ChannelSpec, WeightChannel, join_channel
from temper_trainer.rollout.weight_delta import apply_delta, check_updated_bucket
from temper_trainer.weight_sync.collective_transport import CollectiveTransport, open_store

WEIGHTS = {"small": torch.arange(4.0), "wide": torch.arange(1000.0), "last": torch.tensor([7.0])}


class Actor:
    """One rank, in this process."""

    is_first, num_updates = True, 0

    def __init__(self) -> None:
        self.transport_state: dict[str, object] = {}
        self.weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}

    def export_weights(self) -> WeightStream:
        """Yield all weights."""
        return WeightStream(
            iter([NamedWeight(name, tensor) for name, tensor in self.weights.items()])
        )

    def run_on_all(self, call: Callable[..., Any], *arguments: object) -> list[Any]:
        return [call(self, *arguments)]


class Worker:
    """The other end, in a thread."""

    cached: list[list[Tensor]]
    version = 0

    def __init__(self) -> None:
        self.name = "rollout replica 0"
        self.replicas, self._thread = [self], ThreadPoolExecutor(1)
        self.received: dict[str, Tensor] = {}
        self.buffer_addresses: set[int] = set()

    def call(self, method: str, *arguments: Any) -> "Future[object]":
        """Return the result of a server's method."""
        return self._thread.submit(getattr(self, method), *arguments)

    def join_channel(self, spec: ChannelSpec) -> None:
        """Open this end."""
        self._channel: WeightChannel = join_channel(
            spec.to_dict(), worker_rank=0, device=torch.device("cpu")
        )

    def receive_weights(
        self, layout: list[PackedBucket], version: int, keep_copy: bool = False
    ) -> None:
        """Receive every bucket."""
        self.cached, self.version = [], version
        for bucket in layout:
            data = self._channel.receive(bucket)
            self.buffer_addresses.add(data.data_ptr())
            own = {name: tensor.clone() for name, tensor in unpack_tensors(data, bucket)}
            self.received |= own
            self.cached.append(list(own.values()))

    def cached_version(self) -> int:
        """Return the version of the cached weights."""
        return self.version

    def receive_delta(self, layout: list[PackedBucket], base_version: int, version: int) -> None:
        """Receive and apply the delta of every bucket."""
        assert base_version == self.version
        for bucket, cached in zip(layout, self.cached, strict=True):
            changes, data = self._channel.receive_delta(bucket.entries)
            apply_delta(cached, data, bucket.entries, changes.counts)
            check_updated_bucket(
                cached, changes.updated_digest, version=version, base_version=base_version
            )
        self.version = version

    def load_while_sending(
        self,
        receive: Callable[["Worker"], "Future[object]"],
        send: Callable[[], object],
        *,
        version: int,
        reload: object,
    ) -> None:
        """Receive and send at the same time."""
        self.reload = cast('Callable[[Worker], "Future[object]"]', reload)
        answer = receive(self)
        send()
        answer.result()


def transport_between(
    actor: Actor,
    worker: Worker,
    *,
    bucket_bytes: int = 64,
    max_changed_fraction: float | None = None,
) -> CollectiveTransport:
    return CollectiveTransport(
        actor=actor,
        sampler=cast("VllmSampler", worker),
        backend="gloo",
        workers_per_replica=1,
        bucket_bytes=bucket_bytes,
        with_digest=True,
        can_resend=True,
        max_changed_fraction=max_changed_fraction,
    )


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_every_bucket_arrives_in_the_same_memory_also_a_tensor_larger_than_a_bucket(
    bucket_bytes: int,
) -> None:
    # The memory is agreed on when the channel is opened, and with cuda_ipc it can't be changed
    # afterwards.
    worker = Worker()
    transport = transport_between(Actor(), worker, bucket_bytes=bucket_bytes)
    for version in (1, 2):
        transport.send(version)
        assert worker.received.keys() == WEIGHTS.keys()
        assert all(worker.received[name].equal(tensor) for name, tensor in WEIGHTS.items())
    assert len(worker.buffer_addresses) == 1
    transport.close()


def test_restarted_server_gets_the_weights_again_and_takes_part_in_the_next_publish() -> None:
    actor, worker = Actor(), Worker()
    transport = transport_between(actor, worker)
    transport.send(1)
    again = Worker()
    worker.replicas = [again]
    worker.reload(again).result()
    assert again.received.keys() == WEIGHTS.keys()
    again.received.clear()
    worker.call = again.call  # type: ignore[method-assign]
    transport.send(2)
    assert all(again.received[name].equal(tensor) for name, tensor in WEIGHTS.items())
    transport.close()


def test_channel_listens_only_on_the_configured_address() -> None:
    address, port, token = open_store(cast("Any", Actor()), "127.0.0.3")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((address, port))
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.1", port))
    assert (address, token) == ("127.0.0.3", get_run_token())


def test_channel_stops_listening_when_it_is_closed() -> None:
    transport = transport_between(Actor(), Worker())
    listen_address = (transport._spec.address, transport._spec.port)
    transport.send(1)
    transport.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listen_address)


def test_repr_of_a_channel_spec_hides_token_and_nonce() -> None:
    spec = ChannelSpec(
        backend="gloo",
        address="a",
        port=1,
        size=2,
        buffer_bytes=1,
        with_digest=False,
        token="T0K3N",
        nonce="N0NC3",
    )
    assert "T0K3N" not in repr(spec)
    assert "N0NC3" not in repr(spec)


def test_weights_that_have_changed_are_not_sent_under_their_old_version() -> None:
    actor, worker = Actor(), Worker()
    transport = transport_between(actor, worker)
    transport.send(1)
    actor.num_updates += 1
    with pytest.raises(ReplicaError, match="the actor's weights have changed since version 1"):
        worker.reload(worker)
    transport.close()


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_after_the_first_publish_only_the_delta_is_broadcast(bucket_bytes: int) -> None:
    actor, worker = Actor(), Worker()
    transport = transport_between(
        actor, worker, bucket_bytes=bucket_bytes, max_changed_fraction=0.25
    )
    # 4, 1000 and 1 floats, each rounded up to 64 bytes.
    assert (transport.send(1).num_bytes, transport.send(2).num_bytes) == (64 + 4032 + 64, 0)
    actor.weights["wide"][3] = -1.0
    actor.weights["last"][0] = 8.0
    sent = transport.send(3)
    # A place and a value of "wide", in 64 bytes each; "last" is one element, whose place would
    # double it.
    assert (sent.num_bytes, sent.fraction) == (3 * 64, pytest.approx(2 / 1005))
    assert [tensor.tolist() for cached in worker.cached for tensor in cached] == [
        tensor.tolist() for tensor in actor.weights.values()
    ]
    transport.close()


def test_server_with_other_weights_gets_full_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor, worker = Actor(), Worker()
    transport = transport_between(actor, worker, max_changed_fraction=0.25)
    transport.send(1)
    worker.version = -1
    assert transport.send(2).fraction == 1.0
    assert "rollout replica 0 does not have weights 1: sending all weights" in caplog.text
    transport.close()


def test_server_that_got_full_weights_again_accepts_deltas_afterwards() -> None:
    actor, worker = Actor(), Worker()
    transport = transport_between(actor, worker, max_changed_fraction=0.25)
    transport.send(1)
    again = Worker()
    worker.replicas = [again]
    worker.reload(again).result()
    worker.call = again.call  # type: ignore[method-assign]
    actor.weights["wide"][3] = -1.0
    assert transport.send(2).num_bytes == 2 * 64
    assert again.cached[1][0].equal(actor.weights["wide"])
    transport.close()
