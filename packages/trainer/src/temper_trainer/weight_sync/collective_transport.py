"""Weights from rank 0 of the actor into the servers' workers, GPU to GPU: a broadcast, or the same memory through CUDA IPC."""

import logging
import os
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from temper_engine_api.rendezvous import TOKEN_VARIABLE, StoreServer, get_run_token
from temper_trainer.config.ranges import LOOPBACK
from temper_trainer.rollout.device_location import DeviceLocation, locate_device
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    pack_tensors,
    plan_layout,
    split_into_buckets,
)
from temper_trainer.rollout.replica import Replica, ReplicaError
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_channel import Backend, ChannelSpec, WeightChannel
from temper_trainer.rollout.weight_delta import (
    apply_tensor_delta,
    compute_delta,
    compute_tensors_digest,
)
from temper_trainer.weight_sync.buckets import WeightExporter
from temper_trainer.weight_sync.sender_state import (
    CachedWeights,
    cache_weights,
    drop_cached_weights,
    join_export,
    match_buckets,
    take_cached_weights,
)
from temper_trainer.weight_sync.transport import RankGroup, SentWeights

logger = logging.getLogger(__name__)
_servers: dict[str, StoreServer] = {}
_channels: dict[str, WeightChannel] = {}
"""The sender's stores and ends in this process, by address and port: a worker's method has no place to keep them."""


