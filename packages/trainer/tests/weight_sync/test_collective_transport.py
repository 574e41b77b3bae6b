"""A channel between an actor and a server's worker, over gloo: whatever the size of a bucket."""

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from temper_engine_api.distributed import rendezvous
from temper_engine_api.distributed.rendezvous import TokenStore, get_run_token
from temper_engine_api.errors import EngineStateError
from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.config_loading import load
from temper_trainer.rollout.packed_bucket import PackedBucket, unpack_tensors
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_channel import (
    ChannelError,
    ChannelSpec,
    WeightChannel,
    abandon_channel,
    join_channel,
)
from temper_trainer.rollout.weight_delta import apply_delta, check_updated_bucket
from temper_trainer.weight_sync.channel_sender import (
    close_sender_channel,
    open_sender_channel,
    open_store,
)
from temper_trainer.weight_sync.collective_transport import CollectiveTransport
from temper_trainer.weight_sync.transport_factory import build_transport

WEIGHTS = {"small": torch.arange(4.0), "wide": torch.arange(1000.0), "last": torch.tensor([7.0])}


class Actor:
    """One rank, in this process."""

    is_first, rank, num_updates = True, 0, 0

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


class Server:
    """A server in a thread, with the receiving end of a channel."""

    can_restart = True
    versions = {"vllm": "0.32.0"}

    def __init__(self, number: int = 0, *, dies_at_bucket: int | None = None) -> None:
        self.name = f"rollout replica {number}"
        self.num_starts = 0
        self.dies_at_bucket = dies_at_bucket
        self.is_lost_at_bucket: int | None = None
        self.dies_when_it_joins = False
        self.join_problem = ""
        self.problem_after_meeting = ""
        self._thread = ThreadPoolExecutor(1)
        self.buffer_addresses: set[int] = set()

    def start(self) -> None:
        """Forget everything, as a new process does."""
        self.num_starts += 1
        self.is_dead = False
        self.version, self.cached = -1, list[list[Tensor]]()
        self.received: dict[str, Tensor] = {}
        self.channel: WeightChannel | None = None

    def close(self) -> None: ...

    def sample(self, requests: object) -> "Future[Any]":
        """Refuse; these tests sample nothing."""
        raise NotImplementedError

    def call(self, method: str, *arguments: Any) -> "Future[object]":
        """Return the result of a server's method."""
        return self._thread.submit(self._run, method, *arguments)

    def die(self) -> None:
        """End without notice: connections close, and all calls fail from now on."""
        self.is_dead = True
        if self.channel is not None:
            self.channel.close()

    def _run(self, method: str, *arguments: Any) -> object:
        try:
            if not self.is_dead:
                return getattr(self, method)(*arguments)
        except ChannelError as error:
            if self.channel is not None:
                self.channel.close()
            raise ReplicaError(f"{self.name}: {error}") from error
        raise ReplicaError(f"{self.name} died")

    def join_channels(self, specs: list[ChannelSpec]) -> None:
        """Open this end."""
        (spec,) = self.specs = specs
        if self.dies_when_it_joins:
            self.dies_when_it_joins = False
            self.die()
        if self.join_problem or self.is_dead:
            raise ReplicaError(f"{self.name}: {self.join_problem or 'died'}")
        if problem := self.problem_after_meeting:
            self.problem_after_meeting = ""
            self.meet(spec)
            if problem == "died":
                time.sleep(0.5)  # its death is noticed later than the connections that it breaks
                self.die()
            raise ReplicaError(f"{self.name}: {problem}")
        self.channel = join_channel(spec.to_dict(), device=torch.device("cpu"))

    def meet(self, spec: ChannelSpec) -> None:
        """Meet the other members at the store, and join no further."""
        timeout = timedelta(seconds=20)
        store = TokenStore(spec.address, spec.port, token=spec.token, timeout=timeout)
        store.set(f"joined {spec.rank}", b"")
        store.wait([f"joined {rank}" for rank in range(spec.size)])
        store.close()

    def receive_weights(
        self, layout: list[PackedBucket], version: int, keep_copy: bool = False
    ) -> int:
        """Receive every bucket."""
        assert self.channel is not None
        self.cached = []
        for index, bucket in enumerate(layout):
            if index == self.dies_at_bucket:
                self.dies_at_bucket = None
                self.die()
                raise ReplicaError(f"{self.name} died")
            if index == self.is_lost_at_bucket:
                self.is_lost_at_bucket, self.is_dead = None, True
                raise ReplicaError(f"{self.name} was lost")  # its connections stay open
            data = self.channel.receive(bucket)
            self.buffer_addresses.add(data.data_ptr())
            own = {name: tensor.clone() for name, tensor in unpack_tensors(data, bucket)}
            self.received |= own
            self.cached.append(list(own.values()))
        self.version = version
        return version

    def cached_version(self) -> int:
        """Return the version of the cached weights."""
        return self.version

    def receive_delta(self, layout: list[PackedBucket], base_version: int, version: int) -> int:
        """Receive and apply the delta of every bucket."""
        assert base_version == self.version
        assert self.channel is not None
        for bucket, cached in zip(layout, self.cached, strict=True):
            changes, data = self.channel.receive_delta(bucket.entries)
            apply_delta(cached, data, bucket.entries, changes.counts)
            check_updated_bucket(
                cached, changes.updated_digest, version=version, base_version=base_version
            )
        self.version = version
        return version


