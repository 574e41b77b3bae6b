"""Weights from rank 0 of the actor into the servers' workers, GPU to GPU: a broadcast, or the same memory through CUDA IPC."""

import os
import socket
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from temper_engine_api.errors import WeightError
from temper_trainer.rollout.channel import Backend, Channel, ChannelSpec, own_address
from temper_trainer.rollout.parcels import Parcel, cut, fill, layout_of
from temper_trainer.rollout.place import Place, place_of
from temper_trainer.rollout.replica import Replica, ReplicaError
from temper_trainer.rollout.vllm.sampler import VllmSampler
from temper_trainer.weight_sync.buckets import ExportsWeights
from temper_trainer.weight_sync.transport import RunsOnRanks

_channels: dict[str, Channel] = {}
"""The sender's ends in this process, by address and port: a worker's method has no place to keep one."""


class CollectiveTransport:
    """A channel between rank 0 of the actor and every worker of every server; nothing touches the host's memory.

    No copy of a set is left anywhere. A server that is started again is sent the actor's weights once more, as long as no update has
    changed them and nothing else asks the actor meanwhile (loop sync); else its death ends the run.
    """

    def __init__(
        self,
        *,
        actor: RunsOnRanks,
        sampler: VllmSampler,
        backend: Backend,
        workers_per_replica: int,
        bucket_bytes: int,
        with_digest: bool,
        may_send_again: bool,
    ) -> None:
        """Open the channel.

        Args:
            actor: its model is built.
            sampler: its servers are up.
            backend: how bytes travel.
            workers_per_replica: processes of one server that hold weights.
            bucket_bytes: largest part; a larger tensor travels alone.
            with_digest: whether checksums are compared.
            may_send_again: whether the actor can be asked at any time while completions are made.
        """
        self._actor = actor
        self._sampler = sampler
        self._backend: Backend = backend
        self._workers_per_replica = workers_per_replica
        self._bucket_bytes = bucket_bytes
        self._with_digest = with_digest
        self._may_send_again = may_send_again
        self._layout = actor.run(plan_set, [(bucket_bytes,)] * actor.num_workers)[0]
        self._sent = (-1, 0)
        """Updates of the actor at the last set, and its version."""
        self._is_whole = True
        """Whether every server is in the channel: not those that were started again."""
        self._spec = self._open(sampler.replicas)

    def send(self, version: int) -> None:
        """Broadcast every bucket, while every server receives it."""
        if not self._is_whole:
            self.close()
            self._spec, self._is_whole = self._open(self._sampler.replicas), True
        self._sent = (self._actor.num_updates, version)

        def receive(replica: Replica) -> "Future[object]":
            return replica.call("receive_set", self._layout, version)

        reload = self._send_again if self._may_send_again else None
        self._sampler.load_while(receive, lambda: self._broadcast(self._spec), version=version, reload=reload)

    def close(self) -> None:
        """Leave the channel."""
        self._leave(self._spec)

    def _open(self, replicas: Sequence[Replica]) -> ChannelSpec:
        """A channel to these servers, which leave the one that they are in."""
        address, port = self._actor.run(find_place, [()] * self._actor.num_workers)[0]
        spec = ChannelSpec(
            backend=self._backend,
            address=address,
            port=port,
            size=1 + len(replicas) * self._workers_per_replica,
            # A tensor larger than a bucket travels alone.
            buffer_bytes=max(parcel.num_bytes for parcel in self._layout),
            with_digest=self._with_digest,
        )
        joins = []
        for number, replica in enumerate(replicas):
            first_rank = 1 + number * self._workers_per_replica
            joins.append(replica.call("join_channel", {**spec.plain(), "first_rank": first_rank}))
        self._actor.run(open_sender, [(spec,)] * self._actor.num_workers)
        _wait(joins)
        return spec

    def _send_again(self, replica: Replica) -> "Future[object]":
        """The last set to one server that was started again, over a channel of its own; the others go on with what they do.

        Raises:
            ReplicaError: the actor has other weights by now.
        """
        num_updates, version = self._sent
        if self._actor.num_updates != num_updates:
            raise ReplicaError(f"{replica.name} was started again, but the actor's weights have changed since version {version}.")
        self._is_whole = False
        spec = self._open([replica])
        received = replica.call("receive_set", self._layout, version)
        self._broadcast(spec)
        self._leave(spec)
        return received

    def _broadcast(self, spec: ChannelSpec) -> None:
        self._actor.run(send_set, [(spec, self._layout, self._bucket_bytes)] * self._actor.num_workers)

    def _leave(self, spec: ChannelSpec) -> None:
        self._actor.run(close_sender, [(spec,)] * self._actor.num_workers)


def sender_place(worker: ExportsWeights, may_have_gpu: bool) -> Place:
    """Runs on the actor: where its weights are."""
    on_gpu = may_have_gpu and torch.cuda.is_available()
    return place_of(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))


def find_place(worker: ExportsWeights) -> tuple[str, int]:
    """Runs on the actor: an address and a free port where rank 0 can be met."""
    # Where ranks meet rank 0 already, servers meet it too: Ray says by which of its addresses a node is reached.
    address = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if socket.gethostname() == "localhost" else _own_address())
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
    return address, port


def plan_set(worker: ExportsWeights, bucket_bytes: int) -> list[Parcel]:
    """Runs on every rank of the actor: what each bucket will hold; the same in every set."""
    with worker.export_weights() as stream:
        layouts = [layout_of(part) for part in cut(stream, bucket_bytes=bucket_bytes)]
    return [Parcel(entries=entries, num_bytes=num_bytes, digest=None) for entries, num_bytes in layouts]


def open_sender(worker: ExportsWeights, spec: ChannelSpec) -> None:
    """Runs on every rank of the actor: rank 0 opens its end."""
    if worker.is_first:
        device = torch.device("cpu") if spec.backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
        _channels[f"{spec.address}:{spec.port}"] = Channel(spec, rank=0, device=device)


def send_set(worker: ExportsWeights, spec: ChannelSpec, layout: Sequence[Parcel], bucket_bytes: int) -> None:
    """Runs on every rank of the actor: rank 0 packs and sends bucket after bucket, the others take part in the gathering.

    Raises:
        WeightError: the weights have other names, shapes or types than when the channel was opened.
    """
    with worker.export_weights() as stream:
        if not worker.is_first:
            for _ in stream:
                pass
            return
        channel = _channels[f"{spec.address}:{spec.port}"]
        parts = iter(cut(stream, bucket_bytes=bucket_bytes))
        for parcel in layout:
            part = next(parts, None)
            if part is None or layout_of(part)[0] != parcel.entries:
                raise WeightError("the actor's weights have other names, shapes or types than when the channel was opened.")
            data = channel.buffer(parcel.num_bytes)
            fill(data, part, parcel.entries)
            channel.send(data)


def close_sender(worker: ExportsWeights, spec: ChannelSpec) -> None:
    """Runs on every rank of the actor."""
    channel = _channels.pop(f"{spec.address}:{spec.port}", None)
    if channel is not None:
        channel.close()


def _own_address() -> str:
    """The address of this machine that others reach, where it has a way to them."""
    try:
        return own_address(towards="10.255.255.255")
    except OSError:
        return "127.0.0.1"


def _wait(futures: "Sequence[Future[object]]") -> None:
    for future in futures:
        future.result()