class CollectiveTransport:
    """A channel between rank 0 of the actor and every worker of every server; nothing touches the host's memory.

    No copy of a set is left anywhere. A server that is started again is sent the actor's weights once more, as long as no update has
    changed them and nothing else asks the actor meanwhile (loop sync); else its death ends the run.
    """

    def __init__(
        self,
        *,
        actor: RankGroup,
        sampler: VllmSampler,
        backend: Backend,
        workers_per_replica: int,
        bucket_bytes: int,
        with_digest: bool,
        can_resend: bool,
        max_changed_fraction: float | None = None,
        bind_address: str = LOOPBACK,
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
            max_share: send what changed, where every worker holds the last set; see ``find_changes``. None always sends everything.
            bind_address: Where rank 0 listens, unless its process group already has an address.
        """
        self._bind_address = bind_address
        self._actor = actor
        self._sampler = sampler
        self._backend: Backend = backend
        self._workers_per_replica = workers_per_replica
        self._bucket_bytes = bucket_bytes
        self._with_digest = with_digest
        self._may_send_again = can_resend
        self._max_share = max_changed_fraction
        self._key = uuid.uuid4().hex
        self._layout = actor.run(plan_buckets, [(bucket_bytes,)] * actor.num_workers)[0]
        self._sent = (-1, 0)
        """Updates of the actor at the last set, and its version."""
        self._held_version: int | None = None
        """Of the set that rank 0 keeps; None before the first one, and after one that failed."""
        self._is_whole = True
        """Whether every server is in the channel: not those that were started again."""
        self._spec = self._open(sampler.replicas)

    def send(self, version: int) -> SentWeights:
        """Broadcast every bucket, or what changed in it, while every server receives it."""
        if not self._is_whole:
            self._leave(self._spec)
            self._spec, self._is_whole = self._open(self._sampler.replicas), True
        base_version, self._held_version = self._base_version(), None
        self._sent = (self._actor.num_updates, version)
        found: list[SentWeights] = []

        def receive(replica: Replica) -> "Future[object]":
            if base_version is None:
                return self._receive_whole(replica, version)
            return replica.call("receive_delta", self._layout, base_version, version)

        def send() -> None:
            found.append(
                self._broadcast(self._spec, version)
                if base_version is None
                else self._broadcast_changes(base_version, version)
            )

        reload = self._send_again if self._may_send_again else None
        self._sampler.load_while_sending(receive, send, version=version, reload=reload)
        self._held_version = None if self._max_share is None else version
        return found[0]

    def close(self) -> None:
        """Leave the channel; rank 0 forgets the set that it sent."""
        self._leave(self._spec)
        if self._max_share is not None:
            self._actor.run(drop_cached_weights, [(self._key,)] * self._actor.num_workers)

    def _base_version(self) -> int | None:
        """Of the set that rank 0 and every worker of every server hold; None where one of them has another, or none."""
        version = self._held_version
        if version is None:
            return None
        asked = [replica.call("cached_version") for replica in self._sampler.replicas]
        for replica, held in zip(
            self._sampler.replicas, [future.result() for future in asked], strict=True
        ):
            if held != version:
                logger.warning(
                    "%s does not hold weights %d, so the whole set is sent.", replica.name, version
                )
                return None
        return version

    def _open(self, replicas: Sequence[Replica]) -> ChannelSpec:
        """A channel to these servers, which leave the one that they are in."""
        address, port, token = self._actor.run(
            open_store, [(self._bind_address,)] * self._actor.num_workers
        )[0]
        spec = ChannelSpec(
            backend=self._backend,
            address=address,
            port=port,
            size=1 + len(replicas) * self._workers_per_replica,
            # A tensor larger than a bucket travels alone.
            buffer_bytes=max(parcel.num_bytes for parcel in self._layout),
            with_digest=self._with_digest,
            token=token,
        )
        joins = []
        for number, replica in enumerate(replicas):
            first_rank = 1 + number * self._workers_per_replica
            joins.append(replica.call("join_channel", replace(spec, first_rank=first_rank)))
        self._actor.run(open_sender_channel, [(spec,)] * self._actor.num_workers)
        _wait_for_all(joins)
        return spec

    def _send_again(self, replica: Replica) -> "Future[object]":
        """The last set to one server that was started again, over a channel of its own; the others go on with what they do.

        Raises:
            ReplicaError: the actor has other weights by now.
        """
        num_updates, version = self._sent
        if self._actor.num_updates != num_updates:
            raise ReplicaError(
                f"{replica.name} was started again, but the actor's weights have changed since version {version}."
            )
        self._is_whole = False
        spec = self._open([replica])
        received = self._receive_whole(replica, version)
        self._broadcast(spec, version)
        self._leave(spec)
        return received

    def _receive_whole(self, replica: Replica, version: int) -> "Future[object]":
        if self._max_share is None:
            return replica.call("receive_weights", self._layout, version)
        return replica.call("receive_weights", self._layout, version, True)

    def _broadcast(self, spec: ChannelSpec, version: int) -> SentWeights:
        key = None if self._max_share is None else self._key
        arguments = (spec, self._layout, self._bucket_bytes, key, version)
        return self._actor.run(send_weights, [arguments] * self._actor.num_workers)[0]

    def _broadcast_changes(self, base_version: int, version: int) -> SentWeights:
        arguments = (
            self._spec,
            self._bucket_bytes,
            self._key,
            base_version,
            version,
            self._max_share,
        )
        return self._actor.run(send_delta, [arguments] * self._actor.num_workers)[0]

    def _leave(self, spec: ChannelSpec) -> None:
        self._actor.run(close_sender_channel, [(spec,)] * self._actor.num_workers)


def locate_sender(worker: WeightExporter, may_have_gpu: bool) -> DeviceLocation:
    """Runs on the actor: where its weights are."""
    on_gpu = may_have_gpu and torch.cuda.is_available()
    return locate_device(
        torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    )


def open_store(worker: WeightExporter, bind_address: str) -> tuple[str, int, str]:
    """Open the store of a channel on rank 0; runs on every rank of the actor.

    Returns:
        The address, the port and the token with which rank 0 is met.
    """
    # Where ranks meet rank 0 already, servers meet it too: Ray says by which of its addresses a
    # node is reached. Without Ray everything is on this machine.
    address = os.environ["MASTER_ADDR"] if TOKEN_VARIABLE in os.environ else bind_address
    if not worker.is_first:
        return address, 0, ""
    server = StoreServer(address, token=get_run_token())
    _servers[f"{address}:{server.port}"] = server
    return address, server.port, get_run_token()


def plan_buckets(worker: WeightExporter, bucket_bytes: int) -> list[PackedBucket]:
    """Runs on every rank of the actor: what each bucket will hold; the same in every set."""
    with worker.export_weights() as stream:
        layouts = [
            plan_layout(part) for part in split_into_buckets(stream, bucket_bytes=bucket_bytes)
        ]
    return [
        PackedBucket(entries=entries, num_bytes=num_bytes, digest=None)
        for entries, num_bytes in layouts
    ]


def open_sender_channel(worker: WeightExporter, spec: ChannelSpec) -> None:
    """Runs on every rank of the actor: rank 0 opens its end."""
    if worker.is_first:
        device = (
            torch.device("cpu")
            if spec.backend == "gloo"
            else torch.device("cuda", torch.cuda.current_device())
        )
        place = f"{spec.address}:{spec.port}"
        _channels[place] = WeightChannel(spec, rank=0, device=device, server=_servers.pop(place))


def send_weights(
    worker: WeightExporter,
    spec: ChannelSpec,
    layout: Sequence[PackedBucket],
    bucket_bytes: int,
    key: str | None = None,
    version: int = 0,
) -> SentWeights:
    """Runs on every rank of the actor: rank 0 packs and sends bucket after bucket, the others take part in the gathering.

    Args:
        worker: of the actor.
        spec: of an open channel.
        layout: what each bucket holds.
        bucket_bytes: as for the layout.
        key: under which rank 0 keeps the set, so that changes of it can be sent; None keeps nothing.
        version: of the set.

    Raises:
        WeightError: the weights have other names, shapes or types than when the channel was opened.
    """
    if not worker.is_first:
        join_export(worker)
        return SentWeights(num_bytes=0, fraction=1.0)
    channel = _channels[f"{spec.address}:{spec.port}"]
    entries = tuple(parcel.entries for parcel in layout)
    held: list[tuple[Tensor, ...]] = []
    if key is not None:
        drop_cached_weights(
            worker, key
        )  # an earlier set would stay until this one is complete: the model twice
    with worker.export_weights() as stream:
        for (part, expected), parcel in zip(
            match_buckets(stream, entries, bucket_bytes=bucket_bytes), layout, strict=True
        ):
            data = channel.bucket_buffer(parcel.num_bytes)
            pack_tensors(data, part, expected)
            channel.send(data)
            if key is not None:
                own = data.to("cpu", copy=True)
                held.append(tuple(entry.read(own) for entry in expected))
    if key is not None:
        cache_weights(key, CachedWeights(version=version, entries=entries, tensors=tuple(held)))
    return SentWeights(num_bytes=sum(parcel.num_bytes for parcel in layout), fraction=1.0)


def send_delta(
    worker: WeightExporter,
    spec: ChannelSpec,
    bucket_bytes: int,
    key: str,
    base_version: int,
    version: int,
    max_changed_fraction: float,
) -> SentWeights:
    """Runs on every rank of the actor: rank 0 compares and sends bucket after bucket, the others take part in the gathering.

    Raises:
        WeightError: rank 0 does not hold ``base_version``, or the weights have other names, shapes or types.
    """
    if not worker.is_first:
        join_export(worker)
        return SentWeights(num_bytes=0, fraction=0.0)
    channel = _channels[f"{spec.address}:{spec.port}"]
    held = take_cached_weights(key, version=base_version)
    num_bytes, num_elements = 0, 0
    with worker.export_weights() as stream:
        for place, (part, entries) in enumerate(
            match_buckets(stream, held.entries, bucket_bytes=bucket_bytes)
        ):
            changes = compute_delta(
                part, held.tensors[place], max_changed_fraction=max_changed_fraction
            )
            digest = (
                compute_tensors_digest([weight.tensor for weight in part])
                if spec.with_digest
                else None
            )
            num_bytes += channel.send_delta(changes, entries=entries, updated_digest=digest)
            num_elements += sum(change.values.numel() for change in changes)
            for target, change in zip(held.tensors[place], changes, strict=True):
                apply_tensor_delta(target, change)
    cache_weights(key, replace(held, version=version))
    return SentWeights(num_bytes=num_bytes, fraction=num_elements / held.num_elements)


def close_sender_channel(worker: WeightExporter, spec: ChannelSpec) -> None:
    """Runs on every rank of the actor."""
    channel = _channels.pop(f"{spec.address}:{spec.port}", None)
    if channel is not None:
        channel.close()


def _wait_for_all(futures: "Sequence[Future[object]]") -> None:
    for future in futures:
        future.result()