def sampler_of(*servers: Server) -> VllmSampler:
    spec = ServerSpec(arguments={}, end_token_ids=(1,), max_length=64, vocab_size=41)
    return VllmSampler(servers, spec=spec, max_restarts=3)


def transport_between(
    actor: Actor,
    *servers: Server,
    bucket_bytes: int = 64,
    max_changed_fraction: float | None = None,
    can_resend: bool = True,
) -> CollectiveTransport:
    return CollectiveTransport(
        actor=actor,
        sampler=sampler_of(*servers),
        backend="gloo",
        workers_per_replica=1,
        bucket_bytes=bucket_bytes,
        with_digest=True,
        load_timeout_s=60,
        can_resend=can_resend,
        max_changed_fraction=max_changed_fraction,
    )


@pytest.mark.parametrize("load_timeout_s", [30.0, 1800.0])
def test_channel_waits_longer_than_a_server_may_load(load_timeout_s: float) -> None:
    config = load(
        [
            *("rollout=vllm", "data.train.paths=[a.jsonl]", "data.tokenizer.kind=word_level"),
            "actor.engine.model.architecture={model_type: qwen2}",
            *("weight_sync.transport=collective", "actor.engine.device=cpu"),
            f"rollout.vllm.load_timeout_s={load_timeout_s}",
        ]
    ).config
    server = Server()
    sampler = sampler_of(server)
    transport = build_transport(config, actor=Actor(), sampler=sampler)
    transport.send(1)
    # The pool ends a server that loads too long. Only then may the others give up.
    assert [spec.timeout_s for spec in server.specs] == [load_timeout_s + 60]
    transport.close()


def notice_death(transport: CollectiveTransport) -> None:
    """Call all servers, as a request would."""
    sampler = transport._sampler
    sampler.call_each("cached_version", [()] * len(sampler.replicas))


def wait_for_restart(transport: CollectiveTransport) -> None:
    (start,) = [each.start for each in transport._sampler._pool._members if each.start]
    start.result(timeout=10)


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_every_bucket_arrives_in_the_same_memory_also_a_tensor_larger_than_a_bucket(
    bucket_bytes: int,
) -> None:
    # The memory is agreed on when the channel is opened, and with cuda_ipc it can't be changed
    # afterwards.
    worker = Server()
    transport = transport_between(Actor(), worker, bucket_bytes=bucket_bytes)
    for version in (1, 2):
        transport.send(version)
        assert worker.received.keys() == WEIGHTS.keys()
        assert all(worker.received[name].equal(tensor) for name, tensor in WEIGHTS.items())
    assert len(worker.buffer_addresses) == 1
    transport.close()


def test_restarted_server_gets_the_weights_again_and_takes_part_in_the_next_publish() -> None:
    worker = Server()
    transport = transport_between(Actor(), worker)
    transport.send(1)
    worker.die()
    notice_death(transport)
    assert (worker.num_starts, worker.received.keys()) == (2, WEIGHTS.keys())
    worker.received.clear()
    transport.send(2)
    assert all(worker.received[name].equal(tensor) for name, tensor in WEIGHTS.items())
    transport.close()


def test_death_of_a_server_without_stored_weights_leaves_the_others_sampling() -> None:
    first, second = Server(0), Server(1)
    transport = transport_between(Actor(), first, second, can_resend=False)
    transport.send(1)
    first.die()
    notice_death(transport)
    sampler = transport._sampler
    assert sampler.replicas == (second,), "the first one has no weights until the next publish"
    wait_for_restart(transport)
    transport.send(2)
    assert (sampler.replicas, first.version, second.version) == ((first, second), 2, 2)
    second.die()
    notice_death(transport)
    first.die()
    with pytest.raises(ReplicaError, match="its weights are not stored anywhere"):
        notice_death(transport)
    transport.close()


@pytest.mark.parametrize(("dead", "max_changed_fraction"), [(0, None), (1, 0.25), (2, None)])
def test_server_that_dies_while_weights_are_sent_is_restarted_and_the_others_get_them(
    dead: int, max_changed_fraction: float | None
) -> None:
    servers = [Server(i) for i in range(3)]
    servers[dead].dies_at_bucket = 1
    actor = Actor()
    transport = transport_between(
        actor, *servers, can_resend=False, max_changed_fraction=max_changed_fraction
    )
    assert transport.send(1).fraction == 1.0
    others = [each for each in servers if each.num_starts == 1]
    assert len(others) == 2
    assert all(each.received["last"].equal(WEIGHTS["last"]) for each in others)
    wait_for_restart(transport)
    actor.weights["last"][0] = 8.0
    transport.send(2)
    assert [each.version for each in servers] == [2, 2, 2]
    assert [each.cached[-1][0].tolist() for each in servers] == [[8.0]] * 3
    transport.close()


def test_channel_of_a_server_that_is_lost_is_abandoned() -> None:
    # Its connections may stay open, and NCCL also misses many that close.
    server = Server()
    transport = transport_between(Actor(), server, can_resend=False)
    transport.send(1)
    (spec,) = server.specs
    seconds = timedelta(seconds=20)
    store = TokenStore(spec.address, spec.port, token=spec.token, timeout=seconds)
    assert not store.is_abandoned()
    channel, server.is_lost_at_bucket = server.channel, 1
    assert channel is not None
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(transport.send, 2)
        deadline = time.monotonic() + 20
        while not store.is_abandoned() and time.monotonic() < deadline:
            time.sleep(0.05)
        is_abandoned = store.is_abandoned()
        channel.close()
        sending.result()
    assert is_abandoned
    assert (server.num_starts, server.version) == (2, 2)
    transport.close()


def make_spec(actor: Any, *, size: int, buffer_bytes: int, timeout_s: float = 60.0) -> ChannelSpec:
    """Open the store of a channel, and return the channel's spec."""
    address, port, token = open_store(actor, "127.0.0.1")
    return ChannelSpec(
        backend="gloo",
        address=address,
        port=port,
        token=token,
        size=size,
        buffer_bytes=buffer_bytes,
        with_digest=False,
        timeout_s=timeout_s,
    )


def test_channel_that_a_server_does_not_join_is_a_problem_of_that_publish() -> None:
    actor: Any = Actor()
    spec = make_spec(actor, size=2, buffer_bytes=64, timeout_s=0.5)
    problem, absent = open_sender_channel(actor, {0: spec})
    assert problem.startswith("ranks (1,) of the weight channel cannot be reached: timed out")
    assert absent == (1,)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((spec.address, spec.port))


def test_channel_that_fails_for_another_reason_stops_listening() -> None:
    actor: Any = Actor()
    spec = make_spec(actor, size=1, buffer_bytes=-1)  # no buffer can have this size
    with pytest.raises(RuntimeError, match="negative dimension"):
        open_sender_channel(actor, {0: spec})
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((spec.address, spec.port))


def test_members_that_wait_for_a_sender_that_fails_fail_at_once() -> None:
    actor: Any = Actor()
    spec = make_spec(actor, size=3, buffer_bytes=64, timeout_s=5.0)
    waiting = replace(spec, rank=1, timeout_s=60.0)
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        member = pool.submit(join_channel, waiting.to_dict(), device=torch.device("cpu"))
        assert open_sender_channel(actor, {0: spec})[1] == (2,)
        with pytest.raises(ChannelError, match="a member cannot join"):
            member.result()
    assert time.monotonic() - begin < 30


def test_member_that_loses_another_one_while_it_connects_leaves_the_store() -> None:
    actor: Any = Actor()
    spec = make_spec(actor, size=2, buffer_bytes=64, timeout_s=5.0)
    before = set(rendezvous._OPEN_STORES)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(Server().meet, replace(spec, rank=1))
        problem, absent = open_sender_channel(actor, {0: spec})
        other.result()
    assert problem.startswith("a member of the weight channel was lost")
    assert absent == ()
    assert before == rendezvous._OPEN_STORES


def test_store_of_a_channel_that_was_not_opened_is_closed() -> None:
    actor: Any = Actor()
    spec = make_spec(actor, size=2, buffer_bytes=64)
    close_sender_channel(actor, {0: spec})
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((spec.address, spec.port))


def test_no_channel_is_open_before_the_first_weights_are_sent() -> None:
    transport = transport_between(Actor(), Server())
    assert not transport._specs
    transport.close()


def test_server_that_joins_or_leaves_changes_the_receivers_of_the_next_weights() -> None:
    first, second = Server(0), Server(1)
    transport = transport_between(Actor(), first)
    transport.send(1)
    second.start()
    transport._sampler.add(second)
    assert second.version == -1
    transport.send(2)
    assert (first.version, second.version) == (2, 2)
    transport._sampler.remove(first)
    transport.send(3)
    assert (first.version, second.version) == (2, 3)
    transport.close()


@pytest.mark.parametrize("dead", [0, 1])
def test_death_of_a_server_that_has_not_joined_a_channel_is_noticed_at_once(dead: int) -> None:
    servers = [Server(0), Server(1)]
    transport = transport_between(Actor(), *servers, can_resend=False)
    servers[dead].dies_when_it_joins = True
    begin = time.monotonic()
    transport.send(1)
    assert time.monotonic() - begin < 60, "without notice, it would be the channel's 600 s"
    assert servers[1 - dead].version == 1
    wait_for_restart(transport)
    transport.send(2)
    assert [each.version for each in servers] == [2, 2]
    transport.close()


def test_server_that_cannot_join_a_channel_leaves_and_the_others_get_the_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = Server(0), Server(1)
    transport = transport_between(Actor(), first)
    transport.send(1)
    second.start()
    second.can_restart = False
    second.join_problem = "the store at 10.0.0.1:1234 can't be reached"
    transport._sampler.add(second)
    transport.send(2)
    assert (transport._sampler.replicas, first.version, second.version) == ((first,), 2, -1)
    assert "has left the run, because it cannot receive weights" in caplog.text
    assert transport._sampler.has_refused(second)
    first.can_restart = False
    first.join_problem = second.join_problem
    transport._num_changes = -1
    with pytest.raises(ReplicaError, match="can't be reached"):
        transport.send(3)
    transport.close()


def test_server_that_fails_to_join_because_another_one_died_stays() -> None:
    servers = [Server(0), Server(1)]
    transport = transport_between(Actor(), *servers)
    for server in servers:
        server.can_restart = False
    servers[0].problem_after_meeting = "connection reset by peer"
    servers[1].problem_after_meeting = "died"
    transport.send(1)
    assert transport._sampler.replicas == (servers[0],)
    assert servers[0].version == 1
    assert not transport._sampler.has_refused(servers[0])
    transport.close()


def test_store_that_refuses_connections_is_not_waited_for() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        spec = ChannelSpec(
            backend="gloo",
            address="127.0.0.1",
            port=closed.getsockname()[1],
            size=2,
            rank=1,
            buffer_bytes=1,
            with_digest=False,
            timeout_s=20,
        )
        begin = time.monotonic()
        with pytest.raises(ChannelError, match="can't be reached"):
            join_channel(spec.to_dict(), device=torch.device("cpu"))
        with pytest.raises(EngineStateError, match="can't be reached"):
            abandon_channel(spec)
        assert time.monotonic() - begin < 8, "they tried for 20 and 10 s"


def is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def test_channel_listens_only_on_the_configured_address() -> None:
    address, port, token = open_store(cast("Any", Actor()), "127.0.0.3")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((address, port))
    assert address == "127.0.0.3"
    assert len(token) == 64
    # Another process may use a port by chance, but not that of five stores.
    ports = (open_store(cast("Any", Actor()), "127.0.0.3")[1] for _ in range(5))
    assert any(is_free("127.0.0.1", port) for port in ports)


def test_each_channel_has_a_token_of_its_own_and_rejects_that_of_the_run() -> None:
    first, second = (open_store(cast("Any", Actor()), "127.0.0.1") for _ in range(2))
    seconds = timedelta(seconds=20)
    for other in (get_run_token(), second[2]):
        with pytest.raises(EngineStateError, match="has another token"):
            TokenStore(first[0], first[1], token=other, timeout=seconds)
    assert TokenStore(first[0], first[1], token=first[2], timeout=seconds).num_keys() == 0


def test_channel_stops_listening_when_it_is_closed() -> None:
    transport = transport_between(Actor(), Server())
    transport.send(1)
    (spec,) = transport._specs.values()
    listen_address = (spec.address, spec.port)
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
    actor, worker = Actor(), Server()
    transport = transport_between(actor, worker)
    transport.send(1)
    actor.num_updates += 1
    worker.die()
    with pytest.raises(ReplicaError, match="the actor's weights have changed since version 1"):
        notice_death(transport)
    transport.close()


def test_actor_that_fails_to_send_weights_again_closes_the_new_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor, worker = Actor(), Server()
    transport = transport_between(actor, worker)
    transport.send(1)

    def fail() -> WeightStream:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(actor, "export_weights", fail)
    worker.die()
    with pytest.raises(RuntimeError, match="out of memory"):
        notice_death(transport)
    (spec,) = worker.specs
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((spec.address, spec.port))
    transport.close()


def test_stores_of_other_ranks_are_closed_if_one_cannot_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor, worker = Actor(), Server()
    transport = transport_between(actor, worker)
    listening: list[tuple[str, int]] = []

    def run_on_all(call: Callable[..., Any], *arguments: object) -> list[Any]:
        result = call(actor, *arguments)
        if call is open_store:
            listening.append(result[:2])
            raise OSError("address already in use")  # of another rank
        return [result]

    monkeypatch.setattr(actor, "run_on_all", run_on_all)
    with pytest.raises(OSError, match="address already in use"):
        transport.send(1)
    for address in listening:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    assert len(listening) == 1
    transport.close()


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_after_the_first_publish_only_the_delta_is_broadcast(bucket_bytes: int) -> None:
    actor, worker = Actor(), Server()
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
    actor, worker = Actor(), Server()
    transport = transport_between(actor, worker, max_changed_fraction=0.25)
    transport.send(1)
    worker.version = -1
    assert transport.send(2).fraction == 1.0
    assert "rollout replica 0 does not have weights 1: sending all weights" in caplog.text
    transport.close()


def test_server_that_got_full_weights_again_accepts_deltas_afterwards() -> None:
    actor, worker = Actor(), Server()
    transport = transport_between(actor, worker, max_changed_fraction=0.25)
    transport.send(1)
    worker.die()
    notice_death(transport)
    actor.weights["wide"][3] = -1.0
    assert transport.send(2).num_bytes == 2 * 64
    assert worker.cached[1][0].equal(actor.weights["wide"])
    transport.close()
